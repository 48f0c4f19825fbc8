"""Ledger events: all written events are in the table."""

import ast
import functools
from pathlib import Path

import pytest

import runner
from runner.attempts.events import EVENT_KEYS, EVENTS

ROOT = Path(runner.__file__).parents[1]
FILES = sorted(path for package in ("runner", "experiments", "launch") for path in (ROOT / package).rglob("*.py"))
DETAILS = {event.name: {key.name for key in event.details} for event in EVENTS}


def find_assigned_texts(name: str, tree: ast.AST) -> set[str]:
    """Return every text assigned to a variable anywhere in a file, alone or in a tuple."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for target, value in zip(targets, values, strict=False):
                if isinstance(target, ast.Name) and target.id == name and isinstance(value, ast.Constant):
                    found.add(str(value.value))
    return found


@functools.cache
def find_written_events(source: str) -> list[tuple[str, set[str]]]:
    """Return event and details of every `events.append(event, step, ...)` and `attempt.record(event, step, ...)`.

    No other `append` has two arguments. A function that passes on an event that it receives writes none itself.
    """
    tree, found = ast.parse(source), []
    given = {argument for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for argument in node.args.args}
    handed_on = {argument.arg for argument in given}
    for node in ast.walk(tree):
        verb = getattr(node.func, "attr", None) if isinstance(node, ast.Call) else None
        if not (isinstance(node, ast.Call) and verb in ("append", "record") and len(node.args) > 1):
            continue
        first, details = node.args[0], {keyword.arg for keyword in node.keywords if keyword.arg is not None}
        if isinstance(first, ast.Name) and first.id in handed_on:
            continue
        names = find_assigned_texts(first.id, tree) if isinstance(first, ast.Name) else {getattr(first, "value", None)}
        assert names, f"line {node.lineno}: the event cannot be determined"
        for name in names:
            assert isinstance(name, str), (
                f"line {node.lineno}: the name of an event must be a text, or a variable that holds one"
            )
            found.append((name, details))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_written_event_is_in_the_table(path: Path) -> None:
    for name, details in find_written_events(path.read_text()):
        assert name in DETAILS, f"{name} is not in runner/attempts/events.py"
        assert details <= DETAILS[name], f"{name}: {details - DETAILS[name]} not in runner/attempts/events.py"


def test_every_event_in_the_table_is_written() -> None:
    assert {name for path in FILES for name, _ in find_written_events(path.read_text())} == set(DETAILS)


def test_names_in_the_table_are_unique() -> None:
    assert len(DETAILS) == len(EVENTS)
    assert not {key.name for key in EVENT_KEYS} & {name for details in DETAILS.values() for name in details}


def test_the_scan_finds_names_and_details() -> None:
    source = "event, more = 'init', {}\nevent = 'restore'\na.ledger.append(event, 1, seconds=2, **more)\nx.append(3)"
    assert sorted(find_written_events(source)) == [("init", {"seconds"}), ("restore", {"seconds"})]
    source = "def record(self, event):\n    self.events.append(event, 1)\nattempt.record('grace', 2, reason='')"
    assert list(find_written_events(source)) == [("grace", {"reason"})]
