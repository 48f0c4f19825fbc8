"""Plans for NVIDIA GPUs, compiled by XLA for GPU on a machine without any."""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from runner.accelerator import CHIPS, parse_accelerator
from runner.errors import InvalidError
from runner.plan import gpu
from runner.plan.gpu import CudaVersions, count_attention_workspace, describe_gpu
from tests.support.job_process import ROOT, WHOLE_RUN_DEADLINE_SECONDS, environment, run_runner

NANO = "specs/gpt_nano.yaml"
GPUS = [name for name, chip in CHIPS.items() if chip.processors is not None]
# Heads of a width that cuDNN supports, in its precision.
CUDNN_OPTIONS = ("config.precision.compute=bfloat16", "config.model.width=128", "config.model.heads=2")
FORMS = """
import sys

import jax, jax.numpy as jnp

from runner.accelerator import parse_accelerator
from runner.plan.gpu import open_gpu_devices
from runner.parallel.mesh import make_mesh
from experiments.model.platform import compute_capability

jax.config.update("jax_platforms", "cpu")
for name in sys.argv[1:]:
    devices, compiler = open_gpu_devices(parse_accelerator(name))
    with jax.set_mesh(jax.sharding.Mesh(devices, ("all",))):
        print(name, len(devices), devices[-1].process_index, compute_capability(), devices[0].device_kind, sep="|")
"""


def plan(*words: str, options: tuple[str, ...] = (), expected: int = 0) -> dict[str, Any]:
    """Return the sections of a plan of `NANO`."""
    words = (*words, *(word for option in options for word in ("--set", option)))
    code, output = run_runner(
        environment(1),
        "plan",
        NANO,
        *words,
        "--json",
        deadline_seconds=WHOLE_RUN_DEADLINE_SECONDS,
        has_progress=True,
    )
    assert code == expected, output
    found: dict[str, Any] = json.loads(output)["plan"]
    return found


def get_value(sections: dict[str, Any], section: str, name: str) -> Any:
    return sections[section][name]["value"]


def test_the_description_of_each_gpu_has_what_its_driver_reports() -> None:
    assert len(GPUS) >= 7
    for name in GPUS:
        chip = CHIPS[name]
        assert chip.processors is not None
        assert chip.speeds is not None
        versions = CudaVersions((12, 8, 1), (9, 11, 0))
        text = describe_gpu(chip.processors, int(chip.speeds.hbm_bytes_per_second), versions)
        assert (
            "dnn_version_info { major: 9 minor: 11 patch: 0 } runtime_version { major: 12 minor: 8 patch: 1 }" in text
        )
        major, minor = chip.processors.compute_capability
        assert f"cuda_compute_capability {{ major: {major} minor: {minor} }}" in text
        assert f"core_count: {chip.processors.num_processors} " in text
        assert text.count("{") == text.count("}")
        assert any(chip.processors.name.lower().startswith(kind) for kind in chip.device_kinds)
        # The driver keeps little of the memory, and the catalogue is careful.
        assert 0.9 < chip.speeds.hbm_bytes / chip.processors.memory_bytes < 1.02


@pytest.mark.parametrize(
    ("topology", "scores", "is_deterministic", "wanted"),
    [
        ("h100-8", (16, 12, 1024, 1024), True, 2 * 16 * 12 * 1024 * 1024),
        ("h100-8", (16, 12, 1000, 1000), True, 2 * 16 * 12 * 1024 * 1024),  # rounded up
        ("h200-1", (4, 32, 2048, 2048), True, 2**30),
        ("h200-1", (4, 32, 2048, 2048), False, 0),  # more than cuDNN takes where it may add in any order
        ("h200-1", (1, 8, 2048, 2048), False, 2**26),
        ("a100-8", (4, 32, 2048, 2048), True, 0),
        ("b200-8", (4, 32, 2048, 2048), True, 0),
    ],
)
def test_the_workspace_of_attention_is_counted_where_cudnn_has_one(
    topology: str, scores: tuple[int, ...], is_deterministic: bool, wanted: int
) -> None:
    dims = ", ".join(f'"{size}"' for size in scores)
    flag = ', "force_deterministic": true' if is_deterministic else ""
    config = f'{{"intermediate_tensor_shape": {{"element_type": "BF16", "dimensions": [{dims}]}}{flag}}}'
    small = config.replace(dims, '"1", "1", "64", "64"')
    text = "\n".join(
        f'%y = (bf16[1], u8[0]) custom-call(%x), custom_call_target="__cudnn$fmha{name}", backend_config={each}'
        for name, each in (("Softmax", config), ("SoftmaxBackward", small), ("ScaleBiasSoftmaxBackward", config))
    )
    # On a GPU the workspace that cuDNN has asked for is among the arrays.
    assert count_attention_workspace(text.replace("u8[0]", "u8[4096]"), parse_accelerator(topology)) == 0
    found = count_attention_workspace(text, parse_accelerator(topology))
    assert found == (wanted or (8192 if topology == "h200-1" else 0))


