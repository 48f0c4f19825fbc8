"""Damaged run directories: the history is read for every damage of every file, and reading changes nothing."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.cli.app import run_command
from runner.errors import InvalidError, StorageError
from runner.history.reader import read_history
from runner.storage import LocalStore, TransientError
from tests.support.damage import ERRORS, inject_errors, list_damages
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket
from tests.survival.test_damage_table import RUNS, cases, daily, files_of, template


@functools.cache
def list_attempt_numbers(kind: str) -> list[int]:
    """Return the numbers of the attempts of a template run."""
    return [each.number for each in read_history(LocalStore(template(kind) / "run")).attempts]


def list_daily_attempts(kind: str) -> list[tuple[Path, str]]:
    """Return every third daily case."""
    return daily(kind)[::3]


def read_damaged_copy(kind: str, place: Path, damage: str, base: Path) -> None:
    """Read a copy of a template run with one damage."""
    shutil.copytree(template(kind), base, symlinks=True)
    path, run = base / place, base / "run"
    if damage not in ERRORS:
        list_damages(path)[damage](path)
    before = files_of(base)
    with pytest.MonkeyPatch.context() as patch:
        if damage in ERRORS:
            inject_errors(patch, path, ERRORS[damage])
        history = read_history(LocalStore(run))
        assert run_command(["status", str(run)]) == run_command(["status", str(run), "--json"]) == 0
    assert files_of(base) == before
    assert abs(sum(history.seconds.values()) - history.wall_seconds) < 1e-3
    if place.parts[1] not in ("attempts", "events.jsonl"):
        assert [each.number for each in history.attempts] == list_attempt_numbers(kind)


@pytest.mark.parametrize("choose", [list_daily_attempts, pytest.param(cases, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", RUNS)
def test_a_damaged_directory_still_has_a_history(
    kind: str, choose: Callable[[str], list[tuple[Path, str]]], tmp_path: Path
) -> None:
    problems = {}
    for number, (place, damage) in enumerate(case for case in choose(kind) if case[0].parts[0] == "run"):
        base = tmp_path / str(number)
        (base.parent / "elsewhere").mkdir(exist_ok=True)
        try:
            read_damaged_copy(kind, place, damage, base)
        except Exception as error:  # noqa: BLE001 - whatever the reader lets out is what this test looks for
            problems[f"{place}: {damage}"] = f"{type(error).__name__}: {error}"[:300]
        shutil.rmtree(base)
    assert not problems, "\n".join(f"{case}: {problem}" for case, problem in problems.items())


def test_a_bucket_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MemoryDriver()
    store = make_memory_bucket(driver)
    for name, content in files_of(template("finished") / "run").items():
        store.write(name, content)
    assert read_history(store).attempts
    monkeypatch.setattr("runner.storage.bucket.CALL_SECONDS", 0.0)
    for verb in ("get", "list"):

        def fail(found: str, key: str, verb: str = verb) -> None:
            if found == verb:
                raise TransientError("unreachable")

        driver.before = fail
        with pytest.raises(StorageError):
            read_history(store)


def test_a_completely_damaged_directory_is_no_run(tmp_path: Path) -> None:
    shutil.copytree(template("unfinished") / "run", tmp_path / "run")
    for path in (tmp_path / "run/attempts").iterdir():
        path.write_bytes(b"\0" * 99)
    (tmp_path / "run/events.jsonl").write_bytes(b"\xff" * 99)
    with pytest.raises(InvalidError, match="no run is here"):
        read_history(LocalStore(tmp_path / "run"))
