"""Incremental reading of the ledger: each event once, with the result of reading everything."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.attempts.events import EVENTS
from runner.history import ledger as ledgers
from runner.history.ledger import LedgerReader, LedgerSummary, apply_events, format_event
from runner.storage import LocalStore, Store, encode_line, iterate_log, jsonl
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket


class WrittenEvents:
    """Events of a run with two processes per attempt, on disk or in a bucket."""

    def __init__(self, store: Store):
        self.store = store
        self.attempt = self.step = 0
        self._parts: dict[str, bytes] = {}
        self.saved: list[int] = []

    def append(self, event: str, process: int = 0, **details: object) -> None:
        row = {"time": 100.0 * self.attempt + self.step, "attempt": self.attempt, "process": process, "event": event}
        line = encode_line(row | {"step": self.step} | details)
        if self.store.root is None:
            name = f"events/{self.attempt:06}.{process}.0000.jsonl"
            self._parts[name] = self._parts.get(name, b"") + line
            self.store.write(name, self._parts[name])
        else:
            with (self.store.root / "events.jsonl").open("ab") as file:
                file.write(line)

    def resume(self, back: int) -> None:
        """Start a new attempt from the save that is `back` before the newest."""
        self.saved = self.saved[: len(self.saved) - back]
        self.step = self.saved[-1] if self.saved else 0
        self.attempt += 1
        self.append("start", total_steps=1000)
        self.append("restore" if self.saved else "init", tier="durable", seconds=1.0)

    def save(self) -> None:
        self.step += 10
        self.append("evaluate", figures={"val/loss": 1.0 / self.step})
        self.append("save", blocked_seconds=0.5, clock={"steps": float(self.step)})
        self.append("commit", bytes=self.step, seconds_to_durable=2.0, read_back=self.step % 3 == 0)
        self.append("straggler", process=1, late=[1])
        self.saved.append(self.step)


def summarise(ledger: LedgerSummary, checkpoints: set[int]) -> dict[str, object]:
    """Return what a history uses of a ledger; notices and events of several writers have no defined order."""
    seen = {step: commit for step, commit in ledger.commits.items() if step in checkpoints}
    return {
        **{
            name: value
            for name, value in vars(ledger).items()
            if name not in ("commits", "verified", "forgotten", "events")
        },
        "commits": seen,
        "verified": ledger.verified & checkpoints,
        "num_events": len(ledger.events),
    }


def read_at_once(store: Store, checkpoints: set[int]) -> LedgerSummary:
    return apply_events(LedgerSummary(checkpoints), iterate_log(store, "events"))


ACTIONS = st.lists(
    st.one_of(st.just("save"), st.integers(0, 3), st.sampled_from(["look", "list nothing", "cut", "replace"])),
    min_size=3,
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["disk", "bucket"]), st.integers(1, 4), ACTIONS)
def test_incremental_reading_equals_reading_everything(kind, num_unseen, actions):
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledgers, "_UNSEEN_MAX", num_unseen)
        store = LocalStore(Path(directory)) if kind == "disk" else make_memory_bucket()
        written, reader = WrittenEvents(store), LedgerReader(store)
        written.resume(0)
        for action in [*actions, "look"]:
            match action:
                case "save":
                    written.save()
                case int():
                    written.resume(action)
                case "cut" | "replace":
                    damage(store, action)
                case _:
                    listed = set(written.saved) if action == "look" else set()
                    assert summarise(reader.read(listed), listed) == summarise(read_at_once(store, listed), listed)


def damage(store: Store, how: str) -> None:
    """Cut the last line of the first log file, or change its times; in a bucket, delete it instead."""
    if store.root is None and not store.list_names("events"):
        return
    name = "events.jsonl" if store.root is not None else f"events/{sorted(store.list_names('events'))[0]}"
    before = store.read(name)
    content = before[: before[:-1].rfind(b"\n") + 1] if how == "cut" else before.replace(b'"time": ', b'"time": 9')
    if store.root is None and how == "replace":
        store.remove(name)
    elif store.root is not None and how == "cut":
        with (store.root / name).open("r+b") as file:
            file.truncate(len(content))
    else:
        store.write(name, content)


@pytest.fixture
def count_parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that counts the bytes of events parsed since its last call."""
    count, parse = [0], jsonl.parse_lines

    def counting(content):
        count[0] += len(content)
        return parse(content)

    def since() -> int:
        found, count[0] = count[0], 0
        return found

    monkeypatch.setattr(jsonl, "parse_lines", counting)
    return since


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_the_second_reading_parses_only_new_events(kind, tmp_path, count_parsed):
    driver = MemoryDriver()
    store = LocalStore(tmp_path) if kind == "disk" else make_memory_bucket(driver)
    written, reader, fetched = WrittenEvents(store), LedgerReader(store), []
    driver.before = lambda verb, key: fetched.append(key) if verb == "get" else None
    for _ in range(20):
        written.resume(0)
        written.save()
    reader.read(set(written.saved))
    assert count_parsed() > 10_000
    fetched.clear()
    reader.read(set(written.saved))
    assert (count_parsed(), fetched) == (0, [])
    written.append("progress")
    ledger = reader.read(set(written.saved))
    assert 0 < count_parsed() < 200
    assert ledger.attempts[20].last == read_at_once(store, set(written.saved)).attempts[20].last
    assert fetched[:1] == ([] if kind == "disk" else ["run/events/000020.0.0000.jsonl"])


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_an_incomplete_line_is_read_when_it_is_complete(kind, tmp_path):
    store = LocalStore(tmp_path) if kind == "disk" else make_memory_bucket()
    name = "events.jsonl" if kind == "disk" else "events/000001.0.0000.jsonl"
    reader = LedgerReader(store)
    whole = encode_line({"time": 1.0, "attempt": 1, "process": 0, "event": "progress", "step": 1})
    last = encode_line({"time": 2.0, "attempt": 1, "process": 0, "event": "progress", "step": 7})
    for content, step in ((b"", None), (whole[:-9], None), (whole, 1), (whole + last[:20], 1), (whole + last, 7)):
        if kind == "disk":
            (tmp_path / name).write_bytes(content)
        else:
            store.write(name, content)
        attempts = reader.read(set()).attempts
        assert (attempts[1].step if attempts else None) == step


