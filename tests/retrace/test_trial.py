"""Trials of changes: better, equal, worse and noisy ones, their restarts, and changes that are refused."""

import json
import logging
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import runner
from runner.cli.app import run_command
from runner.errors import InvalidError
from runner.metrics import file
from runner.metrics.rows import parse_row
from runner.retrace.judge import parse_criteria
from runner.retrace.scratch import open_job
from runner.retrace.trial import (
    Fork,
    TrialRequest,
    TrialResult,
    advise_stages,
    begin,
    find_begun,
    run_trial,
    write_specs,
)
from runner.spec.document import dump_yaml
from tests.retrace.runs import SAVES
from tests.support.job_process import hash_tree
from tests.support.tiny_jobs import (
    make_gpt,
    make_gpt_document,
    read_outcome,
    read_rows,
    start_python,
    stop_after,
    wait_for_output,
)

START, STEPS = 40, 64
# A run whose learning rate is far from both ends, and leaves something to learn. It ends with the trial.
RUN: dict[str, Any] = {
    "checkpoint.every_steps": START,
    "checkpoint.keep_last": 9,
    "config.train.total_steps": START + STEPS,
    "config.schedule": {"name": "constant"},
    "config.optimizer.learning_rate": 2.0e-3,
    "config.eval.every_steps": 1000,
}
RATE = "config.optimizer.learning_rate"
# The change, and the verdicts that are right. Another seed gives other batches, so it is noise without an effect.
CHANGES = {
    "better": ([f"{RATE}=1.0e-2"], {"keep"}),
    "worse": ([f"{RATE}=1.0e-4"], {"worse"}),
    "equal": (["config.train.micro_batch_examples=1"], {"keep", "same bits"}),
    "noisy": (["seed=77"], {"unclear", "keep"}),
}


def make_run(directory: Path, **changes: Any) -> Path:
    directory.parent.mkdir(exist_ok=True)
    make_gpt(directory, **RUN | changes)()
    return directory


def make_request(run: Path, overrides: list[str], **options: Any) -> TrialRequest:
    values = {"step": START, "code": None, "python": None, "criteria": parse_criteria([])} | options
    return TrialRequest(str(run), run.parent / "trial", STEPS, overrides=overrides, **values)


@pytest.fixture
def in_process(monkeypatch):
    """Run forks in this process, to their end."""

    def run(fork: Fork, is_reached: Any) -> int:
        runner.run(str(fork.spec_path))
        return 0

    monkeypatch.setattr(Fork, "_run", run)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("trial") / "run")


def test_each_row_of_a_fork_is_read_once(tmp_path, monkeypatch):
    parsed = []
    monkeypatch.setattr(file, "parse_row", lambda text: parsed.append(text) or parse_row(text))
    fork = Fork("old", make_request(tmp_path / "run", []), START)
    assert (fork.read_rows(), fork.is_complete()) == ([], False)
    path = fork.store.root / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    last = START + STEPS

    def append(*steps: int) -> None:
        with path.open("a") as lines:
            lines.writelines(json.dumps({"step": step, "train/loss": 1.0}) + "\n" for step in steps)

    for step in (START, START + 1, last - 1):
        append(step)
        assert not fork.is_complete()
    append(last, last + 1)
    assert fork.is_complete()
    assert [row["step"] for row in fork.read_rows()] == [START + 1, last - 1, last]
    assert len(parsed) == 5
    path.unlink()
    append(START + 1)  # as a restart of the fork does
    assert not fork.is_complete()
    assert [row["step"] for row in fork.read_rows()] == [START + 1]


@pytest.mark.daily(2)
@pytest.mark.parametrize("kind", CHANGES)
def test_the_verdict_is_right(kind, finished_run, tmp_path, in_process, caplog):
    before = hash_tree(finished_run)
    overrides, verdicts = CHANGES[kind]
    request = TrialRequest(str(finished_run), tmp_path, STEPS, START, overrides, None, None, parse_criteria([]))
    with caplog.at_level(logging.INFO, "runner"):
        result = run_trial(request)
    assert result.verdict in verdicts, [*result.format()]
    # It says from the beginning what it works on.
    steps = f"steps {START + 1} to {START + STEPS}; log: {tmp_path}"
    assert caplog.messages[0] == f"trial: new: with the change, {steps}/new.log"
    assert f"trial: old: without the change, {steps}/old.log" in caplog.messages
    assert (result.start, result.stop) == (START, START + STEPS)
    # The fork without the change has made the steps of the run.
    keys = ("step", "train/loss", "train/grad_norm")
    rows = {row["step"]: [row[key] for key in keys] for row in read_rows(finished_run)}
    assert all(rows[row["step"]] == [row[key] for key in keys] for row in read_rows(tmp_path / "old"))
    # A restart of the command computes nothing, and says the same, whichever checkpoint is the newest now.
    assert run_trial(request) == run_trial(replace(request, step=None)) == result
    assert hash_tree(finished_run) == before


