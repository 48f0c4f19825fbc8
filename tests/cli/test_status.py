"""`status` as screen and JSON: fits the terminal, escapes control characters, and changes nothing."""

import dataclasses
import functools
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console

from runner.cli import status
from runner.cli.app import main, run_command
from runner.cli.status import draw, format_si
from runner.distributed.clock import TimeCategory
from runner.history.reader import HistoryReader, read_history
from runner.history.records import History, RunState, to_json
from runner.storage import LocalStore, encode_line
from tests.support import run_outcomes
from tests.support.memory_bucket import make_memory_bucket
from tests.survival.test_damage_table import files_of

HOSTILE = "<b>\x1b[31mred\x1b]0;title\x07\r\n[bold]\u202e\udcff\x9b2J" + "x" * 5000


@functools.cache
def template() -> Path:
    """A run with two attempts and rows."""
    directory = Path(os.environ["RUNNER_TESTS_SESSION"]) / "status" / str(os.getpid()) / "run"
    directory.parent.mkdir(parents=True)
    run_outcomes.stop_after_step(directory, 20)
    run_outcomes.make_job(directory)()
    rows = [{"step": step, "train/loss": 5.0 / step, "train/tokens": step * 100} for step in range(1, 41)]
    rows[-1] |= {"perf/tokens_per_second": 12345.0, "perf/mfu": 0.4, "val/loss": 0.25}
    (directory / "metrics.jsonl").write_bytes(b"".join(map(encode_line, rows)))
    return directory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the template run."""
    return Path(shutil.copytree(template(), tmp_path / "run"))


def render_screen(directory: Path, width: int = 80, history: History | None = None, **options: object) -> str:
    console = Console(width=width, markup=False, highlight=False, emoji=False, file=None, **options)
    with console.capture() as capture:
        console.print(draw(history or read_history(LocalStore(directory))))
    return capture.get()


def test_the_screen_shows_everything_known(run: Path) -> None:
    text = render_screen(run)
    for words in (
        "count  done",
        "step 40 of 40",
        "100.0%",
        "4 k tokens  loss 0.1250  validation loss 0.2500  best 0.2500 at step 40",
        "12.3 k tokens/s  1.54 k tokens/s per device  MFU 40.0%",
        "goodput",
        "2 attempts",
        "0 to 20",
        "preempted",
        "20 to 40",
        "last restart",
        "4 checkpoints",
        "verified",
        "1 process on",
    ):
        assert words in text, f"{words!r} is not in\n{text}"
    assert re.search(r"[\u2801-\u28ff]", text)
    assert "\x1b" not in text


STAGES = {
    0: ("before the first of 2 stages\nnext: stage 1 from step 10, in 10 steps: optimizer.weight_decay", "stage 0"),
    15: (
        "stage 1 of 2 since step 10: optimizer.weight_decay: 0.1 -> 0.2 (less noise)\n"
        "next: stage 2 from step 40, in 25 steps",
        "stage 0",
    ),
    40: ("stage 2 of 2 since step 40", "next"),
}


@pytest.mark.parametrize("step", STAGES)
def test_the_stage_in_force_and_the_next_are_shown(run: Path, step: int) -> None:
    set_2, set_3 = ({"optimizer.weight_decay": value} for value in (0.2, 0.3))
    stages = [{"from_step": 10, "set": set_2, "why": "less noise"}, {"from_step": 40, "set": set_3}]
    spec = {"config": {"optimizer": {"weight_decay": 0.1}, "stages": stages}}
    (run / "spec.yaml").write_text(json.dumps(spec))
    history = dataclasses.replace(read_history(LocalStore(run)), step=step, state=RunState.RUNNING)
    text = render_screen(run, 200, history=history)
    words, no_words = STAGES[step]
    assert words in text
    assert no_words not in text


@pytest.mark.parametrize("width", [80, 200])
def test_no_line_is_wider_than_the_terminal(run: Path, width: int) -> None:
    assert max(map(len, render_screen(run, width).splitlines())) <= width


def test_colours_are_used_only_on_terminals_that_support_them(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" in render_screen(run, force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", render_screen(run, force_terminal=True))


def test_the_json_contains_the_same_records_as_valid_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").write_text('{"step": 41, "train/loss": 1.0, "train/x": NaN}\n')
    assert run_command(["status", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    expected = to_json(read_history(LocalStore(run)))
    assert found.keys() == {*expected, "cost"}
    assert found["attempts"] == expected["attempts"]
    assert found["row"]["train/x"] is None
    assert set(found["seconds"]) == {category.value for category in TimeCategory}


def write_hostile_texts(directory: Path) -> None:
    """Write hostile text into every file whose text is shown."""
    with (directory / "events.jsonl").open("ab") as file:
        for event in ("failed", "stuck", "quarantine", "changed", "start", "grace", "straggler"):
            details = dict.fromkeys(("reason", "moved_to", "changes", "device_kind"), HOSTILE)
            details |= {"hosts": [HOSTILE] * 9, "late": [0], "after_seconds": [0.5]}
            row = {"time": 2e9, "attempt": 2, "process": 0, "event": event, "step": 3} | details
            file.write(encode_line(row))
        file.write(b'{"time": 2e9, "attempt": 2, "event": "\xff\xfe"}\n' + b"x" * 10_000_000 + b'\n{"time": 1')
    text = HOSTILE.replace("\udcff", "")  # which no YAML may have
    stages = [{"from_step": 10 * number, "why": text, "set": {text[:99]: text}} for number in (1, 2, 5)]
    (directory / "spec.yaml").write_text(json.dumps({"config": {"stages": stages}}))
    owner = json.loads((directory / "job.json").read_text()) | {"name": HOSTILE}
    (directory / "job.json").write_text(json.dumps(owner))
    (directory / "checkpoints" / "\x1b[31m[red]").mkdir()
    (directory / "checkpoints" / "30" / "manifest.json").write_bytes(HOSTILE.encode(errors="surrogateescape"))


def test_control_characters_in_files_are_escaped(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hostile_texts(run)
    assert len(read_history(LocalStore(run)).stages) == 3
    text = render_screen(run)
    assert not [each for each in text if not (each.isprintable() or each == "\n")]
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) < 150
    assert "[bold]" in text
    assert run_command(["status", str(run)]) == run_command(["status", str(run), "--json"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_status_is_read_only_and_claims_no_attempt(run: Path) -> None:
    before = files_of(run)
    run_command(["status", str(run)])
    assert files_of(run) == before


def test_a_missing_run_gives_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.distributed.preemption.StopNotice.install_signal_handlers", lambda self: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["status", str(tmp_path / "none")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"{tmp_path}/none: no run is here\n"
    assert not (tmp_path / "none").exists()


def test_a_spec_can_be_given_instead_of_its_directory(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "count.yaml"
    spec.write_text((run / "spec.yaml").read_text())
    assert run_command(["status", str(spec)]) == 0
    assert "step 40 of 40" in capsys.readouterr().out


def test_watching_continues_until_the_run_is_done(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter([RunState.RUNNING, RunState.STALLED, RunState.DONE])
    original = HistoryReader.read

    def read(reader):
        found = original(reader)
        object.__setattr__(found, "state", next(states))
        return found

    monkeypatch.setattr(HistoryReader, "read", read)
    monkeypatch.setattr(status, "WATCH_SECONDS", 0.0)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("signal.set_wakeup_fd", lambda *_: None)
    assert run_command(["status", str(run), "--watch", "--json"]) == 0
    printed = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert printed == ["running", "stalled", "done"]


def test_a_run_in_a_bucket_is_shown_like_one_on_disk(run: Path) -> None:
    bucket = make_memory_bucket()
    for name, content in files_of(run).items():
        bucket.write("events/000001.0.0000.jsonl" if name == "events.jsonl" else name, content)
    now = read_history(LocalStore(run)).now
    found, expected = (to_json(read_history(store, now)) for store in (bucket, LocalStore(run)))
    assert found | {"url": expected["url"]} == expected


@pytest.mark.parametrize(("value", "words"), [(0, "0"), (950, "950"), (12345, "12.3 k"), (7e13, "70 T")])
def test_amounts_are_formatted_with_three_digits(value: float, words: str) -> None:
    assert format_si(value) == words


def test_the_runs_below_a_directory_are_listed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(template(), tmp_path / "team" / "old")
    shutil.copytree(template(), tmp_path / "\x1b[31mred")
    shutil.copytree(template(), tmp_path / "damaged")
    shutil.rmtree(tmp_path / "damaged/attempts")
    (tmp_path / "damaged/events.jsonl").unlink()
    before = files_of(tmp_path)
    assert main(["status", str(tmp_path)]) == 0
    output, problems = capfd.readouterr()
    assert sorted(line.split()[0] for line in output.splitlines()) == ["[31mred", "team/old"]
    assert all("done  step 40 of 40  best val 0.2500" in line for line in output.splitlines())
    assert problems == f"cannot read {tmp_path}/damaged: no run is here\n"
    assert main(["status", str(tmp_path), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert sorted(run["path"] for run in found["runs"]) == ["\x1b[31mred", "team/old"]
    assert [run["state"] for run in found["runs"]] == ["done", "done"]
    assert len(found["notes"]) == 1
    assert files_of(tmp_path) == before


def test_a_directory_without_runs_is_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert main(["status", str(tmp_path)]) == 2
    assert capfd.readouterr().err == f"{tmp_path}: no run is here\n"
