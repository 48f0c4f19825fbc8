"""`python -m runner plan`: its checks, its figures compared with real runs, and its searches."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from runner import BaseTrainer
from runner.accelerator import CHIPS, Accelerator, parse_accelerator
from runner.cli.app import run_command
from runner.errors import InvalidError
from runner.plan import figures, preflight, program, report
from runner.plan.checks import Findings, check_directory
from runner.plan.program import open_machine
from runner.spec import Document, SpecLocation
from runner.storage import bucket
from tests.support.attempt import start
from tests.support.job_process import ROOT, Job, disable_compiler_optimizer, environment, run_runner
from tests.support.tiny_jobs import make_gpt, stop_after
from tests.train.test_lora import make_base_job, make_lora_job

NANO = "specs/gpt_nano.yaml"


def run_plan(*arguments: str, expected: int = 0) -> str:
    code, output = run_runner(disable_compiler_optimizer(environment(1)), "plan", *arguments, has_progress=True)
    assert code == expected, output
    assert "Traceback" not in output
    return output


def run_plan_in_process(capsys: pytest.CaptureFixture[str], *arguments: str, expected: int = 0) -> str:
    """Run the command in this process, which is faster for checks of many specs."""
    assert run_command(["plan", *arguments]) == expected
    return capsys.readouterr().out


def run_plan_json(*arguments: str, expected: int = 0) -> dict[str, Any]:
    return json.loads(run_plan(*arguments, "--json", expected=expected))


# Checks.


@pytest.mark.parametrize(
    ("mode", "key", "is_warned"), [("online", "", True), ("online", "x" * 40, False), ("offline", "", False)]
)
def test_a_missing_key_of_wandb_is_a_warning(
    mode: str,
    key: str,
    is_warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    output = run_plan_in_process(capsys, NANO, "--quick", "--set", f"logging.wandb={mode}")
    assert ("this machine has no key of W&B" in output) == is_warned
    assert "would run" in output


@pytest.mark.parametrize("price", [None, 1.2])
def test_a_quick_plan_prints_the_first_estimate_with_its_costs(
    price: float | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [] if price is None else ["--set", f"topology.price.dollars_per_chip_hour={price}"]
    output = run_plan_in_process(capsys, NANO, "--quick", "--topology", "v5e-4", *words)
    assert "first estimate" in output
    assert re.search(r"time of the run +\d", output)
    assert ("4 chips at $1.20 an hour" in output) == (price is not None)
    assert "goodput" not in output


def test_a_quick_plan_leaves_the_deadline_of_buckets_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    deadline_seconds = bucket.CALL_SECONDS
    assert "would run" in run_plan_in_process(capsys, NANO, "--quick")
    assert deadline_seconds == bucket.CALL_SECONDS


def test_all_problems_of_a_spec_are_listed_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "bad.yaml"
    text = (ROOT / NANO).read_text()
    text = (
        text.replace("total_steps", "total_stepz")
        .replace("keep_last", "keep_lasst")
        .replace("wandb: dis", "wandb: diz")
    )
    spec.write_text(text)
    output = run_plan_in_process(capsys, str(spec), "--topology", "v5e-17", expected=2)
    for problem in ("keep_lasst", "total_stepz", "v5e has no slice of 17 chips; slices: v5e-1, v5e-4, v5e-8, v5e-16"):
        assert problem in output
    assert output.startswith("would not run: ")


def test_data_directory_and_mesh_are_checked_independently(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    options = ["config.data.source=nowhere/*.txt", "topology.mesh={data: 3}", f"directory={tmp_path}/file/run"]
    words = (word for option in options for word in ("--set", option))
    output = run_plan_in_process(capsys, NANO, "--topology", "cpu-4", *words, expected=2)
    assert output.count("\nproblem: ") == 3
    for problem in (
        "nowhere/*.txt",
        "data 3 x fsdp 1 x tensor 1 does not use exactly the 4 devices",
        "cannot be written",
    ):
        assert problem in output


@pytest.mark.parametrize(
    "accelerator", ["v9-16", *(pytest.param(name, marks=pytest.mark.soak) for name in ("v5e", "h200", "2xv5p-12"))]
)
def test_an_unknown_topology_is_reported_with_the_known_ones(
    accelerator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run_plan_in_process(capsys, str(ROOT / "specs/counter.yaml"), "--topology", accelerator, expected=2)
    (problem,) = [line for line in output.splitlines() if line.startswith("problem: ")]
    assert "topology" in problem
    assert any(name in problem for name in ("v5e", "h200-8", "v5p-8"))


def test_8bit_matmuls_that_a_chip_lacks_are_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["config.precision.matmul=float8", f"directory={tmp_path}/run"]
    words = (word for option in options for word in ("--set", option))
    output = run_plan_in_process(capsys, NANO, "--topology", "a100-8", *words, expected=2)
    (problem,) = [line for line in output.splitlines() if line.startswith("problem: ")]
    assert "config.precision.matmul=float8: a100 has no matmuls of float8" in problem
    assert "use int8 or compute, or one of tpu7x, h100" in problem


@pytest.mark.parametrize(
    "name", ["cpu-100000", "h100-8193", "5xv5p-2048", "3xtpu7x-2048", "99999999999999999999xv5e-4"]
)
def test_more_devices_than_can_be_simulated_are_rejected(name: str) -> None:
    with pytest.raises(InvalidError, match=rf"^{name}: \d+ devices; .* at most 8192"):
        open_machine(parse_accelerator(name))


@pytest.mark.parametrize("name", ["h200-13", "gb200-7", "a100-9"])
def test_gpus_that_do_not_divide_over_nodes_are_rejected(name: str) -> None:
    with pytest.raises(InvalidError, match=rf"^{name}: \d+ GPUs do not divide over 2 nodes of (8|4)$"):
        open_machine(parse_accelerator(name))


def test_the_largest_slice_of_every_chip_can_be_simulated() -> None:
    for name, chip in CHIPS.items():
        largest = Accelerator(name, chip.slice_sizes[-1]).num_devices
        assert largest is not None
        assert largest <= program._MAX_FAKE_DEVICES


@pytest.mark.soak
def test_the_plan_names_the_resume_step_and_the_owner_of_the_directory(tmp_path: Path) -> None:
    job = Job("specs/counter.yaml", tmp_path / "run", ("config.total_steps=20", "checkpoint.every_steps=5"))
    assert "begins at step 0" in run_plan(*job.arguments)
    job.finish()
    assert "nothing: the run is done" in run_plan(*job.arguments)
    assert "resumes step 20 of 30" in run_plan(*job.arguments, "--set", "config.total_steps=30")
    output = run_plan(*job.arguments, "--set", "name=other", expected=2)
    assert "belongs to the job 'counter', this one is 'other'" in output


@pytest.mark.parametrize("is_adapter", [pytest.param(False, marks=pytest.mark.soak), True])
def test_the_plan_names_the_resume_step_of_a_trainer(is_adapter: bool, tmp_path: Path) -> None:
    base = make_base_job("lookup", tmp_path / "base")
    base()

    def make() -> BaseTrainer:
        there = tmp_path / "run"
        return make_lora_job("lookup", there, tmp_path / "base") if is_adapter else make_base_job("lookup", there)

    stop_after(make(), 2)
    findings = Findings()
    assert "resumes step 2 of " in str(check_directory(make(), True, findings))
    assert findings.problems == []


def test_a_save_longer_than_the_grace_period_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"directory={tmp_path}", "config.width=1000000", "checkpoint.grace_seconds=0.001"]
    output = run_plan_in_process(
        capsys, "specs/counter.yaml", *(word for option in options for word in ("--set", option))
    )
    assert "warning: " in output
    assert "checkpoint.grace_seconds" in output


@pytest.mark.soak
# Figures.
def test_the_planned_program_equals_that_of_several_processes(tmp_path: Path) -> None:
    options = ("config.train.total_steps=4", "config.schedule.warmup_steps=2", "config.eval.every_steps=null")
    options += ("config.model.layers=2",)
    job = Job(NANO, tmp_path / "run", options, devices=2)
    planned = run_plan_json(*job.arguments, "--topology", "cpu-4")["plan"]
    job.launch(2).expect(0)
    (event,) = job.events("compile")
    assert event["program"] == planned["compilation"]["program"]["value"]


@pytest.mark.soak
@pytest.mark.parametrize("mesh", [{"data": 1, "fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_planned_arguments_equal_the_bytes_held_by_the_run(mesh: dict[str, int], tmp_path: Path) -> None:
    job = make_gpt(tmp_path / "run", **{"topology.mesh": mesh})
    start(job)
    device = jax.devices()[3]
    held = [
        shard.data.nbytes
        for array in jax.tree.leaves((job.state, job.batch()))
        for shard in array.addressable_shards
        if shard.device == device
    ]
    assert job.compiled.memory.arguments == sum(held)  # without dropout, the key is not an argument
    job.checkpointer.close()


PEAK_PROGRAM = """
import ctypes, sys
from pathlib import Path
import jax
from runner.plan.program import open_machine
from runner.accelerator import parse_accelerator
from runner.spec import load_document, validate_spec
from experiments.gpt import PretrainGPT

