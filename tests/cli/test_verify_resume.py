"""`verify-resume`: it passes jobs that resume correctly, and reports where other jobs diverge."""

import json
import re
import sys
from pathlib import Path

import pytest

from runner.cli import verify_resume
from runner.cli.verify_resume import Trial, TrialRun
from runner.errors import EXIT_FAILED, EXIT_RETRYABLE, FailedError, RetryableError
from runner.process import start_processes
from tests.support import job_process

COUNTER = ("specs/counter.yaml", "--set", "config.step_seconds=0.02", "--set", "config.width=5000")


def run_verify_resume(*arguments: str, devices: int = 1) -> tuple[int, str]:
    code, output = job_process.run_runner(
        job_process.environment(devices),
        "verify-resume",
        *arguments,
        deadline_seconds=job_process.WHOLE_RUN_DEADLINE_SECONDS,
    )
    assert "Traceback" not in output, output
    return code, output


@pytest.mark.soak
def test_a_counter_passes() -> None:
    code, output = run_verify_resume(*COUNTER, "--kills", "2")
    assert code == 0, output
    assert "SAME BITS after 2 kills: every leaf at steps 6, 12, 18, 24, 30" in output


@pytest.mark.soak
def test_a_trainer_passes() -> None:
    code, output = run_verify_resume("specs/gpt_nano.yaml", "--steps", "30", "--kills", "4")
    assert code == 0, output
    assert len(re.findall(r"kill \d of 4: -9 to process 0", output)) == 4
    for place in ("between two saves", "in a save", "while starting"):
        assert place in output
    assert "SAME BITS after 4 kills: every leaf at steps 4, 8, 12, 16, 20, 24, 28" in output


@pytest.mark.soak
def test_a_run_of_stages_passes_kills_around_its_borders() -> None:
    stages = (
        "config.stages=[{from_step: 8, set: {train.global_batch_examples: 16, data.sequence_length: 32}}, "
        "{from_step: 17, set: {schedule: {name: linear}}}]"
    )
    code, output = run_verify_resume("specs/llama_nano.yaml", "--steps", "24", "--kills", "4", "--set", stages)
    assert code == 0, output
    for place in ("before a stage", "after a stage begins", "between two saves", "in a save"):
        assert place in output
    assert "SAME BITS after 4 kills" in output


@pytest.mark.soak
def test_two_processes_pass() -> None:
    code, output = run_verify_resume(*COUNTER, "--kills", "3", "--processes", "2", "--devices-per-process", "2")
    assert code == 0, output
    assert "SAME BITS after 3 kills" in output


MOVING_JOB = (
    "specs/gpt_nano.yaml",
    *("--set", "config.train={total_steps: 40, global_batch_examples: 8, micro_batch_examples: 1}"),
    *("--set", "topology.mesh={data: auto, fsdp: 1}", "--steps", "12", "--devices-per-process", "8,1,2,4"),
)


@pytest.mark.soak
def test_a_device_independent_job_passes_with_other_devices_at_each_start() -> None:
    code, output = run_verify_resume(*MOVING_JOB, "--set", "config.train.same_bits_devices=8")
    assert code == 0, output
    assert "SAME BITS after 3 kills" in output


@pytest.mark.soak
def test_a_device_dependent_job_differs_with_other_devices() -> None:
    code, output = run_verify_resume(*MOVING_JOB)
    assert code == 1, output
    assert "DIFFERENT: step" in output


# A simulated job: each start but the last ends with the given code; the last commits step 6 and waits for a signal.
ENDING_PROGRAM = """
import json, os, pathlib, signal, sys
directory, ends = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
with (directory.parent / "starts").open("a+") as starts:
    starts.write("fresh\\n" if not directory.exists() else "resumed\\n")
    starts.seek(0)
    number = len(starts.readlines())
(directory / "checkpoints" / "3").mkdir(parents=True, exist_ok=True)
if number <= len(ends):
    if ends[number - 1] < 0:
        os.kill(os.getpid(), -ends[number - 1])
    sys.exit(ends[number - 1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
(directory / "checkpoints" / "6").mkdir()
(directory / "checkpoints" / "6" / "manifest.json").touch()
while True:
    signal.pause()
"""


@pytest.fixture
def make_ending_run(monkeypatch, tmp_path):
    """Make a trial run of a job whose first starts end with the given codes."""

    def make(ends, is_undisturbed):
        command = [sys.executable, "-c", ENDING_PROGRAM, str(tmp_path / "run"), json.dumps(ends)]
        monkeypatch.setattr(verify_resume, "start_processes", lambda _, *rest: start_processes(command, *rest))
        return TrialRun(Trial(("spec",), 6, 1, 1, None, 0), tmp_path / "run", is_undisturbed)

    return make


