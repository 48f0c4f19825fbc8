"""Files of real runs match the tables: every key, every type, and no other."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.counter import Counter
from runner import ExecutionSpec
from runner.checkpoint.manifest import MANIFEST_KEYS
from runner.metrics.rows import ROW_KEYS
from runner.records import Key
from runner.run.events import EVENT_KEYS, EVENTS
from runner.run.layout import RESULT_KEYS
from runner.storage import parse_lines, url
from tests.support.memory_bucket import MemoryDriver
from tests.support.tiny_jobs import make_counter, make_gpt, stop_after

# Of `result.json`, where a hook has ended the run or has more to say: tests/hook/test_run.py.
OF_HOOKS = {"stopped_by", "stopped_because", "stopped_rule", "best_step", "best_value", "<name>"}
TABLES = {"row": ROW_KEYS, "event": EVENT_KEYS, "result": RESULT_KEYS, "manifest": MANIFEST_KEYS}
IN_A_BUCKET = {"shards", "shards.*.start", "shards.*.shape", "shards.*.pieces"}
OF_A_CHECKOUT = {"environment.commit", "environment.dirty"}
OF_AN_ACCELERATOR = {"perf/mfu", "perf/peak_bytes"}  # of no CPU is that known
OF_NORMS = {"train/param_norm"}
OF_RIDERS = {"train/noise_scale"}
OF_A_ZOMBIE = {"void", "contested"}


class Bucket(MemoryDriver):
    """A bucket in memory that stands in for one of Google's."""

    prefix = "run"
    newest: "Bucket"

    def __init__(self, address: str):
        super().__init__()
        Bucket.newest = self


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT that was stopped, lost its newest checkpoint to damage, and went on to the end."""
    directory = tmp_path_factory.mktemp("record") / "run"
    changes = {
        "checkpoint.every_steps": 2,
        "checkpoint.keep_best": {"metric": "val/loss"},
        "checkpoint.grace_seconds": 1e-6,
        "logging.every_steps": 4,
        "config.eval.bits_per_byte": True,
    }
    job = make_gpt(directory, **changes)
    stop_after(job, 5)
    files = [path for path in (directory / "checkpoints/5").rglob("*") if path.is_file()]
    max(files, key=lambda path: path.stat().st_size).write_bytes(b"damaged")
    make_gpt(directory, **changes)()
    return directory


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A counter with a fast tier, saving when it pays."""
    directory = tmp_path_factory.mktemp("record") / "run"
    fast = {"checkpoint.local_directory": str(directory.parent / "fast"), "checkpoint.local_every_steps": 1}
    make_counter(directory, **fast, **{"checkpoint.every_steps": None, "checkpoint.every": "auto"})()
    return directory


def manifests(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in directory.rglob("manifest.json")]


def walk(table: Sequence[Key], value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Name, as a table writes it, and value of each key in a JSON object; inner objects only where the table looks."""
    is_map = any(key.name.startswith(f"{prefix}*.") for key in table)
    for own, inner in value.items():
        name = f"{prefix}{'*' if is_map else own}"
        if not is_map:
            yield name, inner
        if any(key.name.startswith(f"{name}.") for key in table):
            for part in inner if isinstance(inner, list) else [inner]:
                yield from walk(table, part, f"{name}.")


def keys_written(table: Sequence[Key], values: Sequence[dict[str, Any]]) -> set[str]:
    """All keys in `values`, each of which must be in the table, with a value of its type."""
    types = {key.name: key.type for key in table}
    found = {}
    for value in values:
        for name, inner in walk(table, value):
            assert name in types, f"{name} is written and not in the table: {value}"
            assert isinstance(inner, types[name]), f"{name} is {inner!r}, not {types[name]}"
            found[name] = inner
    return set(found)


def names(table: Sequence[Key]) -> set[str]:
    return {key.name for key in table}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_each_key_of_a_table_is_unique_and_documented(table: tuple[Key, ...]) -> None:
    assert len(names(table)) == len(table)
    assert all(key.meaning.endswith(".") for key in table)


def test_the_rows_of_a_run_have_the_keys_of_the_table(trained: Path) -> None:
    rows = parse_lines((trained / "metrics.jsonl").read_bytes())
    of_names = {name for name in names(ROW_KEYS) if "<" in name}  # of sets, groups, sources and a forward's own
    absent = of_names | OF_AN_ACCELERATOR | OF_NORMS | OF_RIDERS
    assert keys_written(ROW_KEYS, rows) == names(ROW_KEYS) - absent


def test_a_result_has_the_keys_of_the_table(trained: Path, counted: Path) -> None:
    results = [json.loads((directory / "result.json").read_text()) for directory in (trained, counted)]
    assert keys_written(RESULT_KEYS, results[:1]) == names(RESULT_KEYS) - OF_HOOKS
    of_trainers = {key.name for key in RESULT_KEYS if "trainers only" in key.meaning}
    assert keys_written(RESULT_KEYS, results[1:]) == names(RESULT_KEYS) - of_trainers - OF_HOOKS


def test_a_manifest_has_the_keys_of_the_table(trained: Path, counted: Path) -> None:
    written = keys_written(MANIFEST_KEYS, manifests(trained)) | OF_A_CHECKOUT
    assert written == names(MANIFEST_KEYS) - IN_A_BUCKET - OF_A_ZOMBIE
    of_trainers = {key.name for key in MANIFEST_KEYS if key.name.startswith(("topology", "carry", "metric"))}
    assert keys_written(MANIFEST_KEYS, manifests(counted)) | OF_A_CHECKOUT == written - of_trainers


def test_a_manifest_in_a_bucket_has_the_keys_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(url._DRIVERS, "gs", (__name__, Bucket.__name__, ""))
    spec = {"name": "count", "job": "experiments.counter:Counter", "directory": "gs://bucket/run"}
    Counter(ExecutionSpec(**spec, config={"total_steps": 3, "width": 8}))()
    objects = Bucket.newest.objects
    found = [json.loads(content) for name, (content, _) in objects.items() if name.endswith("/manifest.json")]
    assert keys_written(MANIFEST_KEYS, found) >= IN_A_BUCKET


def test_the_events_of_runs_have_the_keys_of_the_table(trained: Path, counted: Path) -> None:
    rows = [row for run in (trained, counted) for row in parse_lines((run / "events.jsonl").read_bytes())]
    for row in rows:
        event = next((event for event in EVENTS if event.name == row["event"]), None)
        assert event is not None, f"{row['event']} is written and not in the table"
        assert keys_written((*EVENT_KEYS, *event.details), [row]) >= names(EVENT_KEYS)
    often = {"start", "compile", "prepare", "init", "restore", "save", "commit", "preempt", "done"}
    assert {row["event"] for row in rows} >= often | {"fallback", "quarantine", "cadence", "grace"}
