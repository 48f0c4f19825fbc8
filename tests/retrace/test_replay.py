"""Replay: every step of a run of every kind is computed again to the bit, and a run with other values is found out."""

import functools
import json
import math
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runner.checkpoint.fingerprint import format_leaf_name
from runner.checkpoint.manifest import read_committed
from runner.cli.app import run_command
from runner.cli.status import open_run_store
from runner.errors import InvalidError
from runner.history.reader import HistoryReader
from runner.retrace import scratch
from runner.retrace.leaves import (
    HISTOGRAM_EDGES,
    ActivationReport,
    LeafFigures,
    LeafReport,
    ObservedValue,
    StepInspection,
    _count_values,
    _measure_all,
)
from runner.retrace.picture import render_inspection
from runner.retrace.replay import ReplayResult, compare_losses, replay
from runner.retrace.scratch import RetraceRequest, retrace
from tests.retrace.runs import DAILY, RUNS, SAVES, STEPS, run_fork
from tests.support.job_process import hash_tree
from tests.support.tiny_jobs import (
    get_job_name,
    make_gpt,
    make_gpt_document,
    read_outcome,
    read_rows,
    start_python,
    stop_after,
    wait_for_output,
)
from tests.test_values import TrainLookup

TRUST = ("tests",)


class Scaled(TrainLookup):
    """Lookup-table job whose loss has a factor."""

    factor = 1.0

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: Any) -> Any:
        loss_sum, meta = super().forward(apply_fn, params, batch, key)
        return loss_sum * Scaled.factor, meta


class Branching(TrainLookup):
    """Lookup-table job that computes its loss in one of two branches."""

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: Any) -> Any:
        branch = functools.partial(super().forward, apply_fn, batch=batch, key=key)
        return jax.lax.cond(batch["x"][0, 0] >= 0, branch, branch, params)


def replay_step(directory: Path, step: int, *overrides: str, **options: Any) -> ReplayResult:
    history = HistoryReader(open_run_store(str(directory))).read()
    with retrace(RetraceRequest(str(directory), step, overrides, trust=TRUST, **options)) as retracing:
        return replay(retracing, step, history)


def list_steps(directory: Path) -> list[int]:
    return [row["step"] for row in read_rows(directory)]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind in DAILY else pytest.mark.soak) for kind in RUNS])
def test_steps_of_every_kind_of_run_replay_to_the_bit(kind, run_of):
    directory = run_of(kind)
    before, steps = hash_tree(directory), list_steps(directory)
    # Between two checkpoints, at one, and the last one.
    for step in (steps[1], 6, steps[-1]):
        result = replay_step(directory, step)
        assert (result.verdict, result.difference) == ("same bits", None), [*result.format()]
        assert result.num_rows
        assert result.promises_bits
        assert result.start < step
    assert result.fingerprints == {steps[-1]: json.loads((directory / "result.json").read_text())["fingerprint"]}
    assert hash_tree(directory) == before


@pytest.mark.soak
@pytest.mark.parametrize("kind", RUNS)
def test_every_step_of_every_kind_of_run_replays_to_the_bit(kind, run_of):
    directory = run_of(kind)
    rows = {row["step"]: row for row in read_rows(directory)}
    for step in rows:
        result = replay_step(directory, step)
        assert (result.verdict, result.difference) == ("same bits", None), [*result.format()]


# A run of 60 steps with three stages, two kills and dropout, whose bits do not depend on the number of devices.
LONG: dict[str, Any] = SAVES | {
    "checkpoint.every_steps": 7,
    "config.train.total_steps": 60,
    "config.train.micro_batch_examples": 1,
    "config.train.same_bits_devices": 8,
    "config.model.dropout": 0.1,
    "config.ema": {"decays": [0.9]},
    "config.stages": [
        {"from_step": 20, "set": {"train.global_batch_examples": 24}},
        {"from_step": 40, "set": {"optimizer.learning_rate": 1.0e-2}},
    ],
}
REPLAY_ALL = """
import pathlib, sys
from tests.retrace.test_replay import list_steps, replay_step
directory = pathlib.Path(sys.argv[1])
for step in list_steps(directory):
    result = replay_step(directory, step, is_any_device=True)
    assert result.verdict == "same bits", (step, [*result.format()])
print("steps", len(list_steps(directory)))
"""


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("long") / "run"
    for step in (11, 45):
        stop_after(make_gpt(directory, **LONG), step)
    make_gpt(directory, **LONG)()
    return directory


