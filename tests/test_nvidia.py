"""Errors of GPUs, of their driver and of NCCL: which exit code, which host, which words.

No GPU is used. The texts are those of JAX 0.10.2 and its plugin for CUDA (`strings xla_cuda_plugin.so`,
`jax_plugins/xla_cuda12/__init__.py`), of openxla/xla (`cuda_status.cc`, `nccl_errors.h`), or of the reports that are
named beside them.
"""

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pynvml
import pytest

from runner import nvidia
from runner.distributed.agreement import Hosts
from runner.errors import EXIT_INVALID, EXIT_RETRYABLE, InvalidError, RetryableError
from runner.nvidia import FAULT, LIBRARY, NETWORK, NO_GPU, OTHER, classify_gpu_error, explain_gpu_error
from runner.train.checks import validate_hardware
from tests.support.job_process import ROOT, environment, read_lines, run_runner
from tests.support.tiny_jobs import make_gpt

NCCL = "INTERNAL: NCCL operation {} failed: {}. Last NCCL warning(error) log entry (may be unrelated) '{}'."
CUDA = "INTERNAL: CUDA error: {}: {}"
INITIALIZE = (
    "Unable to initialize backend 'cuda': {} (you may need to uninstall the failing plugin package, or set "
    "JAX_PLATFORMS=cpu to skip this backend.)"
)
ECC = CUDA.format(
    "Could not synchronize CUDA stream", "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered"
)
OLD_DRIVER = CUDA.format("cudaGetDevice", "CUDA driver version is insufficient for CUDA runtime version")
OUTDATED = (
    "Outdated cuDNN installation found.\nVersion JAX was built against: 90800\nMinimum supported: 908\n"
    "Installed version: 90101\nThe local installation version must be no lower than 908."
)
# Text -> kind, exit code, words of the message.
TEXTS: dict[str, tuple[str, str, int, tuple[str, ...]]] = {
    # jax-ml/jax#22747
    "NCCL, system": (
        NCCL.format("ncclCommInitRank(&comm, nranks, id, rank)", "unhandled system error", "Accept failed"),
        NETWORK,
        EXIT_RETRYABLE,
        ("NCCL lost its connections", "unhandled system error"),
    ),
    # jax-ml/jax#17399
    "NCCL, CUDA": (NCCL.format("ncclGroupEnd()", "unhandled cuda error", ""), NETWORK, EXIT_RETRYABLE, ()),
    # jax-ml/jax#19307
    "NCCL, remote": (
        "INTERNAL: external/xla/xla/service/gpu/nccl_utils.cc:216: NCCL operation async_err failed: remote process "
        "exited or there was a network error",
        NETWORK,
        EXIT_RETRYABLE,
        ("remote process exited", "NCCL_DEBUG=INFO"),
    ),
    "NCCL, stale": ("INTERNAL: [a] [ranks=0] Clique key devices=[0,1] is stale. Aborting", NETWORK, EXIT_RETRYABLE, ()),
    # jax-ml/jax#18391
    "NCCL, no library": (
        NCCL.format("ncclGetUniqueId(&id)", "Unable to load NCCL library. Multi-GPU collectives will not work.", ""),
        LIBRARY,
        EXIT_INVALID,
        ("Unable to load NCCL library", "[cuda]"),
    ),
    "memory of the GPU": (ECC, FAULT, EXIT_RETRYABLE, ("a GPU failed", "CUDA_ERROR_ECC_UNCORRECTABLE")),
    # nagadit/DeepFaceLab_Linux#89
    "memory at the start": (
        "INTERNAL: failed initializing StreamExecutor for CUDA device ordinal 5: INTERNAL: failed call to "
        "cuDevicePrimaryCtxRetain: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered",
        FAULT,
        EXIT_RETRYABLE,
        ("GPU 5 failed",),
    ),
    "link": (CUDA.format("wait", "CUDA_ERROR_NVLINK_UNCORRECTABLE: uncorrectable NVLink error"), FAULT, 76, ()),
    "lost": ("INTERNAL: CUDA:2: GPU is lost.  Reboot the system to recover this GPU", FAULT, 76, ("GPU 2 failed",)),
    # marin-community/marin#3677
    "launch": (
        CUDA.format("Could not synchronize CUDA stream", "CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"),
        OTHER,
        EXIT_RETRYABLE,
        ("cannot be used", "CUDA_ERROR_LAUNCH_FAILED"),
    ),
    # jax-ml/jax#24866
    "fabric manager": (
        INITIALIZE.format(
            CUDA.format("Failed call to cuInit", "CUDA_ERROR_SYSTEM_NOT_READY: system not yet initialized")
        ),
        OTHER,
        EXIT_RETRYABLE,
        ("system not yet initialized",),
    ),
    # jax-ml/jax#23770
    "busy": (
        "INTERNAL: failed call to cuDevicePrimaryCtxRetain: CUDA_ERROR_DEVICE_UNAVAILABLE: CUDA-capable device(s) "
        "is/are busy or unavailable",
        OTHER,
        EXIT_RETRYABLE,
        (),
    ),
    "no device opens": (INITIALIZE.format("INTERNAL: no supported devices found for platform CUDA"), OTHER, 76, ()),
    "old driver": (
        OLD_DRIVER,
        nvidia.DRIVER,
        EXIT_INVALID,
        ("driver is 470.182.03", "CUDA 12 needs 525.60.13 or newer"),
    ),
    # jax-ml/jax#22626 and #19768: the log has "Possibly insufficient driver version: 470.182.3"
    "old driver, by cuDNN": (
        "FAILED_PRECONDITION: DNN library initialization failed. Look at the errors above for more details.",
        LIBRARY,
        EXIT_INVALID,
        ("driver is 470.182.03", "needs 525.60.13"),
    ),
    # NixOS/nixpkgs#375186
    "no library": ("Unable to load cuDNN. Is it installed?", LIBRARY, EXIT_INVALID, ("Unable to load cuDNN",)),
    # rgommers/pixi-dev-scipystack#1
    "old library": (OUTDATED, LIBRARY, EXIT_INVALID, ("minimum supported: 908", "installed version: 90101")),
    # PlasmaControl/DESC#1996
    "no GPU": (
        "jaxlib/cuda/versions_helpers.cc:113: operation cuInit(0) failed: CUDA_ERROR_NO_DEVICE",
        NO_GPU,
        EXIT_INVALID,
        ("CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES is '7'"),
    ),
    "no such GPU": ("Invalid device ordinal value (3). Valid range is [0, 0].", NO_GPU, EXIT_INVALID, ("is '7'",)),
}
# Errors of the job's own program: their exit code stays.
PROGRAMS = [
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
    "RESOURCE_EXHAUSTED: Failed to allocate request for 6.27GiB (6727663616B) on device ordinal 0",
    # jax-ml/jax#25002
    CUDA.format(
        "Could not synchronize CUDA stream", "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"
    ),
    "INVALID_ARGUMENT: Executable expected parameter 0 of size 4 but got buffer with incompatible size 8",
    NCCL.format("ncclAllReduce", "invalid usage (run with NCCL_DEBUG=WARN for details)", ""),
]


