"""Ladders: their runs, law and forecast, with runs that only write the loss of a law; and a whole one with kills."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from launch.app import main
from launch.sweep import ladder
from launch.sweep.record import SweepRecord
from runner.attempts.layout import FORECAST, RESULT, Owner, write_owner
from runner.cli.app import run_command
from runner.history.lineage import format_ladder
from runner.history.sweep import SWEEP, Sweep, SweepRun, read_sweep
from runner.plan.size import derive_sizes
from runner.process import bind_to_parent
from runner.storage import LocalStore, encode_json, read_json
from tests.support.job_process import DEADLINE_SECONDS, ROOT
from tests.support.simulated_devices import environment

SPEC = "specs/gpt_nano.yaml"
SIZES = ["--sizes", "1,2,3,4,5", "--tokens-per-parameter", "5", "--width-per-layer", "16"]
FORECAST_SIX = [*SIZES, "--forecast", "6"]


class FakeRuns:
    """Runs that end at once, with the loss of a law and a deviation for each depth."""

    def __init__(self) -> None:
        self.trained: list[str] = []
        self.codes: dict[str, int] = {}
        self.results: dict[str, dict[str, Any]] = {}

    def train(self, record: SweepRecord, arguments: Any, engine: Any, runs: Sequence[SweepRun]) -> int:
        for each in runs:
            store = LocalStore(Path(record.store.url) / each.name)
            if store.exists(RESULT):
                continue
            self.trained.append(each.name)
            if each.name in self.codes:
                return self.codes.pop(each.name)
            width = each.values["config.model.width"]
            loss = 1.0 + 12 / width**0.8 + 0.002 * (-1) ** each.values["config.model.layers"]
            result = {"step": 1, "fingerprint": "0" * 32, "val_loss": loss} | self.results.get(each.name, {})
            store.write(RESULT, encode_json(result))
        return 0


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    fake = FakeRuns()
    monkeypatch.setattr(ladder, "train", fake.train)

    # In this process, which has imported jax; one test has the command in a process of its own.
    def derive(arguments: ladder.LadderArguments, depths: list[int], ratios: list[float]) -> list[dict[str, Any]]:
        options = (arguments.spec, arguments.overrides, depths, ratios, arguments.width_per_layer, arguments.head_size)
        return [asdict(size) for size in derive_sizes(*options)]

    monkeypatch.setattr(ladder, "derive_sizes", derive)
    return fake


@pytest.fixture
def run_ladder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run a ladder in `tmp_path/ladder`; return its exit code and its whole output."""

    def run_ladder(*words: str, spec: str = SPEC) -> tuple[int, str]:
        code = main(["ladder", spec, "--root", str(tmp_path / "ladder"), *words])
        return code, "".join(capfd.readouterr())

    return run_ladder


RunLadder = Callable[..., tuple[int, str]]


def test_a_ladder_ends_with_a_forecast(runs: FakeRuns, run_ladder: RunLadder, tmp_path: Path) -> None:
    code, output = run_ladder(*FORECAST_SIX)
    assert code == 0, output
    assert runs.trained == ["d1", "d2", "d3", "d4", "d5"]
    record = json.loads((tmp_path / "ladder/d6" / FORECAST).read_bytes())
    assert record["low"] < record["loss"] < record["high"]
    assert [point[2] for point in record["law"]["points"]] == sorted(
        (point[2] for point in record["law"]["points"]), reverse=True
    )
    assert record["ladder"] == str(tmp_path / "ladder")
    assert "next: python -m launch local specs/gpt_nano.yaml" in output
    assert record["law"]["formula"] in output
    sweep = json.loads((tmp_path / "ladder" / SWEEP).read_bytes())
    size = sweep["ladder"]["sizes"]["d2"]
    assert (size["parameters"], size["embedding_parameters"]) == (35_712, 10_240)
    assert sweep["ladder"]["forecasts"]["d6"] == {key: value for key, value in record.items() if key != "format"}

    # The same command continues with what is recorded, and then trains the large run.
    before = (tmp_path / "ladder/d6" / FORECAST).read_bytes()
    code, output = run_ladder(*FORECAST_SIX, "--then")
    assert (code, runs.trained[5:]) == (0, ["d6"])
    assert "d6 came to" in output
    assert (tmp_path / "ladder/d6" / FORECAST).read_bytes() == before


