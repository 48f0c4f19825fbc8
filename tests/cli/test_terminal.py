"""Names, manifests, events and specs with characters that control a terminal: no command passes these on."""

import ast
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import launch.app
from runner.checkpoint.fingerprint import combine_digests
from runner.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from runner.cli.app import main
from runner.cli.status import draw
from runner.console import LOGGER, escape_controls, say, warn, write_text
from runner.history.reader import read_history
from runner.storage import LocalStore

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tests/data/format_1/gpt"
# A title, a cleared screen, a colour in one byte, an overwritten line, text from right to left, an isolate.
NAMES = {
    "sequences": "a\x1b]0;title\x07\x1b[2J\x9b31m\rb\b\x7f\u202ec\u2066d\ufeff",
    "lines": "a\nFORGED line\r\nFORGED line\x85FORGED",
    "bytes": os.fsdecode(b"a\xffb\x9b31m"),
}
HARMLESS = "naïve 日本\u3000語 👩\u200d🚀 ﷺ \u00a0 \U000e0067\t\n"


def leave_unrecorded() -> None:
    """Keep the lines of this test from pytest, which records them before they are escaped, and sends them as UTF-8."""
    for handler in list(LOGGER.handlers):
        if type(handler).__module__.startswith("_pytest."):
            LOGGER.removeHandler(handler)


def find_controls(text: str) -> list[str]:
    """Return what of `text` a terminal would obey, by another rule than that of the code."""
    marks = [*map(chr, (0x61C, 0x200E, 0x200F, 0xFEFF, *range(0x202A, 0x202F), *range(0x2066, 0x2070)))]
    return [
        each for each in text if (ord(each) < 32 and each not in "\n\t") or 0x7F <= ord(each) < 0xA0 or each in marks
    ]


def write_hostile_run(directory: Path, name: str) -> Path:
    """Write a run in which every name and text that a file may hold is `name`, as far as the file can hold it."""
    shutil.copytree(RUN, directory)
    store, text = LocalStore(directory), name.encode(errors="replace").decode()
    whole = read_manifest(store, "checkpoints/2")
    leaf = next(iter(whole.leaves))
    leaves = {text: {**whole.leaves[leaf], "dtype": text}}
    changed = {
        "1": Manifest("1", 1, leaves=leaves, arrays=text, fingerprint=combine_digests(leaves)),
        "3": Manifest("3", 3, leaves=leaves, files={text: [1, "00000000"]}, fingerprint=text),
        "4": Manifest(text, 4, leaves=whole.leaves, fingerprint=text, identity={text: text}),
    }
    for step, manifest in changed.items():
        (directory / "checkpoints" / step).mkdir()
        (directory / "checkpoints" / step / MANIFEST).write_bytes(manifest.encode())
    (directory / "checkpoints" / "5").mkdir()
    (directory / "checkpoints" / "5" / MANIFEST).write_text(json.dumps({text: text, "format": text}))
    (directory / "checkpoints" / name).mkdir()
    shutil.copytree(directory / "checkpoints" / "2", directory / "checkpoints" / f"{name}.copy")
    events = [{"time": 1e9, "attempt": 1, "process": 0, "event": text, "reason": text, text: text}]
    events += [
        {"time": 1e9 + n, "attempt": 1, "process": 0, "event": event, "step": 2, "reason": text, "hosts": [text]}
        | {"device_kind": text, "run": text, "id": text, "changes": {text: [text, text]}, "problem": text}
        for n, event in enumerate(("start", "fork", "failed", "fallback", "stop", "changed", "warning"))
    ]
    with (directory / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    (directory / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "train/loss": 1.0, text: 1.0, "val/x": text}) + "\n"
    )
    (directory / "result.json").write_text(json.dumps({"step": 2, "fingerprint": text, "stopped_because": text}))
    return directory


def change_spec(run: Path, text: str) -> None:
    data = yaml.safe_load((run / "spec.yaml").read_text())
    data["config"]["data"]["source"] = text
    data["checkpoint"]["keep_best"] = {"metric": text}
    (run / "spec.yaml").write_text(yaml.safe_dump(data))


