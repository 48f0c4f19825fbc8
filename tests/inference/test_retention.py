"""Read-only commands on a run that deletes old checkpoints: a vanished checkpoint is looked up again.

A run has two saved steps. At a given point of a command, the newer one is committed and the older one deleted.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.checkpoint import arrays
from runner.cli.app import run_command
from runner.storage import LocalStore
from tests.support.tiny_jobs import make_gpt

OLD, NEW = "4", "8"


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "run"
    make_gpt(directory, **{"checkpoint.every_steps": 4, "checkpoint.keep_last": 2})()
    return directory


class LiveRun:
    """A run that commits `NEW` and deletes `OLD` at the n-th occurrence of a point."""

    def __init__(self, saved: Path, directory: Path, occurrence: int):
        shutil.copytree(saved, directory / "run")
        self.root, self._aside, self._left = directory / "run", directory / "aside", occurrence
        (self.root / "checkpoints" / NEW).rename(self._aside)
        self.has_advanced = False

    def occur(self) -> None:
        self._left -= 1
        if self._left < 0 and not self.has_advanced:
            self.has_advanced = True
            self._aside.rename(self.root / "checkpoints" / NEW)
            (self.root / "checkpoints" / OLD / "manifest.json").unlink()
            shutil.rmtree(self.root / "checkpoints" / OLD)


def call_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, before: bool, act: Callable[..., None]) -> None:
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if before:
            act(*arguments)
        result = original(*arguments, **options)
        if not before:
            act(*arguments)
        return result

    monkeypatch.setattr(owner, name, call)


POINTS: dict[str, Callable[[pytest.MonkeyPatch, LiveRun], None]] = {
    "the listing": lambda patch, run: call_at(
        patch, LocalStore, "list_names", False, lambda _, name: run.occur() if name == "checkpoints" else None
    ),
    "the manifest": lambda patch, run: call_at(
        patch, LocalStore, "read", False, lambda _, name: run.occur() if name.endswith(f"{OLD}/manifest.json") else None
    ),
    "the sizes of the files": lambda patch, run: call_at(
        patch, LocalStore, "list_sizes", False, lambda *_: run.occur()
    ),
    "the tables": lambda patch, run: call_at(patch, arrays, "read_index", True, lambda *_: run.occur()),
    "the arrays": lambda patch, run: call_at(patch, arrays.ArrayReader, "read", True, lambda *_: run.occur()),
}
COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "sample": lambda run, out: ["sample", str(run), "--tokens", "2"],
    "evaluate": lambda run, out: ["evaluate", str(run)],
    "evaluate --all": lambda run, out: ["evaluate", str(run), "--all"],
    "export": lambda run, out: ["export", str(run), "-o", str(out)],
    "checkpoints --deep": lambda run, out: ["checkpoints", str(run), "--deep"],
    "copy": lambda run, out: ["checkpoints", "copy", str(run), str(out)],
}
DAILY = [
    ("export", "the manifest"),
    ("checkpoints --deep", "the arrays"),
    ("copy", "the listing"),
]


@pytest.mark.parametrize(
    ("command", "point"),
    [
        pytest.param(command, point, marks=() if (command, point) in DAILY else pytest.mark.soak)
        for command in COMMANDS
        for point in POINTS
    ],
)
def test_a_vanished_checkpoint_is_looked_up_again(
    command: str,
    point: str,
    saved_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for occurrence in range(10):
        run = LiveRun(saved_run, tmp_path / str(occurrence), occurrence)
        with monkeypatch.context() as patch:
            POINTS[point](patch, run)
            assert run_command(COMMANDS[command](run.root, tmp_path / str(occurrence) / "out")) == 0
        if run.has_advanced and command == "checkpoints --deep":
            assert re.search(rf"(?m)^ *({OLD}|{NEW})  good", capsys.readouterr().out)
        if not run.has_advanced:
            assert occurrence or (command, point) not in DAILY, "the point was never reached"
            return