@pytest.mark.soak
@pytest.mark.parametrize("num_devices", [8, 2, 1])
def test_every_step_of_a_long_run_replays_to_the_bit_on_fewer_devices(num_devices, long_run):
    before = hash_tree(long_run)
    output = wait_for_output(start_python("-c", REPLAY_ALL, str(long_run), devices=num_devices), timeout=3000)
    assert "steps 60" in output
    assert hash_tree(long_run) == before


def test_the_job_leaves_nothing_behind(run_of, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    replay_step(run_of("whole"), 2)
    with pytest.raises(InvalidError):
        replay_step(run_of("whole"), 2, "config.model.width=-1")
    assert os.listdir(tmp_path) == []


# What a run has recorded, changed afterwards: the key of a row of step 5, or the seed of its spec.
@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("key", "value"), [("train/loss", 3.25), ("train/grad_norm", None), ("val/loss", 1.0), ("train/tokens", 7)]
)
def test_a_row_with_another_value_is_named(key, value, tmp_path):
    make_gpt(tmp_path / "run", **SAVES | {"config.eval.every_steps": 5})()
    rows = read_rows(tmp_path / "run")
    rows[4][key] = value
    (tmp_path / "run/metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = replay_step(tmp_path / "run", 5)
    assert result.verdict == "different"
    assert result.difference is not None
    assert (result.difference.step, result.difference.key, result.difference.recorded) == (5, key, value)
    assert replay_step(tmp_path / "run", 4).verdict == "same bits"


def test_a_key_of_the_trajectory_cannot_have_another_value(run_of):
    with pytest.raises(InvalidError) as caught:
        replay_step(run_of("whole"), 5, "config.precision.matmul=int8")
    assert "checkpoint 3 has 'compute', the spec 'int8'" in str(caught.value)
    assert str(caught.value).endswith("run: is repeated as it was, so this key stays")


def test_a_fork_names_the_run_of_the_steps_before_it(run_of):
    with pytest.raises(InvalidError, match=r"was forked from .*parent at step 3; that run has made step 2"):
        replay_step(run_of("fork"), 2)


def test_the_way_to_a_step_is_foretold(run_of, tmp_path, capfd):
    for kind, way in (("whole", r"2 steps from checkpoint 3"), ("fork", r"2 steps from checkpoint 3")):
        assert run_command(["replay", str(run_of(kind)), "--step", "5", "--trust", "tests"]) == 0
        assert re.search(rf"to step 5: {way}, about [\d.]+ s by the step time of the run", capfd.readouterr().out)


@pytest.mark.parametrize("damage", ["its own", "all"])
def test_without_checkpoints_the_nearest_step_is_named(damage, tmp_path, capfd):
    run_fork(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/3")
    if damage == "its own":
        assert replay_step(tmp_path / "run", 5).verdict == "same bits"
        assert "to step 5: 2 steps from checkpoint 3, about" in capfd.readouterr().out
        return
    shutil.rmtree(tmp_path / "parent/checkpoints")
    with pytest.raises(InvalidError) as caught:
        replay_step(tmp_path / "run", 5)
    assert "step 7 is the nearest that can be computed again, 1 step from checkpoint 6, about" in str(caught.value)


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "same bits"), (1.0001, "within rounding"), (2.0, "different")])
def test_code_that_has_changed_since_is_named(factor, verdict, tmp_path, monkeypatch):
    make_gpt(tmp_path / "run", Scaled, **SAVES | {"job": get_job_name(Scaled)})()
    monkeypatch.setattr(Scaled, "factor", factor)
    result = replay_step(tmp_path / "run", 5)
    assert result.verdict == verdict
    assert result.promises_bits == (factor == 1.0)
    assert any("program of the train step" in change for change in result.changes) == (factor != 1.0)
    # Only other results end the command with 1.
    code = run_command(["replay", str(tmp_path / "run"), "--step", "5", "--trust", "tests"])
    assert code == (1 if verdict == "different" else 0)