@pytest.mark.daily(4)
@pytest.mark.parametrize("is_undisturbed", [False, True])
@pytest.mark.parametrize("ends", [[76], [75, 76, -9], [-6], [-15]], ids=str)
def test_a_retryable_exit_is_retried_and_no_difference(
    ends: list[int], is_undisturbed: bool, make_ending_run, tmp_path: Path
) -> None:
    run = make_ending_run(ends, is_undisturbed)
    run.start()
    run.finish()
    assert run.find_newest_step() == 6
    again = "fresh" if is_undisturbed else "resumed"
    assert (tmp_path / "starts").read_text().split() == ["fresh", *[again] * len(ends)]


@pytest.mark.parametrize(
    ("ends", "kind", "code"), [([76] * 4, RetryableError, EXIT_RETRYABLE), ([76, 1], FailedError, EXIT_FAILED)], ids=str
)
def test_a_job_that_never_finishes_raises_its_own_error(ends, kind, code, make_ending_run, tmp_path) -> None:
    run = make_ending_run(ends, False)
    run.start()
    with pytest.raises(kind, match=f"^the job ended with {ends[-1]} by itself") as caught:
        run.finish()
    assert caught.value.exit_code == code
    assert len((tmp_path / "starts").read_text().split()) == len(ends)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("job", "leaf", "hint"),
    [
        ("HiddenStateCounter", "total", "state outside its pytree"),
        ("ClockDependentCounter", "total", "two undisturbed runs would differ too"),
        ("SplitKeyCounter", "values", "state outside its pytree"),
    ],
)
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_job_that_does_not_resume_is_reported_with_step_and_leaf(
    job: str, leaf: str, hint: str, processes: str
) -> None:
    code, output = run_verify_resume(
        *COUNTER, "--set", f"job=tests.support.faulty_jobs:{job}", "--processes", processes
    )
    assert code == 1, output
    found = re.search(r"DIFFERENT: step (\d+) is the first checkpoint that differs \(step (\d+) is equal\), in", output)
    assert found is not None, output
    assert int(found[1]) - int(found[2]) == 5
    assert re.search(rf"leaves: \S*{leaf}", output), output
    assert hint in output


HOOKED = (
    "specs/gpt_nano.yaml",
    *("--set", "config.model={layers: 1, heads: 1, width: 16}", "--set", "config.train.total_steps=40"),
    *("--set", "config.train.global_batch_examples=4", "--set", "config.data.sequence_length=16"),
    *("--set", "config.eval={every_steps: 5, batches: 1}", "--steps", "24"),
)


@pytest.mark.soak
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_hook_with_counters_in_the_state_passes(processes: str) -> None:
    hooks = "hooks=[tests.support.hooks:DiaryHook, {hook: runner.hook:EarlyStopping, config: {patience: 90}}]"
    code, output = run_verify_resume(*HOOKED, "--set", hooks, "--processes", processes)
    assert code == 0, output
    assert "SAME BITS after 3 kills" in output


@pytest.mark.soak
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_hook_with_hidden_state_is_reported_with_its_counter(processes: str) -> None:
    hooks = "hooks=[tests.support.hooks:HiddenStateHook]"
    code, output = run_verify_resume(*HOOKED, "--kills", "1", "--set", hooks, "--processes", processes)
    assert code == 1, output
    assert re.search(r"DIFFERENT: step \d+ is the first checkpoint that differs", output), output
    assert re.search(r"in 1 of \d+ leaves: riders\.hooks\.HiddenStateHook\.seen", output), output
    assert "state outside its pytree" in output


@pytest.mark.soak  # tests/checkpoint/test_leaves.py has a daily test of it in this process
def test_a_weakly_typed_leaf_is_reported_with_the_reason() -> None:
    code, output = run_verify_resume(*COUNTER, "--set", "job=tests.support.faulty_jobs:WeakTypeCounter")
    assert code == 1, output
    assert "scale: is weakly typed and would come back strong" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(("specs/none.yaml",), "specs/none.yaml", marks=pytest.mark.soak),
        pytest.param((*COUNTER, "--set", "config.widht=3"), "did you mean config.width?", marks=pytest.mark.soak),
        ((*COUNTER, "--steps", "4"), "3 steps more than kills"),
        ((*COUNTER, "--devices-per-process", "4,0"), "needs numbers of devices, such as 4 or 8,2,1"),
        pytest.param((*COUNTER, "--set", "config.total_steps=20"), "the job ends at step 20", marks=pytest.mark.soak),
    ],
)
def test_invalid_arguments_are_rejected(arguments: tuple[str, ...], words: str) -> None:
    code, output = run_verify_resume(*arguments)
    assert code == 2, output
    assert words in output