def test_a_failed_reading_is_repeated(tmp_path, monkeypatch):
    written, reader = WrittenEvents(LocalStore(tmp_path)), LedgerReader(LocalStore(tmp_path))
    written.resume(0)
    written.save()
    parse, fails = jsonl.parse_lines, iter([False, False, True])

    def failing(content):
        if next(fails, False):
            raise OSError("no disk")
        return parse(content)

    monkeypatch.setattr(jsonl, "parse_lines", failing)
    with pytest.raises(OSError, match="no disk"):
        reader.read({10})
    assert summarise(reader.read({10}), {10}) == summarise(read_at_once(LocalStore(tmp_path), {10}), {10})


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_each_event_has_words(event) -> None:
    examples = {float: 75.0, int: 3, str: "x", list: ["x"], dict: {"val/loss": 2.5}, bool: True}
    kinds = {key.name: next(kind for kind in examples if isinstance(examples[kind], key.type)) for key in event.details}
    row = {"event": event.name, "step": 7} | {name: examples[kind] for name, kind in kinds.items()}
    words = format_event(row)
    assert "?" not in words
    assert "_" not in words
    # Nothing is known about the details of another version, and of another program.
    assert format_event({"event": event.name}).isprintable()
    assert len(format_event(row | {key.name: "a\n" * 5000 for key in event.details})) <= 300


def test_a_late_restore_of_an_older_attempt_drops_no_steps() -> None:
    rows = [
        {"attempt": 2, "event": "restore", "step": 0},
        {"attempt": 2, "event": "evaluate", "step": 10, "figures": {"val/loss": 1.0}},
        {"attempt": 2, "event": "commit", "step": 10, "bytes": 5},
        {"attempt": 1, "event": "init", "step": 0},
    ]
    summary = apply_events(LedgerSummary(), [{"time": float(time)} | row for time, row in enumerate(rows)])
    assert ([*summary.commits], summary.validation) == ([10], [(10, 1.0)])
    apply_events(summary, [{"time": 9.0, "attempt": 3, "event": "restore", "step": 0}])
    assert ([*summary.commits], summary.validation) == ([], [])
