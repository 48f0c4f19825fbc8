"""Console output: a closed terminal stops no run, and a record cannot control a terminal."""

import json
import logging
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner import console
from runner.console import LineFormatter, configure_console, format_dollars, format_duration, say, warn
from tests.support.job_process import ROOT
from tests.support.lost_streams import STREAM_LOSSES, STREAMS, start_with_lost_streams

HOSTILE = {
    "a terminal's escapes": "\x1b[2J\x1b]0;owned\x07",
    "carriage return": "loss 3.0\rloss 0.1",
    "another line": "good\n[0] done at step 100",
    "no text": b"\xff\xfe".decode(errors="surrogateescape"),
    "a page of a text's own": "<script>\u2028\u202ealert(1)</script>\x00\x85",
    "ten megabytes": "x" * 10_000_000,
}


# Prints in every way, opens a file, waits until the stream is closed, and prints again.
_PRINTS = """
import contextlib, logging, pathlib, signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from runner.console import configure_console, protect_streams, say, warn
protect_streams()
configure_console("job", "text", "info")
def print_all():
    for text in ("x" * 100_000, "\\u00e9 \\u2713 \\udcff \\ud800 \\x85"):
        print(text); print(text, end="", file=sys.stderr); sys.stdout.write(text); say(text); warn(text)
        logging.getLogger("job").info("%d", text)
with open("data", "w") as data:
    assert data.fileno() > 2, data.fileno()
    print_all()
    pathlib.Path("ready").touch()
    while not pathlib.Path("struck").exists():
        time.sleep(0.01)
    with contextlib.suppress(OSError):
        sys.stdin.read()
    print_all()
    data.write("data")
sys.exit(7)
"""


@pytest.mark.daily(4)
@pytest.mark.parametrize("way", STREAM_LOSSES)
def test_a_lost_stream_stops_no_program(way: str, tmp_path: Path) -> None:
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{_PRINTS}"]
    with start_with_lost_streams(command, way, STREAMS["all"], variables, tmp_path) as bereft:
        while not (tmp_path / "ready").exists() and bereft.process.poll() is None:
            time.sleep(0.01)
        bereft.lose_streams()
        (tmp_path / "struck").touch()
        assert bereft.process.wait(600) == 7, (tmp_path / "error").read_text()
    assert (tmp_path / "data").read_text() == "data"


def test_encodable_text_is_written_completely(tmp_path: Path) -> None:
    program = "from runner.console import protect_streams; protect_streams(); print('\u2713' * 300_000); exit(7)"
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    for unbuffered in ("", "1"):
        variables["PYTHONUNBUFFERED"] = unbuffered
        result = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, env=variables, timeout=600)
        assert (result.returncode, result.stdout.decode()) == (7, "\u2713" * 300_000 + "\n")


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("form", ["text", "dated", "json"])
def test_a_record_cannot_control_a_terminal(name: str, form: str) -> None:
    record = logging.LogRecord("runner", logging.INFO, "", 0, "%s", (HOSTILE[name],), None)
    shown = LineFormatter(form, 3).format(record)  # type: ignore[arg-type]
    lines = shown.split("\n")
    assert all(line.isprintable() for line in lines)
    assert len(lines) == (1 + HOSTILE[name].count("\n") if form == "text" else 1)
    assert form == "json" or all("[3] " in line for line in lines)
    if form == "json":
        assert json.loads(shown)["message"] == HOSTILE[name]


def test_lines_are_unchanged_before_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    say("a shell's own\tline é 100% ✓ \u2028")
    warn("straggler: process 1\nand 2")
    assert capsys.readouterr() == ("a shell's own\tline é 100% ✓ \u2028\n", "straggler: process 1\nand 2\n")


def test_loggers_of_the_job_and_of_libraries_have_their_own_levels(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loggers = [logging.getLogger(name) for name in ("runner", "experiments.gpt", "jax._src.xla_bridge")]
    for level, shown in {"info": "iwiww", "warning": "www", "error": ""}.items():
        configure_console("experiments.gpt:PretrainGPT", "text", level, 1)
        for logger in loggers:
            logger.info("i")
            logger.warning("w")
        output = "".join(capsys.readouterr())
        assert sorted(output.replace("[1] ", "").split()) == sorted(shown)


def test_json_records_have_the_keys_of_cloud_logging(capsys: pytest.CaptureFixture[str]) -> None:
    configure_console("experiments.gpt:PretrainGPT", "json", "info", 2)
    warn("x is off")
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert found.pop("time").endswith("Z")
    assert found == {"severity": "WARNING", "process": 2, "message": "x is off"}


def test_secrets_are_hidden_in_every_record(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.setenv(name, f"value-of-{name}")
    configure_console("experiments.gpt:PretrainGPT", "text", "info")
    warn("refused: value-of-HF_TOKEN, value-of-AZURE_STORAGE_CONNECTION_STRING")
    assert capsys.readouterr().err == "refused: ***, ***\n"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, ""),
        (math.nan, "?"),
        (-1.0, "0.0 s"),
        (8.21, "8.2 s"),
        (250, "4 min 10 s"),
        (5999, "99 min 59 s"),
        (6000, "1 h 40 min"),
        (71.5 * 3600, "71 h 30 min"),
        (100 * 3600, "4 d 4 h"),
        (1e9, "11,574 d 1 h"),
    ],
)
def test_durations_are_formatted_in_two_units(seconds: float | None, words: str) -> None:
    assert format_duration(seconds) == words


@pytest.mark.parametrize(
    ("value", "is_rate", "shown"),
    [
        (0.0, False, "$0.00"),
        (0.0004, False, "less than $0.01"),
        (1.2, False, "$1.20"),
        (1234.5, False, "$1,234"),
        (1.2, True, "$1.20"),
        (0.0132, True, "$0.0132"),
    ],
)
def test_dollars_have_cents_and_a_floor(value, is_rate, shown):
    assert format_dollars(value, is_rate=is_rate) == shown


@pytest.mark.parametrize(
    ("width", "line", "shown"),
    [
        (20, "short", ["short"]),
        (20, "", [""]),
        (12, "one two three four", ["one two", "    three", "    four"]),
        (30, "  name  1 s  a note of many words", ["  name  1 s  a note of many", "             words"]),
        (20, "  name  12.5 s  a note", ["  name  12.5 s  a", "        note"]),
        (24, "  name  a note of several words", ["  name  a note of", "        several words"]),
        (10, "  name  word-with-hyphens", ["  name", "  word-with-hyphens"]),
        (5, f"a {'x' * 40} b", ["a", f"  {'x' * 40}", "  b"]),
    ],
)
def test_a_terminal_gets_lines_broken_between_words(width, line, shown, monkeypatch, capfd) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((width, 24)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    console.write_lines([line])
    assert capfd.readouterr().out.splitlines() == shown


def test_a_file_or_pipe_gets_whole_lines(capfd) -> None:
    line = "  name  " + "word " * 100 + "end"
    console.write_lines([line, ""])
    assert capfd.readouterr().out == f"{line}\n\n"