COMMANDS: dict[str, Callable[[str, Path, str], list[str]]] = {
    "checkpoints": lambda run, out, name: ["checkpoints", run],
    "verify": lambda run, out, name: ["checkpoints", run, "--verify"],
    "deep": lambda run, out, name: ["checkpoints", run, "--deep"],
    "copy": lambda run, out, name: ["checkpoints", "copy", f"{run}/checkpoints/{name}", str(out / "copy")],
    "copied": lambda run, out, name: ["checkpoints", "copy", f"{run}/checkpoints/2", str(out / name)],
    "status": lambda run, out, name: ["status", run],
    "status of a path": lambda run, out, name: ["status", f"{run}/{name}"],
    "lineage": lambda run, out, name: ["lineage", run],
    "lineage of a directory": lambda run, out, name: ["lineage", str(Path(run).parent)],
    "explain": lambda run, out, name: ["explain", run, "--step", "1"],
    "replay": lambda run, out, name: ["replay", run, "--step", "1"],
    "metrics": lambda run, out, name: ["metrics", run],
    "metrics as CSV": lambda run, out, name: ["metrics", run, "--csv"],
    "report": lambda run, out, name: ["report", run, "-o", str(out / f"{name}.html")],
    "profile": lambda run, out, name: ["profile", run],
    "sample": lambda run, out, name: ["sample", run, "--step", name],
    "sample of a checkpoint": lambda run, out, name: ["sample", run, "--step", "1"],
    "evaluate": lambda run, out, name: ["evaluate", run, "--step", "3"],
    "evaluate data": lambda run, out, name: ["evaluate", run, "--data", name],
    "predict": lambda run, out, name: ["predict", run, "--step", "3", "--data", "x.txt", "-o", str(out / "o.npz")],
    "evaluate top k": lambda run, out, name: [
        "evaluate",
        run,
        "--data",
        name,
        "--save-top-k",
        "1",
        "-o",
        str(out / name),
    ],
    "export": lambda run, out, name: ["export", run, "--step", "1", "-o", str(out / "export")],
    "export of a checkpoint": lambda run, out, name: ["export", f"{run}/checkpoints/{name}", "-o", str(out / "export")],
    "spec": lambda run, out, name: [f"{out}/{name}.yaml"],
    "plan": lambda run, out, name: ["plan", f"{out}/{name}.yaml"],
    "override": lambda run, out, name: ["plan", f"{run}/spec.yaml", "--set", f"config.{name}={name}"],
    "command": lambda run, out, name: [name],
    "option": lambda run, out, name: ["plan", "x.yaml", f"--{name}"],
    "value": lambda run, out, name: ["sample", run, "--tokens", name],
    "engine": lambda run, out, name: ["launch", name],
}


# Commands whose line contains a newline, which the user has written, and a field of CSV, which may contain one.
MULTI_LINE = (
    "copy",
    "copied",
    "status of a path",
    "metrics as CSV",
    "report",
    "sample",
    "evaluate data",
    "evaluate top k",
    "value",
    "spec",
)
MULTI_LINE += ("export of a checkpoint", "plan", "override", "command", "option", "engine")


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("name", "has_spec"),
    [
        *(pytest.param(name, True, id=f"{name}-spec") for name in NAMES),
        *(pytest.param(name, False, id=name, marks=() if name == "lines" else pytest.mark.soak) for name in NAMES),
    ],
)
def test_no_command_passes_on_what_controls_a_terminal(
    tmp_path: Path,
    name: str,
    has_spec: bool,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # no line is wrapped
    leave_unrecorded()
    # A path with a newline is shown as the user has written it.
    run = write_hostile_run(tmp_path / ("x" if name == "lines" else NAMES[name]) / "run", NAMES[name])
    if has_spec:
        change_spec(run, NAMES[name].encode(errors="replace").decode())
    shown = 0
    for command, make_words in COMMANDS.items():
        words = make_words(str(run), tmp_path, NAMES[name])
        capfdbinary.readouterr()
        code = launch.app.main(words[1:]) if words[0] == "launch" else main(words)
        for output in capfdbinary.readouterr():
            text = output.decode()
            assert (command, find_controls(text)) == (command, [])
            if command not in MULTI_LINE:
                assert "\nFORGED" not in text, (command, text)
            assert "Traceback" not in text, (command, text)
            shown += "\\u001b" in text or "\\x1b" in text
        assert code in (0, 1, 2), command
    assert shown > 5 or name != "sequences"


def test_ordinary_text_is_printed_as_it_is(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert escape_controls(HARMLESS) == HARMLESS
    say(HARMLESS)
    warn(HARMLESS)
    write_text(f"{HARMLESS}\n")
    assert [output.decode() for output in capfdbinary.readouterr()] == [f"{HARMLESS}\n" * 2, f"{HARMLESS}\n"]


@pytest.mark.parametrize("name", NAMES)
def test_every_control_character_is_escaped(name: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    leave_unrecorded()
    for show in (say, warn, write_text):
        show(NAMES[name])
    assert not find_controls("".join(output.decode() for output in capfdbinary.readouterr()))
    escaped = escape_controls(NAMES[name].replace("\n", ""))
    assert json.loads(f'"{escaped}"') == NAMES[name].replace("\n", "")


def test_a_coloured_screen_has_only_its_own_control_characters(tmp_path: Path) -> None:
    run = write_hostile_run(tmp_path / "run", NAMES["sequences"])
    console = Console(force_terminal=True, color_system="standard", width=200, markup=False)
    with console.capture() as captured:
        console.print(draw(read_history(LocalStore(run))))
    screen = captured.get()
    assert "\x1b[1m" in screen
    assert not find_controls(re.sub("\x1b\\[[0-9;]*m", "", screen))


def test_only_the_console_prints() -> None:
    for path in [*(ROOT / "runner").rglob("*.py"), *(ROOT / "launch").rglob("*.py")]:
        # A process of its own answers through a pipe; a start that fails may have no console.
        if path.name in ("console.py", "template_process.py", "__main__.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                shown = ast.unparse(node.args[0])
                assert shown.startswith("escape_controls(") or "version" in shown, f"{path}: {shown}"