@pytest.mark.soak
@pytest.mark.parametrize("kind", CHANGES)
def test_the_verdict_is_right_for_ten_seeds(kind, tmp_path, in_process):
    overrides, verdicts = CHANGES[kind]
    found = []
    for seed in range(10):
        run = make_run(tmp_path / str(seed) / "run", seed=seed)
        found.append(run_trial(make_request(run, overrides)).verdict)
    assert {*found} <= verdicts, found


def run_trial_command(run: Path, *words: str) -> list[str]:
    options = ["--steps", str(STEPS), "--step", str(START), "-o", str(run.parent / "trial"), "--json"]
    return ["-m", "runner", "trial", str(run), *options, *words]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 6))])
def test_a_trial_that_is_killed_goes_on_and_is_adopted(seed, tmp_path):
    run = make_run(tmp_path / "run", **{"config.train.total_steps": 120})
    before = hash_tree(run)
    words = run_trial_command(run, "--set", f"{RATE}=1.0e-2", "--adopt", str(tmp_path / "adopted.yaml"))
    chance = random.Random(seed)
    for number in (signal.SIGKILL, signal.SIGTERM)[: 1 if seed == 0 else 2]:
        process = start_python(*words)
        time.sleep(chance.uniform(3, 15))
        process.send_signal(number)
        process.communicate(timeout=60)
    found = json.loads(wait_for_output(start_python(*words)))
    assert found["verdict"] == "keep"
    assert hash_tree(run) == before
    for name in ("old", "new"):
        rows = read_rows(tmp_path / "trial" / name)
        assert [row["step"] for row in rows] == [*range(START + 1, rows[-1]["step"] + 1)]
        assert rows[-1]["step"] >= START + STEPS
    # The change goes on where its fork has stopped, with the settings of the run for its saves.
    wait_for_output(start_python("-m", "runner", str(tmp_path / "adopted.yaml")))
    assert read_rows(tmp_path / "trial/new")[-1]["step"] == 120
    lineage = runner.open_run(str(tmp_path / "trial/new"))
    assert lineage.spec.checkpoint.keep_last == 9
    output = wait_for_output(start_python("-m", "runner", "lineage", str(tmp_path / "trial/new")))
    assert f"{RATE}: 0.002 -> 0.01" in output
    # The fork with the change is the undisturbed run of its spec.
    document = json.loads(json.dumps(make_gpt_document(tmp_path / "whole", **RUN | {"config.train.total_steps": 120})))
    document["config"]["optimizer"]["learning_rate"] = 1.0e-2
    document["checkpoint"]["fork_from"] = {"run": str(run), "step": START, "changes": [RATE]}
    (tmp_path / "whole.yaml").write_text(dump_yaml(document))
    whole = runner.run(str(tmp_path / "whole.yaml"))
    result = json.loads((tmp_path / "trial/new/result.json").read_text())
    assert result["fingerprint"] == whole["fingerprint"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2))
def test_a_trial_beside_a_live_run_changes_nothing(seed, tmp_path):
    """The run deletes the checkpoint that was forked."""
    options = RUN | {"seed": seed, "checkpoint.every_steps": 10, "checkpoint.keep_last": 100}
    options |= {"config.train.total_steps": 3000}
    make_run(tmp_path / "whole", **options)
    (tmp_path / "spec.yaml").write_text(json.dumps(make_gpt_document(tmp_path / "run", **options)))
    live = start_python("-m", "runner", str(tmp_path / "spec.yaml"), devices=8)
    while not [*(tmp_path / "run").glob("checkpoints/*/manifest.json")]:
        time.sleep(0.1)
    words = ["--steps", str(STEPS), "-o", str(tmp_path / "trial"), "--json", "--set", f"{RATE}=1.0e-4"]
    process = start_python("-m", "runner", "trial", str(tmp_path / "run"), *words, devices=8)
    output = process.communicate(timeout=600)[0]
    found = json.loads(output.splitlines()[-1])
    # A lower learning rate lowers the loss at once where the run has learned most.
    assert found["failure"] is None
    assert found["verdict"] in ("keep", "worse")
    wait_for_output(live)
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")