machine = open_machine(parse_accelerator("cpu-2"))
options = ["config.model={layers: 4, heads: 4, width: 256}", "config.data.sequence_length=256",
           "config.train.global_batch_examples=64", "config.train.micro_batch_examples=32", "topology.accelerator=any"]
document = load_document("specs/gpt_nano.yaml", options)
job = PretrainGPT(validate_spec(document), document)
job.train_setup = job.setup_builder.build(machine.devices)
job._compiled = job.setup_builder.compile(job.train_setup, machine.hbm_bytes)


def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


job.init_state()
ctypes.CDLL("libc.so.6").malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
state = job.init_state()
for step in range(2):
    batch = job.compiled.layout.batch(job.dataset, "train", step)
    state, loss, _ = job.compiled.executable(state, batch, job.train_setup.key)
    jax.block_until_ready(loss)
print(resident("VmHWM") - before, job.compiled.memory.needed * 2)
"""


@pytest.mark.soak
def test_the_peak_memory_of_a_step_is_as_planned() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PEAK_PROGRAM],
        cwd=ROOT,
        env=disable_compiler_optimizer(environment(1)),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    measured, planned = map(int, result.stdout.split())
    assert planned > 500e6
    assert measured == pytest.approx(planned, rel=0.1)


# Progress.


def test_slow_phases_are_reported_with_their_elapsed_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "_PROGRESS_SECONDS", 0.01)
    told = threading.Event()
    monkeypatch.setattr(figures, "warn", lambda line: (print(line), line.endswith(" s") and told.set()))
    with figures.report_progress("compiling x"):
        assert told.wait(60)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "compiling x ..."
    assert lines[1] == "compiling x: 0 s"


@pytest.mark.parametrize(
    ("topology", "needed"),
    [
        ("v5e-4", ("1 example(s) per device", "a step takes", "bound by", "fits")),
        ("cpu-4", ("state ", "the time of a step is unknown")),
    ],
)
@pytest.mark.soak
@pytest.mark.usefixtures("libtpu")
def test_a_first_estimate_is_printed_before_compiling(topology: str, needed: tuple[str, ...]) -> None:
    words = [sys.executable, "-m", "runner", "plan", NANO, "--topology", topology, "--json"]
    words += ["--set", "config.model.vocabulary_size=256", "--set", "config.train.micro_batch_examples=1"]
    result = subprocess.run(
        words, cwd=ROOT, env=disable_compiler_optimizer(environment(1)), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["problems"] == []
    first, second = [line for line in result.stderr.splitlines() if line.startswith(("first estimate", "compiling"))][
        :2
    ]
    assert all(part in first for part in needed), first
    assert second == f"compiling gpt_nano for {topology} ..."


# Suggestions and searches.

SMALL_CHIP_PROGRAM = """
import dataclasses, sys
from runner import accelerator