def test_other_devices_change_the_losses_by_rounding_alone(run_of):
    result = replay_step(run_of("whole"), 5, "topology.mesh={data: 2, fsdp: 4}")
    assert result.verdict == "within rounding"
    assert not result.promises_bits
    assert 0 < result.loss_deviation < 1e-5
    assert any("mesh" in change for change in result.changes)


def test_a_mesh_that_does_not_fit_is_refused_with_the_option_that_helps(run_of):
    with pytest.raises(InvalidError, match="--any-device uses the devices of this machine instead"):
        replay_step(run_of("whole"), 5, "topology.mesh={data: 16}")
    assert replay_step(run_of("whole"), 5, is_any_device=True).verdict == "same bits"


def test_a_run_with_fixed_sums_has_the_same_bits_on_other_devices(tmp_path):
    fixed = {"config.train.same_bits_devices": 8, "config.train.micro_batch_examples": 2}
    make_gpt(tmp_path / "run", **SAVES | fixed)()
    result = replay_step(tmp_path / "run", 5, "topology.mesh={data: 1, fsdp: 8}")
    assert result.promises_bits
    assert result.verdict == "same bits"


def test_a_step_that_was_made_twice_is_named(run_of):
    lost = replay_step(run_of("killed"), 5)
    assert lost.notes == ["attempt 2 made step 5 too, and lost it; it was computed again"]
    assert replay_step(run_of("killed"), 4).notes == []
    rolled_back = replay_step(run_of("rolled back"), 9)
    assert "step 9 was rolled back, because of loss nan" in rolled_back.notes[0]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--step", "0"], "--step 0: the run has made the steps 1 to 8"),
        (["--step", str(STEPS + 1)], "--step 9: the run has made the steps 1 to 8"),
        (["--step", "2", "--set", "config.model.wdth=3"], "did you mean config.model.width"),
        ([], "replay: needs one of --step K and --spot-check"),
        (["--step", "2", "--spot-check"], "replay: needs one of --step K and --spot-check"),
    ],
)
def test_a_wrong_request_is_refused(words, problem, run_of):
    with pytest.raises(InvalidError) as caught:
        run_command(["replay", str(run_of("whole")), *words])
    assert problem in str(caught.value)


@pytest.mark.daily(2)
@pytest.mark.parametrize("damage", ["manifest", "arrays", "gone", "deleted meanwhile"])
def test_a_checkpoint_that_cannot_be_used_is_passed_over(damage, tmp_path, monkeypatch, capfd):
    make_gpt(tmp_path / "run", **SAVES)()
    checkpoint = tmp_path / "run/checkpoints/6"
    path = next(checkpoint.rglob("*.bin"))
    if damage == "manifest":
        (checkpoint / "manifest.json").write_text("{")
    elif damage == "arrays":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "gone":
        path.unlink()
    else:
        # Retention of the run deletes it after it was listed.
        def list_and_delete(store):
            found = read_committed(store)
            shutil.rmtree(checkpoint)
            return found

        monkeypatch.setattr(scratch, "read_committed", list_and_delete)
    result = replay_step(tmp_path / "run", 8)
    assert (result.start, result.verdict) == (3, "same bits")
    assert ("checkpoint 6 cannot be used" in capfd.readouterr().err) == (damage != "manifest")


# Beside a run, and killed.


@pytest.mark.daily(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_replay_that_is_killed_leaves_nothing(number, run_of, tmp_path):
    directory, before = run_of("whole"), hash_tree(run_of("whole"))
    words = ["-m", "runner", "replay", str(directory), "--step", "8"]
    process = start_python(*words, devices=8, TMPDIR=str(tmp_path))
    while not [*tmp_path.glob("runner-retrace-*/run/events.jsonl")]:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 75)
    if number == signal.SIGKILL:
        assert [*tmp_path.glob("runner-retrace-*")]
        wait_for_output(start_python(*words, devices=8, TMPDIR=str(tmp_path)))
    assert [*tmp_path.glob("runner-retrace-*")] == []
    assert hash_tree(directory) == before


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_commands_beside_a_live_run_change_nothing(seed, tmp_path):
    """The run saves each step, and keeps few of its checkpoints."""
    options = {"checkpoint.every_steps": 1, "checkpoint.keep_last": 2, "config.train.total_steps": 400}
    make_gpt(tmp_path / "whole", **options)()
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps(make_gpt_document(tmp_path / "run", **options)))
    live = start_python("-m", "runner", str(spec), devices=8)
    chance, verdicts = random.Random(seed), []
    while live.poll() is None or len(verdicts) < 3:
        rows = read_rows(tmp_path / "run") if (tmp_path / "run/metrics.jsonl").exists() else []
        if not rows:
            time.sleep(0.1)
            continue
        step = max(rows[-1]["step"] - chance.randrange(3), 1)
        command = chance.choice(["replay", "explain"])
        words = [command, str(tmp_path / "run"), "--step", str(step), "--json"]
        process = start_python("-m", "runner", *words, devices=8)
        if chance.random() < 0.3:
            time.sleep(chance.uniform(0, 8))
            process.kill()
            process.communicate()
            continue
        output = wait_for_output(process)
        if command == "replay":
            verdicts.append(json.loads(output.splitlines()[-1])["verdict"])
    assert wait_for_output(live) is not None
    assert {*verdicts} <= {"same bits", "not compared"}
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")