def test_an_interrupted_ladder_comes_to_the_same_law(runs: FakeRuns, run_ladder: RunLadder, tmp_path: Path) -> None:
    assert run_ladder(*FORECAST_SIX)[0] == 0
    whole = [(tmp_path / "ladder" / name).read_bytes() for name in (SWEEP, f"d6/{FORECAST}")]
    shutil.rmtree(tmp_path / "ladder")
    runs.trained.clear()
    runs.codes = {"d2": 75, "d4": 76, "d5": 1}
    assert [run_ladder(*FORECAST_SIX)[0] for _ in range(4)] == [75, 76, 1, 0]
    assert runs.trained == ["d1", "d2", "d2", "d3", "d4", "d4", "d5", "d5"]
    assert [(tmp_path / "ladder" / name).read_bytes() for name in (SWEEP, f"d6/{FORECAST}")] == whole


def test_no_forecast_is_written_after_the_run_has_begun(runs: FakeRuns, run_ladder: RunLadder, tmp_path: Path) -> None:
    write_owner(LocalStore(tmp_path / "ladder/d6"), Owner.create("gpt_nano_d6", {}))
    code, output = run_ladder(*FORECAST_SIX)
    assert code == 2
    assert "the run has begun without this forecast" in output


@pytest.mark.soak
def test_several_ratios_give_a_law_in_both(runs: FakeRuns, run_ladder: RunLadder, tmp_path: Path) -> None:
    words = ["--sizes", "1,2,3", "--tokens-per-parameter", "5,20", "--width-per-layer", "16", "--forecast", "5"]
    assert run_ladder(*words)[0] == 0
    assert runs.trained == ["d1_r5", "d1_r20", "d2_r5", "d2_r20", "d3_r5", "d3_r20"]
    record = json.loads((tmp_path / "ladder/d5" / FORECAST).read_bytes())
    assert record["tokens"] == pytest.approx(20 * record["parameters"], rel=0.01)
    assert record["law"]["of_tokens"] is not None