@pytest.mark.parametrize(
    ("installed", "found", "words"),
    [
        ({}, ((12, 9, 0), (9, 10, 2)), ""),
        (
            {"nvidia-cuda-runtime-cu12": "12.6.77", "nvidia-cudnn-cu12": "9.17.1.4"},
            ((12, 6, 77), (9, 17, 1)),
            " with CUDA 12.6.77 and cuDNN 9.17.1, as installed",
        ),
        (
            {"nvidia-cuda-runtime": "13.0.96"},
            ((13, 0, 96), (9, 10, 2)),
            " with CUDA 13.0.96 and cuDNN 9.10.2, as installed",
        ),
    ],
    ids=str,
)
def test_a_plan_is_for_the_cuda_that_is_installed(
    installed: dict[str, str], found: tuple[Any, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_versions(monkeypatch, installed)
    versions = CudaVersions.find()
    assert (versions.cuda, versions.cudnn) == found
    assert str(versions) == words


def test_a_plan_names_a_cudnn_that_jax_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_versions(monkeypatch, {"nvidia-cudnn-cu12": "9.1.0.70"})
    with pytest.raises(
        InvalidError, match=r"cuDNN 9\.1\.0 is installed, and JAX \S+ needs 9\.\d+ or newer on a GPU; pip"
    ):
        CudaVersions.find()


def fake_versions(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    """Let the packages of NVIDIA be installed in these versions alone."""

    def find(package: str) -> str:
        if package not in installed:
            raise metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(gpu.metadata, "version", find)


def test_devices_stand_for_gpus_of_each_kind() -> None:
    names = [f"{name}-{number}" for name in GPUS for number in (1, 16)]
    done = subprocess.run(
        [sys.executable, "-c", FORMS, *names], cwd=ROOT, env=environment(1), capture_output=True, text=True, check=True
    )
    found = {line.split("|")[0]: line.split("|")[1:] for line in done.stdout.splitlines()}
    assert list(found) == names
    for name, (number, last_process, capability, kind) in found.items():
        accelerator = parse_accelerator(name)
        assert accelerator is not None
        assert (int(number), int(last_process) + 1) == (accelerator.num_devices, accelerator.hosts_per_slice)
        assert accelerator.chip.processors is not None
        assert (capability, kind) == (
            str(accelerator.chip.processors.compute_capability),
            accelerator.chip.processors.name,
        )


def test_a_plan_for_gpus_uses_their_compiler_and_their_attention() -> None:
    # The step computes by itself along `data`, where JAX cannot split the kernel of cuDNN over `fsdp`.
    found = plan("--topology", "h200-8", "--profile", options=(*CUDNN_OPTIONS, "topology.mesh={data: 2, fsdp: 4}"))
    assert get_value(found, "job", "compiler").startswith("XLA for GPU of jax ")
    assert get_value(found, "job", "devices") == "h200-8: 8 x NVIDIA H200 on 1 host"
    assert any("over fsdp" in name for name in found["collectives of a step"])
    assert get_value(found, "kernels", "attention").startswith("library")
    assert get_value(found, "memory of a device", "workspace of cuDNN") > 0
    low = get_value(found, "forecast of a step", "at the rooflines of its ops")
    high = get_value(found, "forecast of a step", "at typical shares of the peaks")
    assert 0 < low < high


@pytest.mark.soak
@pytest.mark.parametrize("topology", [f"{name}-{number}" for name in GPUS for number in (1, 16)])
@pytest.mark.parametrize("mesh", ["{data: auto}", "{data: auto, tensor: 2}", "{data: auto, fsdp: 2}"])
def test_each_gpu_is_planned_for(topology: str, mesh: str) -> None:
    number = int(topology.rpartition("-")[2])
    mesh = mesh if number > 1 else "{data: auto}"
    options = (*CUDNN_OPTIONS, f"topology.mesh={mesh}", "config.train.global_batch_examples=32")
    found = plan("--topology", topology, "--profile", options=options)
    assert get_value(found, "job", "compiler").startswith("XLA for GPU of jax ")
    assert (number == 1) == ("collectives of a step" not in found or not found["collectives of a step"])


@pytest.mark.parametrize("word", ["h200-7x", "h900-8", "h100-3000000"])
def test_an_unknown_gpu_or_number_ends_with_one_line(word: str) -> None:
    code, output = run_runner(environment(1), "plan", NANO, "--topology", word)
    assert code == 2, output
    assert "Traceback" not in output
    assert word in output


def test_commands_are_silent_about_absent_gpus(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runner", "plan", str(ROOT / "specs/counter.yaml"), "--set", f"directory={tmp_path}"],
        cwd=tmp_path,
        env=environment(1) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


WITHOUT_PLUGIN = """
import importlib.util

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if "_plugin" in name else find_spec(name, package)
"""


def test_a_plan_without_the_compiler_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_PLUGIN)
    done = subprocess.run(
        [sys.executable, "-m", "runner", "plan", NANO, "--topology", "h100-2", "--json"],
        cwd=ROOT,
        env=environment(1) | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)["plan"]
    compiler = get_value(found, "job", "compiler")
    assert re.fullmatch(
        r"XLA for 2 fake CPU devices, since XLA for GPU is not installed \(pip .*\[gpu-plan\]'\)", compiler
    )
    assert jnp.isfinite(get_value(found, "roofline of a step", "lowest step time"))


QUIET = """
import os

from runner.cli.app import _import

_import("runner.jax_internals")
print(os.environ["TF_CPP_MIN_LOG_LEVEL"])
"""


@pytest.mark.parametrize(("given", "wanted"), [("1", "2"), ("0", "0")])
def test_xla_is_quiet_about_the_gpu_that_is_not_here(given: str, wanted: str) -> None:
    variables = environment(1) | {"TF_CPP_MIN_LOG_LEVEL": given}
    done = subprocess.run([sys.executable, "-c", QUIET], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.stdout == f"{wanted}\n", done.stderr