@pytest.fixture(autouse=True)
def _use_a_host_with_an_old_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.182.03  Fri Feb 24 03:29:56 UTC 2023\nGCC version: 12\n"
    )
    monkeypatch.setattr(nvidia, "_DRIVER_FILE", tmp_path / "version")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-17")


def set_driver(monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...]) -> None:
    monkeypatch.setattr(nvidia, "read_driver_version", lambda: version)


@pytest.mark.parametrize("name", TEXTS)
def test_errors_of_gpus_have_a_kind_and_an_exit_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, kind, code, words = TEXTS[name]
    if kind != nvidia.DRIVER and "driver" not in name:
        set_driver(monkeypatch, (570, 86, 15))
    error = jax.errors.JaxRuntimeError(text)
    explained = explain_gpu_error(error)
    assert classify_gpu_error(error) == kind
    assert explained is not None
    assert explained.exit_code == code
    message = str(explained)
    assert message.startswith("gpu-17: ")
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("text", PROGRAMS)
def test_errors_of_the_program_keep_their_exit_code(text: str) -> None:
    assert explain_gpu_error(jax.errors.JaxRuntimeError(text)) is None


@pytest.mark.parametrize("error", [ValueError(ECC), RetryableError(ECC), MemoryError()], ids=repr)
def test_other_errors_are_no_errors_of_gpus(error: Exception) -> None:
    assert explain_gpu_error(error) is None


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  525.60.13  Wed Nov 30", (525, 60, 13)),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", (580, 65, 6)),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.124.06  Release", (570, 124, 6)),
        ("something else", None),
    ],
)
def test_the_driver_is_read(line: str, version: tuple[int, ...] | None, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(line)
    assert nvidia.read_driver_version() == version


class Process(SimpleNamespace):
    """What NVML tells of a process on a GPU."""


@pytest.mark.parametrize(
    ("pids", "gib", "visible", "held"),
    [
        ([1], 61, "all", "process 1 holds 61.0 of 79.6 GiB of GPU 0"),
        ([1], 61, "3", "process 1 holds 61.0 of 79.6 GiB of GPU 3"),
        ([os.getpid()], 61, "all", None),  # its own
        ([2**30], 61, "all", None),  # a process id of another numbering
        ([1], 0.25, "all", None),
    ],
)
def test_memory_that_another_process_holds_is_worth_another_start(
    pids: list[int], gib: float, visible: str, held: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = [Process(pid=pid, usedGpuMemory=int(gib * 2**30)) for pid in pids]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3" if visible != "all" else "0")
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: processes)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: Process(total=int(79.6 * 2**30)))
    jax.config.update("jax_cuda_visible_devices", visible)  # as jax.distributed does for one process per GPU
    try:
        found = explain_gpu_error(jax.errors.JaxRuntimeError(PROGRAMS[0]))
    finally:
        jax.config.update("jax_cuda_visible_devices", "all")
    if held is None:
        assert found is None
    else:
        assert isinstance(found, RetryableError)
        assert f"gpu-17: {held}, which this job needs" in str(found)