@pytest.mark.soak
def test_status_and_report_show_the_law(
    runs: FakeRuns, run_ladder: RunLadder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ladder(*FORECAST_SIX)[0] == 0
    # Of the runs only the one that is forecast has begun.
    spec = ["--set", f"directory={tmp_path / 'ladder/d6'}", "--set", "config.total_steps=3"]
    done = subprocess.run([sys.executable, "-m", "runner", "specs/counter.yaml", *spec], cwd=ROOT, capture_output=True)
    assert done.returncode == 0
    record = json.loads((tmp_path / "ladder/d6" / FORECAST).read_bytes())
    assert run_command(["status", str(tmp_path / "ladder")]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert f"{record['law']['formula']}; d6 of" in shown
    for place in ("ladder", "ladder/d6"):
        page = tmp_path / f"{place.replace('/', '_')}.html"
        assert run_command(["report", str(tmp_path / place), "-o", str(page)]) == 0
        text = page.read_text()
        assert f'"forecast":[{record["parameters"]},{record["loss"]:.6g}'[:-1] in text
        assert record["law"]["formula"].replace("<", "") in text


def test_a_damaged_forecast_is_left_out(runs: FakeRuns, run_ladder: RunLadder, tmp_path: Path) -> None:
    assert run_ladder(*FORECAST_SIX)[0] == 0
    store = LocalStore(tmp_path / "ladder")
    record = read_json(store, SWEEP)
    good = record["ladder"]["forecasts"]["d6"]
    for damaged in (None, [], {"../x": good}, {"d6": 1}, {"d6": good | {"low": "x"}}, {"d6": good | {"law": 3}}):
        store.write(SWEEP, encode_json(record | {"ladder": {"forecasts": damaged}}))
        sweep = read_sweep(store)
        assert sweep is not None
        assert sweep.forecasts == {}
        assert format_ladder(sweep) == []


BAD_COMMANDS: dict[str, tuple[list[str], str]] = {
    "too few sizes": (["--sizes", "1,2,3"], "at least 4 sizes"),
    "too few sizes with ratios": (["--sizes", "1,2", "--tokens-per-parameter", "5,20"], "at least 3 sizes"),
    "ratios too near": (["--sizes", "1,2,3", "--tokens-per-parameter", "19,20"], "too near"),
    "descending": (["--sizes", "4,3,2,1"], "ascending"),
    "forecast inside": (["--sizes", "1,2,3,4", "--forecast", "4"], "above those of --sizes"),
    "nothing to train": (["--sizes", "1,2,3,4", "--then"], "needs --forecast"),
    "a total": (["--sizes", "1,2,3,4", "--set", "config.train.total_tokens=99"], "total_tokens follows from the depth"),
    "no such spec": (["--sizes", "1,2,3,4", "--set", "name=a/b"], "name"),
}


@pytest.mark.parametrize("name", BAD_COMMANDS)
def test_bad_ladders_are_refused_before_any_run(name: str, runs: FakeRuns, run_ladder: RunLadder) -> None:
    words, message = BAD_COMMANDS[name]
    code, output = run_ladder(*words)
    assert (code, runs.trained) == (2, [])
    assert message in output
    assert "Traceback" not in output


@pytest.mark.soak
def test_sizes_are_derived_by_the_command(
    run_ladder: RunLadder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sizes come from a process of their own, and so do its mistakes."""
    runs = FakeRuns()
    monkeypatch.setattr(ladder, "train", runs.train)
    assert run_ladder(*SIZES)[0] == 0
    code, output = run_ladder(*SIZES, "--set", "name=other", spec="specs/vit_nano.yaml")
    assert (code, len(runs.trained)) == (2, 5)
    assert "had other values" in output
    code, output = run_ladder(*SIZES, "--root", str(tmp_path / "other"), spec="specs/vit_nano.yaml")
    assert (code, output.count("\n")) == (2, 1)
    assert "specs/vit_nano.yaml:6: job: experiments.vit:ClassifyImages: needs a decoder" in output


def test_the_root_of_something_else_is_refused(runs: FakeRuns, run_ladder: RunLadder, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "ladder")
    store.write(SWEEP, Sweep("x", SPEC, "0", "val/loss", False, {"kind": "grid"}, ()).encode())
    code, output = run_ladder(*SIZES)
    assert (code, "it is no ladder" in output) == (2, True)
    store.write(SWEEP, b"{")
    assert "damaged" in run_ladder(*SIZES)[1]
    store.remove(SWEEP)
    write_owner(store, Owner.create("x", {}))
    code, output = run_ladder(*SIZES)
    assert (code, "holds a run" in output) == (2, True)
    assert not runs.trained


def test_another_ladder_needs_another_root(runs: FakeRuns, run_ladder: RunLadder) -> None:
    runs.codes = {"d1": 75}
    assert run_ladder(*SIZES)[0] == 75
    for words in ([*SIZES, "--head-size", "32"], [*SIZES[:1], "1,2,3,4", *SIZES[2:]], [*SIZES, "--set", "seed=1"]):
        code, output = run_ladder(*words)
        assert (code, "two sweeps in one root" in output) == (2, True)


BAD_RESULTS = {"no validation": ({"val_loss": None}, "no validation loss"), "hook": ({"stopped_by": "X"}, "stopped by")}


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_a_run_without_its_loss_makes_no_law(name: str, runs: FakeRuns, run_ladder: RunLadder, tmp_path: Path) -> None:
    result, message = BAD_RESULTS[name]
    runs.results["d3"] = result
    code, output = run_ladder(*FORECAST_SIX)
    assert (code, message in output) == (2, True)
    assert not (tmp_path / "ladder/d6" / FORECAST).exists()


@pytest.mark.soak
def test_kills_at_random_change_no_bit_of_law_and_forecast(tmp_path: Path) -> None:
    words = ["--sizes", "1,2,3,4", "--tokens-per-parameter", "3", "--width-per-layer", "8", "--head-size", "8"]
    words += ["--forecast", "5", "--then", "--set", "config.train.global_batch_examples=8"]
    words += ["--set", "checkpoint.every_steps=10", "--set", "config.eval.batches=4"]

    def start(name: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "launch", "ladder", SPEC, "--root", str(tmp_path / name), *words]
        return subprocess.Popen(
            bind_to_parent(command), cwd=ROOT, env=environment(1), start_new_session=True, stdout=subprocess.DEVNULL
        )

    assert start("whole").wait(DEADLINE_SECONDS) == 0
    moments, kills = random.Random(0), 0
    while True:
        process = start("killed")
        try:
            assert process.wait(moments.uniform(4, 16)) == 0
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            time.sleep(1.0)  # the job, in a session of its own, gets its signal from the kernel
    assert kills > 2
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for name in (SWEEP, f"d5/{FORECAST}"):
        texts = [(root / name).read_text().replace(str(root), "") for root in (whole, killed)]
        assert texts[0] == texts[1]
    for name in ("d1", "d2", "d3", "d4", "d5"):
        assert (whole / name / RESULT).read_bytes() == (killed / name / RESULT).read_bytes()