def test_the_command_prints_a_verdict_and_json(run_of, capfd):
    assert run_command(["replay", str(run_of("whole")), "--step", "5"]) == 0
    assert "step 5, from checkpoint 3: SAME BITS, compared with 2 rows" in capfd.readouterr().out
    assert run_command(["replay", str(run_of("whole")), "--step", "6", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["verdict"], found["from_checkpoint"], found["rows"]) == ("same bits", 3, 3)
    assert run_command(["replay", str(run_of("whole")), "--spot-check", "--json"]) == 0
    spot = json.loads(capfd.readouterr().out)
    assert (spot["step"], spot["from_checkpoint"]) in ((6, 3), (8, 6))
    assert spot["fingerprints"].keys() == {str(spot["step"])}
    assert found["fingerprints"] == found["recorded_fingerprints"] == {"6": found["fingerprint"]}


def test_a_spec_with_another_directory_names_the_run_there(run_of, tmp_path, capfd):
    document = make_gpt_document(tmp_path / "nothing", **SAVES)
    (tmp_path / "spec.yaml").write_text(json.dumps(document))
    words = ["replay", str(tmp_path / "spec.yaml"), "--step", "5", "--json"]
    with pytest.raises(InvalidError, match="nothing holds no run"):
        run_command(words)
    assert run_command([*words, "--set", f"directory={run_of('whole')}"]) == 0
    assert json.loads(capfd.readouterr().out)["verdict"] == "same bits"
    with pytest.raises(InvalidError, match="give the other directory in its place"):
        run_command(["replay", str(run_of("whole")), "--step", "5", "--set", "directory=elsewhere"])


@pytest.mark.daily(1)
@pytest.mark.parametrize("kind", ["stages", "adapter", "arrays"])
def test_the_figures_of_a_step_are_those_of_its_arrays(kind, run_of, capfd):
    history = HistoryReader(open_run_store(str(run_of(kind)))).read()
    with retrace(RetraceRequest(str(run_of(kind)), 5, trust=TRUST)) as retracing:
        retracing.advance_to(4)
        before = jax.device_get(retracing.job.state.params)
        result = replay(retracing, 5, history, is_inspected=True)
        after = jax.device_get(retracing.job.state.params)
    assert result.verdict == "same bits"
    leaves = {format_leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(before)}
    assert result.inspection is not None
    reports = result.inspection.leaves
    assert [report.name for report in reports] == [*leaves]
    for report, (name, old), new in zip(reports, leaves.items(), jax.tree.leaves(after), strict=True):
        change = new.astype(np.float32) - old.astype(np.float32)
        for figures, values in ((report.parameters, old), (report.updates, change)):
            values = values.astype(np.float64)
            assert figures.rms == pytest.approx(np.sqrt((values**2).mean()), rel=1e-4), name
            assert figures.largest == pytest.approx(np.abs(values).max())
            assert figures.zeros == pytest.approx((values == 0).mean())
            assert figures.num_not_finite == 0
        # A GPT has two layers, which each leaf of a block stacks.
        assert len(report.layers) == (2 if name.startswith("blocks.") else 0)
        for layer, part in enumerate(report.layers):
            assert part.shape == old.shape[1:]
            assert part.parameters.largest == pytest.approx(np.abs(old[layer]).max())
        assert sum(result.inspection.histograms[f"parameters.{name}"]) == np.count_nonzero(old)
    page = render_inspection("<step>", result.inspection)
    assert "<h1>&lt;step&gt;</h1>" in page
    assert page.count("<tr><th>") == 4 + 3 * len(reports) + len(result.inspection.activations)
    # The norm of all gradients is that of the row, since the run has no dropout.
    sizes = [np.prod(report.shape) for report in reports]
    norm = np.sqrt(sum(report.gradients.rms**2 * size for report, size in zip(reports, sizes, strict=True)))
    row = next(row for row in read_rows(run_of(kind)) if row["step"] == 5)
    assert norm == pytest.approx(row["train/grad_norm"], rel=1e-3)
    lines = [line.split()[0] for line in result.format() if line]
    assert lines[lines.index("leaf") + 1] == reports[0].name
    assert lines[lines.index("module") + 1] == result.inspection.activations[0].name


def test_modules_without_results_are_named(tmp_path, capfd):
    make_gpt(tmp_path / "run", Branching, **SAVES | {"job": get_job_name(Branching)})()
    words = ["replay", str(tmp_path / "run"), "--step", "2", "--inspect", "--trust", "tests"]
    assert run_command([*words, "--json"]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found["activations"] == []
    assert {*found["left_out"].values()} == {"cond"}
    assert run_command(words) == 0
    assert f"no results of modules below a `cond`: {', '.join(found['left_out'])}" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("recorded", "replayed", "deviation"),
    [
        (2.0, 2.0, 0.0),
        (2.0, 1.0, 0.5),
        (0.0, 0.0, 0.0),
        (None, None, 0.0),
        (math.nan, None, 0.0),
        (math.nan, 1.0, math.inf),
        (1.0, math.inf, math.inf),
        ("x", 1.0, math.inf),
    ],
)
def test_losses_are_compared_whatever_they_are(recorded, replayed, deviation):
    assert compare_losses(recorded, replayed) == compare_losses(replayed, recorded) == deviation


def test_what_others_have_made_in_the_temporary_directory_is_no_obstacle(run_of, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("pipe", "link", "nothing"):
        (tmp_path / f"runner-retrace-{name}").mkdir()
    os.mkfifo(tmp_path / "runner-retrace-pipe/.lock")
    (tmp_path / "runner-retrace-link/.lock").symlink_to(tmp_path / "text.txt")
    assert replay_step(run_of("whole"), 2).verdict == "same bits"


def test_a_histogram_has_two_bins_a_decade():
    values = [0.0, jnp.nan, jnp.inf, 1e-30, 2e-12, -1.5, 3.5, -9.0, 1e9]
    counts = _count_values(jnp.array(values, jnp.float32)).tolist()
    assert len(counts) == len(HISTOGRAM_EDGES) - 1
    expected = np.histogram(np.clip(np.abs(values[3:]), 1e-12, 9e3), HISTOGRAM_EDGES)[0]
    assert counts == expected.tolist()


def test_names_on_the_page_of_a_step_are_escaped():
    good, bad = LeafFigures(0.5, 1.0, 0.25, 0), LeafFigures(0.0, math.inf, 0.0, 3)
    name = "<script>alert(1)</script>"
    layers = [LeafReport(f"layer {layer}", (2,), good, good, bad) for layer in range(2)]
    leaf = LeafReport(name, (2, 2), good, good, bad, layers)
    observed = [ObservedValue(name, np.ones((1, 2)))]
    found = StepInspection(
        [leaf], [ActivationReport(name, (2,), [bad], False)], observed, {f"gradients.{name}": [0, 2]}, {name: "cond"}
    )
    page = render_inspection(name, found)
    assert "<script" not in page
    assert page.count("td class=bad") == 3
    assert page.count("<svg") == 1


def test_values_that_are_not_finite_are_counted():
    tree = {"a": jnp.array([0.0, 3.0, jnp.nan, -jnp.inf, -4.0]), "b": jnp.zeros((0, 2))}
    first, second = (LeafFigures(*(float(each) for each in figures)) for figures in _measure_all(tree))
    assert first == (pytest.approx(5 / np.sqrt(3)), 4.0, pytest.approx(0.2), 2)
    assert second == (0, 0, 0, 0)