def test_without_nvml_nothing_is_known_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert nvidia.find_holders() == []


@pytest.mark.parametrize(
    ("has_gpu", "problem", "words"),
    [
        (True, RuntimeError("Unable to load cuDNN. Is it installed?"), "Unable to load cuDNN"),
        (True, RuntimeError(OUTDATED), "installed version: 90101"),
        (True, ImportError("libfoo.so: cannot open shared object file"), "libfoo.so"),
        (True, None, "found no GPU"),
        (False, None, None),
    ],
    ids=str,
)
def test_a_host_with_a_gpu_says_why_jax_runs_on_cpus(
    has_gpu: bool, problem: Exception | None, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_driver(monkeypatch, (570, 86, 15))
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(nvidia, "has_nvidia_gpu", lambda: has_gpu)
    monkeypatch.setattr(nvidia, "_problems", nvidia._PluginProblems())
    logger = logging.getLogger("jax._src.xla_bridge")
    monkeypatch.setattr(logger, "filters", [])
    nvidia.watch_plugins()
    printed: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", printed.append)
    logger.addHandler(handler)
    try:
        if problem is not None:
            try:
                raise problem
            except (RuntimeError, ImportError):
                # As `discover_pjrt_plugins` of JAX does.
                logger.exception(
                    "Jax plugin configuration error: Exception when calling %s.initialize()", "jax_plugins.x"
                )
        logger.warning("An NVIDIA GPU may be present on this machine, but a CUDA-enabled jaxlib is not installed.")
        logger.warning("something else")
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in printed] == ["something else"]
    found = nvidia.explain_missing_gpus()
    assert (found is None) == (words is None)
    assert words is None or words in str(found)


def test_a_job_that_is_sized_for_gpus_never_trains_on_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(nvidia, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(
        nvidia, "_problems", SimpleNamespace(errors=[RuntimeError("Unable to load cuDNN. Is it installed?")])
    )
    job = make_gpt(tmp_path / "run", **{"topology.accelerator": "h100-8"})
    with pytest.raises(
        InvalidError, match=r"sized for h100-8, here: no GPU that JAX can use: .*driver is 470"
    ) as caught:
        validate_hardware(job.spec, job.topology, job.config, Hosts.single_process())
    assert "--set" not in str(caught.value)


def test_a_job_for_any_hardware_says_that_it_leaves_the_gpus_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(nvidia, "has_nvidia_gpu", lambda: True)
    job = make_gpt(tmp_path / "run")
    with caplog.at_level(logging.WARNING, "runner"):
        validate_hardware(job.spec, job.topology, job.config, Hosts.single_process())
    assert "trains on CPUs, and this host has an NVIDIA GPU: gpu-17: " in caplog.text


def run_failing(tmp_path: Path, text: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Run a job whose step 10 raises the error, and return its exit code, its output and its ledger."""
    variables = environment(1) | {
        "FAULT": text,
        "SLURMD_NODENAME": "gpu-17",
        "RUNNER_FAULTY_HOSTS": f"{tmp_path}/faulty",
    }
    options = ("job=tests.support.faulty_jobs:FailingGpuCounter", f"directory={tmp_path}/run", "config.total_steps=20")
    words = [word for option in options for word in ("--set", option)]
    code, output = run_runner(variables, str(ROOT / "specs/counter.yaml"), *words)
    return code, output, read_lines(tmp_path / "run/events.jsonl")


def test_a_gpu_that_fails_is_recorded_with_its_host(tmp_path: Path) -> None:
    code, output, events = run_failing(tmp_path, f"{ECC} on CUDA:0")
    assert code == EXIT_RETRYABLE, output
    assert "Traceback" not in output
    assert "gpu-17: GPU 0 failed" in output
    (fault,) = [row for row in events if row["event"] == "device_fault"]
    assert (fault["step"], fault["hosts"], fault["processes"], fault["devices"]) == (9, ["gpu-17"], [0], [0])
    assert [(row["code"], "gpu-17" in row["reason"]) for row in events if row["event"] == "failed"] == [(76, True)]
    assert (tmp_path / "faulty").read_text() == "gpu-17\n"


def test_an_error_of_nccl_is_retryable_and_blames_no_gpu(tmp_path: Path) -> None:
    code, output, events = run_failing(tmp_path, TEXTS["NCCL, remote"][0])
    assert code == EXIT_RETRYABLE, output
    assert "Traceback" not in output
    assert not [row for row in events if row["event"] == "device_fault"]
    assert not (tmp_path / "faulty").exists()


def test_a_program_that_needs_too_much_memory_fails_as_before(tmp_path: Path) -> None:
    code, output, _ = run_failing(tmp_path, PROGRAMS[0])
    assert code == 1, output
    assert "RESOURCE_EXHAUSTED" in output