chip = accelerator.CHIPS["v5e"]
speeds = dataclasses.replace(chip.speeds, hbm_bytes=int(sys.argv.pop(1)))
accelerator.CHIPS["v5e"] = dataclasses.replace(chip, speeds=speeds)
from runner.cli.app import main
sys.exit(main(["plan", *sys.argv[1:]]))
"""


# A `sitecustomize` of the process and of those that it starts.
WITHOUT_LIBTPU = """
import importlib.util

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "libtpu" else find_spec(name, package)
"""


def plan_small_chip(directory: Path, hbm_bytes: float, *arguments: str, expected: int = 0) -> str:
    """Return a plan for a v5e with little memory, on simulated CPU devices."""
    (directory / "sitecustomize.py").write_text(WITHOUT_LIBTPU)
    words = [sys.executable, "-c", SMALL_CHIP_PROGRAM, str(int(hbm_bytes)), *arguments]
    variables = disable_compiler_optimizer(environment(1))
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(directory), variables.get("PYTHONPATH"))))
    result = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert result.returncode == expected, result.stdout + result.stderr
    return result.stdout


@pytest.mark.soak
def test_a_job_that_does_not_fit_gets_a_suggestion_that_fits(tmp_path: Path) -> None:
    options = ("config.model.width=128", "config.model.layers=2", f"directory={tmp_path / 'run'}")
    spec = (NANO, "--topology", "v5e-4", *(word for option in options for word in ("--set", option)))
    hbm_bytes = 4e6
    output = plan_small_chip(tmp_path, hbm_bytes, *spec, expected=2)
    assert "XLA for 4 fake CPU devices, since libtpu is not installed (pip install -e '.[tpu-plan]')" in output
    assert "does not fit" not in output
    assert re.search(r"state and batch alone need [\d.]+ MiB on each device and 3.43 MiB are there", output)
    assert "largest arrays of a device\n  f32[" in output
    found = json.loads(plan_small_chip(tmp_path, hbm_bytes, *spec, "--search", "--json"))
    first = found[0]
    assert first["needed_bytes"] <= 0.9 * hbm_bytes
    overrides = [
        f"{key}={json.dumps(value)}" for key, value in first["settings"].items() if key != "topology.accelerator"
    ]
    confirmed = plan_small_chip(
        tmp_path, hbm_bytes, *spec, *(word for option in overrides for word in ("--set", option))
    )
    assert confirmed.startswith("would run\n")


@pytest.mark.parametrize(
    ("needed_bytes", "is_lower_bound", "problems", "warnings"),
    [(80e9, False, 0, 0), (100e9, False, 1, 0), (None, False, 0, 1), (80e9, True, 0, 1), (100e9, True, 1, 0)],
)
def test_without_the_chips_compiler_arithmetic_decides(
    needed_bytes: float | None, is_lower_bound: bool, problems: int, warnings: int
) -> None:
    findings = Findings()
    job: Any = SimpleNamespace(document=Document({}, {(): SpecLocation("x")}))
    machine: Any = SimpleNamespace(usable_bytes=90e9, compiler="XLA for 4 fake CPU devices", accelerator="v5p-4")
    given = {"needed_bytes": needed_bytes, "micro_batch_examples": 1, "is_lower_bound": is_lower_bound}
    first: Any = None if needed_bytes is None else SimpleNamespace(**given)
    preflight.check_memory_by_arithmetic(job, first, machine, findings)
    assert (len(findings.problems), len(findings.warnings)) == (problems, warnings)
    assert all("by arithmetic" in line for line in findings.problems)
    assert all("unknown" in line for line in findings.warnings)


# Stages.

# What a stage sets, and figures of its section that follow.
PLANNED_STAGES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "mixture": (
        {"data.mixture": [{"name": "docs", "source": "README.md"}, {"name": "code", "source": "python-stdlib"}]},
        {"tokens in a step": 512, "tokens of the stage": 3072},
    ),
    "batch": ({"train.global_batch_examples": 16}, {"tokens in a step": 1024, "tokens of the stage": 6144}),
    "sequence length": ({"data.sequence_length": 128}, {"tokens in a step": 1024, "tokens of the stage": 6144}),
    "rope": ({"model.rope": {"theta": 1e6}}, {"tokens in a step": 512}),
    "schedule": ({"schedule": {"name": "linear"}}, {"tokens in a step": 512}),
}
SMALL_STAGED = {
    "config.model": {"layers": 1, "heads": 2, "width": 32, "mlp_width": 64},
    "config.train": {"total_steps": 20, "global_batch_examples": 8},
    "config.schedule": {"name": "constant", "warmup_steps": 2},
}


def list_settings(directory: Path, **settings: Any) -> list[str]:
    """Return the arguments of a small job with these values."""
    given = SMALL_STAGED | {"directory": str(directory)} | settings
    pairs = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    return ["specs/llama_nano.yaml", *(word for pair in pairs for word in ("--set", pair))]


@pytest.mark.soak
@pytest.mark.parametrize("case", PLANNED_STAGES)
def test_each_stage_is_planned_and_the_times_add_up(tmp_path: Path, case: str) -> None:
    values, expected = PLANNED_STAGES[case]
    words = list_settings(tmp_path / "run", **{"config.stages": [{"from_step": 14, "set": values}]})
    found = json.loads(plan_small_chip(16e9, *words, "--topology", "v5e-4", "--json"))
    assert found["problems"] == []
    first, stage, whole = (found["plan"][name] for name in ("roofline of a step", "stage 1", "stages"))
    assert {name: stage[name]["value"] for name in expected} == expected
    assert (stage["from step"]["value"], stage["steps"]["value"]) == (14, 6)
    assert first["time to the end"]["value"] == pytest.approx(14 * first["lowest step time"]["value"])
    assert stage["time to the end"]["value"] == pytest.approx(6 * stage["lowest step time"]["value"])
    times = first["time to the end"]["value"] + stage["time to the end"]["value"]
    assert whole["time to the end"]["value"] == pytest.approx(times)
    assert whole["tokens"]["value"] == 14 * 512 + 6 * stage["tokens in a step"]["value"]


def test_stages_are_planned_before_their_text_is_tokenised(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "some words"}\n' * 2000)
    tokenise = {"tokenizer": {"kind": "bytes"}, "separator": 0}
    data = {"source": str(tmp_path / "text.jsonl"), "sequence_length": 16, "tokenise": tokenise}
    stages = [{"from_step": 14, "set": {"train.global_batch_examples": 16}}]
    words = list_settings(tmp_path / "run", **{"config.stages": stages, "config.data": data, "config.eval": {}})
    code, output = run_runner(environment(1), "plan", *words, "--json", has_progress=True)
    assert code == 0, output
    found = json.loads(output)["plan"]
    assert found["stage 1"]["tokens in a step"]["value"] == 16 * 16
    assert found["stage 1"]["needed"]["value"] > 0
    assert found["stages"]["tokens"]["value"] == (14 * 8 + 6 * 16) * 16
    assert not (tmp_path / "run").exists()


UNFIT_STAGES: dict[str, tuple[dict[str, Any], float, str]] = {
    "does not divide": ({"train.global_batch_examples": 6}, 16e9, "6"),
    "does not fit": ({"data.sequence_length": 8192}, 4e6, "there"),
    "changes the state": ({"optimizer.groups": [{"pattern": "*kernel", "frozen": True}]}, 16e9, "shape of the state"),
}


@pytest.mark.soak
@pytest.mark.parametrize("case", UNFIT_STAGES)
def test_a_later_stage_that_cannot_run_is_named(tmp_path: Path, case: str) -> None:
    values, hbm_bytes, words = UNFIT_STAGES[case]
    stages = [{"from_step": 5, "set": {"optimizer.weight_decay": 0.2}}, {"from_step": 10, "set": values}]
    given = list_settings(tmp_path / "run", **{"config.stages": stages})
    output = plan_small_chip(tmp_path, hbm_bytes, *given, "--topology", "v5e-4", expected=2)
    problems = [line for line in output.splitlines() if line.startswith("problem: ")]
    assert problems, output
    assert all(line.startswith("problem: stage 2: ") and words in line for line in problems)
    assert output.startswith("would not run: ")


@pytest.mark.soak
def test_a_batch_ramp_is_planned_as_stages(tmp_path: Path) -> None:
    ramp = {"from_examples": 4, "increments": 2, "over_steps": 10}
    train = SMALL_STAGED["config.train"] | {"global_batch_examples": 12, "batch_ramp": ramp}
    plan = run_plan_json(*list_settings(tmp_path / "run", **{"config.train": train}))["plan"]
    assert plan["stages"]["examples in a step"]["note"] == "4 from step 0, 8 from step 5, 12 from step 10"
    assert [plan[f"stage {number}"]["tokens of the stage"]["value"] for number in (1, 2)] == [5 * 512, 10 * 768]
    assert plan["stages"]["tokens"]["value"] == 64 * (5 * 4 + 5 * 8 + 10 * 12)
    assert "time to the end" not in plan["stages"]  # of a device without peak figures


def test_the_courses_of_rate_and_batch_cover_the_whole_run() -> None:
    def make_stage(start: int, stop: int, batch: int) -> Any:
        config = SimpleNamespace(train=SimpleNamespace(global_batch_examples=batch))
        return SimpleNamespace(start=start, stop=stop, config=config)

    stages = [make_stage(0, 4, 1), make_stage(4, 6, 4), make_stage(6, 8, 8)]
    section = figures.Section("stages")
    report.add_courses(section, stages, [lambda step: 8.0, lambda step: 4.0, lambda step: 8.0 - step])
    assert section["learning rate"] == "\u2588\u2588\u2588\u2588\u2584\u2584\u2582\u2581"
    assert section["examples in a step"] == "\u2581\u2581\u2581\u2581\u2584\u2584\u2588\u2588"
    notes = [figure.note for figure in section.figures]
    assert notes == [
        "0 to 8: 8 from step 0, 4 from step 4, 2 from step 6",
        "1 from step 0, 4 from step 4, 8 from step 6",
    ]


AUTO_OPTIONS = (
    "--set",
    "config.precision.compute=bfloat16",
    "--set",
    "config.model.layers=2",
    "--chips",
    "auto",
    "--hours",
)


@pytest.mark.soak
def test_the_search_finds_the_smallest_slice_that_meets_the_deadline() -> None:
    assert "v5e-1:" in plan_small_chip(16e9, NANO, "--topology", "v5e-256", *AUTO_OPTIONS, "1")


@pytest.mark.soak
def test_the_search_reports_if_no_slice_meets_the_deadline() -> None:
    output = subprocess.run(
        [
            sys.executable,
            "-c",
            SMALL_CHIP_PROGRAM,
            "16000000000",
            NANO,
            "--topology",
            "v5e-256",
            *AUTO_OPTIONS,
            "1e-12",
        ],
        cwd=ROOT,
        env=disable_compiler_optimizer(environment(1)),
        capture_output=True,
        text=True,
    )
    assert output.returncode == 2
    assert "no slice of v5e ends gpt_nano in 1e-12 hours" in output.stderr
    assert "needs 0.0 hours" not in output.stderr
