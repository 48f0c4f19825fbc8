"""`verify-resume` passes jobs that can be resumed, and says where those that cannot go another way."""

import re

import pytest

from tests.support import harness

COUNTER = ("specs/counter.yaml", "--set", "config.step_seconds=0.02", "--set", "config.width=5000")


def verify(*arguments: str, devices: int = 1) -> tuple[int, str]:
    code, output = harness.command(
        harness.environment(devices), "verify-resume", *arguments, deadline_seconds=harness.WHOLE_RUN_DEADLINE_SECONDS
    )
    assert "Traceback" not in output, output
    return code, output


def test_a_counter_passes() -> None:
    code, output = verify(*COUNTER, "--kills", "2")
    assert code == 0, output
    assert "SAME BITS after 2 kills: every leaf at steps 6, 12, 18, 24, 30" in output


@pytest.mark.soak
def test_a_trainer_passes() -> None:
    code, output = verify("specs/gpt_nano.yaml", "--steps", "30", "--kills", "4")
    assert code == 0, output
    assert len(re.findall(r"kill \d of 4: -9 to process 0", output)) == 4
    for place in ("between two saves", "in a save", "while starting"):
        assert place in output
    assert "SAME BITS after 4 kills: every leaf at steps 4, 8, 12, 16, 20, 24, 28" in output


@pytest.mark.soak
def test_two_processes_pass() -> None:
    code, output = verify(*COUNTER, "--kills", "3", "--processes", "2", "--devices-per-process", "2")
    assert code == 0, output
    assert "SAME BITS after 3 kills" in output


@pytest.mark.parametrize(
    ("job", "leaf", "hint"),
    [
        ("KeepsStateOutside", "total", "state outside its pytree"),
        pytest.param("DependsOnTheClock", "total", "two undisturbed runs would differ too", marks=pytest.mark.soak),
        pytest.param("SplitsItsKey", "values", "state outside its pytree", marks=pytest.mark.soak),
    ],
)
def test_a_job_that_cannot_be_resumed_is_found_with_the_step_and_the_leaf(job: str, leaf: str, hint: str) -> None:
    code, output = verify(*COUNTER, "--set", f"job=tests.support.faulty:{job}")
    assert code == 1, output
    found = re.search(r"DIFFERENT: step (\d+) is the first checkpoint that differs \(step (\d+) is equal\), in", output)
    assert found is not None, output
    assert int(found[1]) - int(found[2]) == 5
    assert re.search(rf"leaves: \S*{leaf}", output), output
    assert hint in output


@pytest.mark.soak  # in process, daily, in tests/checkpoint/test_leaves.py
def test_a_leaf_that_becomes_weakly_typed_is_named_with_the_reason() -> None:
    code, output = verify(*COUNTER, "--set", "job=tests.support.faulty:BecomesWeak")
    assert code == 1, output
    assert "scale: is weakly typed and would come back strong" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(("specs/none.yaml",), "specs/none.yaml", marks=pytest.mark.soak),
        pytest.param((*COUNTER, "--set", "config.widht=3"), "did you mean config.width?", marks=pytest.mark.soak),
        ((*COUNTER, "--steps", "4"), "3 steps more than kills"),
        ((*COUNTER, "--set", "config.total_steps=20"), "the job ends at step 20"),
    ],
)
def test_what_cannot_be_verified_is_refused(arguments: tuple[str, ...], words: str) -> None:
    code, output = verify(*arguments)
    assert code == 2, output
    assert words in output