CODE = """
import jax

from experiments.gpt import PretrainGPT


class Job(PretrainGPT):
    @classmethod
    def forward(cls, apply_fn, params, batch, key):
        loss, meta = super().forward(apply_fn, params, batch, key)
        return loss {0}, meta
"""


def test_a_run_is_replayed_with_its_former_code(tmp_path):
    for name, text in (("former", "* 0.5"), ("present", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tried_job.py").write_text(CODE.format(text))
    options = SAVES | {"job": "tried_job:Job", "config.eval.every_steps": 1000}
    (tmp_path / "spec.yaml").write_text(dump_yaml(make_gpt_document(tmp_path / "run", **options)))
    former, present = (os.pathsep.join([str(tmp_path / name), os.getcwd()]) for name in ("former", "present"))
    wait_for_output(start_python("-m", "runner", str(tmp_path / "spec.yaml"), PYTHONPATH=former))
    words = ["-m", "runner", "replay", str(tmp_path / "run"), "--step", "5", "--trust", "tried_job"]
    process = start_python(*words, PYTHONPATH=present)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 1
    assert "--code DIRECTORY" in output
    assert "other than in the run: program of the train step" in output
    output = wait_for_output(start_python(*words, "--code", str(tmp_path / "former"), PYTHONPATH=present))
    assert "step 5, from checkpoint 3: SAME BITS" in output
    assert "other than in the run" not in output
    process = start_python(*words, "--code", str(tmp_path / "nothing"), PYTHONPATH=present)
    assert "nothing: needs a directory" in process.communicate(timeout=300)[0]
    assert process.returncode == 2


@pytest.mark.soak
@pytest.mark.parametrize(("code", "verdict"), [("+ 0.0", "same bits"), ("* 0 + jax.lax.stop_gradient(loss)", "worse")])
def test_code_is_changed_for_one_fork_alone(code, verdict, tmp_path):
    for name, text in (("mine", ""), ("other", code)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tried_job.py").write_text(CODE.format(text))
    document = make_gpt_document(tmp_path / "run", **RUN | {"job": "tried_job:Job"})
    (tmp_path / "spec.yaml").write_text(dump_yaml(document))
    path = os.pathsep.join([str(tmp_path / "mine"), os.getcwd()])
    wait_for_output(start_python("-m", "runner", str(tmp_path / "spec.yaml"), PYTHONPATH=path))
    words = run_trial_command(tmp_path / "run", "--code", str(tmp_path / "other"), "--trust", "tried_job")
    process = start_python(*words, PYTHONPATH=path)
    output = process.communicate(timeout=300)[0]
    assert json.loads(output.splitlines()[-1])["verdict"] == verdict
    assert process.returncode == (0 if verdict == "same bits" else 1)


# Words after `trial RUN`, and a part of the message.
REFUSED = [
    (["--steps", "64"], "needs a change"),
    (["--steps", "8", "--set", "seed=1"], "use --steps 32 or more"),
    (["--steps", "64", "--set", f"{RATE}=2.0e-3"], "the run has this already"),
    (["--steps", "64", "--set", "directory=other"], "give the other directory in its place"),
    (["--steps", "64", "--set", "config.optimizer.learning_rat=1"], "learning_rate"),
    (["--steps", "64", "--set", "config.model.width=16"], "a fork takes the whole state"),
    (["--steps", "64", "--step", "7", "--set", "seed=1"], "has the checkpoints 40, 80, 104"),
    (["--steps", "64", "--step", "80", "--set", "seed=1"], "before the end at step 104; choose an earlier --step"),
    (["--steps", "200", "--set", "seed=1"], "the oldest is 40; use fewer --steps"),
    (["--steps", "64", "--set", "seed=1", "--judge", "speed"], "needs one of loss"),
    (["--steps", "64", "--set", "seed=1", "-o", "{run}/trial"], "lies in the run"),
    (["--steps", "64", "--set", "seed=1", "--adopt", "{run}/spec.yaml"], "--adopt .* part of the run"),
    (["--steps", "64", "--set", "seed=1", "--adopt", "nowhere/spec.yaml"], "--adopt .* in a directory that exists"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_cannot_be_tried_is_refused(words, message, finished_run, tmp_path, in_process):
    before = hash_tree(finished_run)
    given = [word.format(run=finished_run) for word in words]
    given += [] if "-o" in given else ["-o", str(tmp_path / "trial")]
    with pytest.raises(InvalidError, match=message):
        run_command(["trial", str(finished_run), *given])
    assert hash_tree(finished_run) == before


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (f"{RATE}=1.0e-2", "set config.stages: [{from_step: 60, set: {optimizer.learning_rate: 0.01}}]"),
        ("seed=3", None),
    ],
)
def test_a_stage_that_makes_the_change_is_advised_where_one_can(change, advice, tmp_path):
    job = make_gpt(tmp_path / "run", **RUN | {"checkpoint.every_steps": 20})
    stop_after(job, 60)
    found = advise_stages(make_request(tmp_path / "run", [change]))
    assert (found and found.format()) == (advice and f"to change the run itself from step 60 on, {advice}")
    if found is not None:
        job = make_gpt(tmp_path / "run", **RUN | {found.key: found.value})
        job()
        assert read_rows(tmp_path / "run")[-1]["train/learning_rate"] == pytest.approx(1.0e-2)


@pytest.mark.soak
def test_another_trial_needs_another_directory(finished_run, tmp_path, in_process):
    def run(*overrides: str) -> TrialResult:
        return run_trial(
            TrialRequest(str(finished_run), tmp_path, STEPS, START, overrides, None, None, parse_criteria([]))
        )

    # A change that was refused leaves no trial.
    with pytest.raises(InvalidError):
        run("config.model.width=16")
    run(f"{RATE}=3.0e-3")
    with pytest.raises(InvalidError, match="holds another trial"):
        run(f"{RATE}=4.0e-3")


@pytest.mark.soak
def test_a_checkpoint_that_is_deleted_before_it_was_forked_is_replaced(tmp_path, monkeypatch, in_process):
    run = make_run(tmp_path / "run", **{"config.train.total_steps": 200})
    in_order, begun = Fork._run, []

    def delete(fork: Fork, is_reached: Any) -> int:
        begun.append(fork.start)
        if len(begun) == 1:
            shutil.rmtree(run / f"checkpoints/{fork.start}")
        return in_order(fork, is_reached)

    monkeypatch.setattr(Fork, "_run", delete)
    request = make_request(run, [f"{RATE}=1.0e-4"], step=None)
    assert run_trial(request).verdict == "worse"
    assert begun[:2] == [120, 80]
    with pytest.raises(InvalidError, match="has the checkpoints"):
        run_trial(replace(request, step=120, directory=tmp_path / "other"))


@pytest.mark.parametrize("step", [0, 40])
def test_the_step_at_which_a_trial_began_is_kept(step, finished_run, tmp_path):
    request = TrialRequest(str(finished_run), tmp_path, STEPS, None, [f"{RATE}=1"], None, None, parse_criteria([]))
    assert find_begun(request) is None
    job = open_job(str(finished_run), ())
    _, new = write_specs(request, job, step)
    assert find_begun(request) is None  # a fork that has not begun may begin elsewhere
    shutil.copytree(finished_run, new.store.root)
    assert find_begun(request) == step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fork, "advance", lambda fork, is_reached: None)
        assert begin(request, job)[0].start == step


def test_a_fork_that_diverges_is_worse(finished_run, tmp_path, monkeypatch, in_process, capfd):
    in_order = Fork._run

    def run(fork: Fork, is_reached: Any) -> int:
        if fork.name == "new" and fork.has_committed():
            fork.log_path.write_text("the loss is not finite\n")
            return 1
        return in_order(fork, lambda: True) if fork.name == "old" else make_first_save(fork)

    def make_first_save(fork: Fork) -> int:
        (fork.store.root / "checkpoints/40").mkdir(parents=True)
        return 0

    monkeypatch.setattr(Fork, "_run", run)
    monkeypatch.setattr(Fork, "has_committed", lambda fork: (fork.store.root / "checkpoints/40").exists())
    words = ["--steps", str(STEPS), "--step", str(START), "--set", f"{RATE}=1", "-o", str(tmp_path)]
    assert run_command(["trial", str(finished_run), *words]) == 1
    output = capfd.readouterr().out
    assert "the loss is not finite" in output
    assert "verdict: WORSE" in output
