"""Files of real runs match the key tables: every key and type, and no others."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from experiments.counter import Counter
from runner import ExecutionSpec
from runner.attempts.events import EVENT_KEYS, EVENTS
from runner.attempts.layout import RESULT_KEYS
from runner.attempts.progress_file import PROGRESS_KEYS
from runner.checkpoint.manifest import INDEX_KEYS, MANIFEST_KEYS
from runner.metrics.rows import ROW_KEYS
from runner.storage import Key, parse_lines, url
from tests.benchmarks.scale import Pod
from tests.support.memory_bucket import MemoryDriver
from tests.support.tiny_jobs import ROOT, make_counter, make_gpt, stop_after
from tests.test_values import TrainLookup

# Result keys of runs that a hook ends or extends: tests/hook/test_run.py.
HOOK_KEYS = {"stopped_by", "stopped_because", "stopped_rule", "best_step", "best_value", "<name>"}
TABLES = {"row": ROW_KEYS, "event": EVENT_KEYS, "result": RESULT_KEYS, "manifest": MANIFEST_KEYS, "index": INDEX_KEYS}
TABLES["progress"] = PROGRESS_KEYS
OWNER_KEYS = {"owners", "owners.*.leaves", "owners.*.grid", "owners.*.runs"}  # of several processes
PIECE_KEYS = {"shards", "shards.*.start", "shards.*.shape", "shards.*.pieces"}
CHECKOUT_KEYS = {"environment.commit", "environment.dirty"}
ACCELERATOR_KEYS = {"perf/mfu", "perf/peak_bytes", "perf/device_bytes", "perf/device_utilization"}  # unknown for CPUs
ARRAY_KEYS = {
    "train/examples",
    "perf/examples_per_second",
    "perf/eval_examples_per_second",
    "examples",
}  # see tests/train/test_arrays.py
NORM_KEYS = {"train/param_norm"}
PADDING_KEYS = {"train/token_count"}  # see tests/metrics/test_meta.py
AUXILIARY_KEYS = {"train/noise_scale", "train/skipped_updates", "train/roll_backs", "train/high_loss_steps"}
ZOMBIE_KEYS = {"void", "contested"}
FORK_KEYS = {key.name for key in MANIFEST_KEYS if key.name.startswith("lineage")}
FEATURE_KEYS = {"roll_back_to", "features"}
END_KEYS = {"carry.metric"}  # see tests/checkpoint/test_retention.py


class GoogleBucket(MemoryDriver):
    """An in-memory bucket in place of a Google one."""

    prefix = "run"
    made: ClassVar[list["GoogleBucket"]] = []

    def __init__(self, address: str):
        super().__init__()
        GoogleBucket.made.append(self)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trainer that was stopped, lost its newest checkpoint to damage, and resumed to the end."""
    directory = tmp_path_factory.mktemp("record") / "run"
    changes = {
        "checkpoint.every_steps": 2,
        "checkpoint.keep_best": {"metric": "val/loss"},
        "checkpoint.grace_seconds": 1e-6,
        "logging.every_steps": 4,
        "config.eval.bits_per_byte": True,
        "config.eval.every_steps": 3,  # so that the last step is evaluated only because the run ends there
    }
    job = make_gpt(directory, TrainLookup, **changes)
    stop_after(job, 5)
    files = [path for path in (directory / "checkpoints/5").rglob("*") if path.is_file()]
    max(files, key=lambda path: path.stat().st_size).write_bytes(b"damaged")
    make_gpt(directory, TrainLookup, **changes)()
    return directory


@pytest.fixture(scope="module")
def counter_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A counter with a fast tier and automatic save intervals."""
    directory = tmp_path_factory.mktemp("record") / "run"
    fast = {"checkpoint.local_directory": str(directory.parent / "fast"), "checkpoint.local_every_steps": 1}
    make_counter(directory, **fast, **{"checkpoint.every_steps": None, "checkpoint.every": "auto"})()
    return directory


def manifests(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in directory.rglob("manifest.json")]


def iterate_keys(table: Sequence[Key], value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of each key of a JSON object; nested objects only if the table has their keys."""
    names = list_names(table)
    is_map = any(f"{name}.".startswith(f"{prefix}*.") for name in names)
    for own, inner in value.items():
        name = f"{prefix}{'*' if is_map else own}"
        if not is_map or name in names:
            yield name, inner
        if any(key.name.startswith(f"{name}.") for key in table):
            for part in inner if isinstance(inner, list) else [inner]:
                yield from iterate_keys(table, part, f"{name}.")


def collect_keys(table: Sequence[Key], values: Sequence[dict[str, Any]]) -> set[str]:
    """Return all keys in `values`, after checking that each is in the table with a value of its type."""
    types = {key.name: key.type for key in table}
    found = {}
    for value in values:
        for name, inner in iterate_keys(table, value):
            assert name in types, f"{name} is written but not in the table: {value}"
            assert isinstance(inner, types[name]), f"{name} is {inner!r}, not {types[name]}"
            found[name] = inner
    return set(found)


def list_names(table: Sequence[Key]) -> set[str]:
    return {key.name for key in table}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_each_key_of_a_table_is_unique_and_documented(table: tuple[Key, ...]) -> None:
    assert len(list_names(table)) == len(table)
    assert all(key.meaning.endswith(".") for key in table)


def test_the_rows_of_a_run_have_the_keys_of_the_table(trained_run: Path) -> None:
    rows = parse_lines((trained_run / "metrics.jsonl").read_bytes())
    of_names = {name for name in list_names(ROW_KEYS) if "<" in name}  # of sets, groups, sources and forward's meta
    absent = of_names | ACCELERATOR_KEYS | NORM_KEYS | PADDING_KEYS | AUXILIARY_KEYS | ARRAY_KEYS
    assert collect_keys(ROW_KEYS, rows) == list_names(ROW_KEYS) - absent


def test_a_result_has_the_keys_of_the_table(trained_run: Path, counter_run: Path) -> None:
    results = [json.loads((directory / "result.json").read_text()) for directory in (trained_run, counter_run)]
    assert collect_keys(RESULT_KEYS, results[:1]) == list_names(RESULT_KEYS) - HOOK_KEYS - ARRAY_KEYS
    of_trainers = {key.name for key in RESULT_KEYS if "trainers only" in key.meaning}
    assert collect_keys(RESULT_KEYS, results[1:]) == list_names(RESULT_KEYS) - of_trainers - HOOK_KEYS - ARRAY_KEYS


def test_a_manifest_has_the_keys_of_the_table(trained_run: Path, counter_run: Path) -> None:
    written = collect_keys(MANIFEST_KEYS, manifests(trained_run)) | CHECKOUT_KEYS
    assert (
        written
        == list_names(MANIFEST_KEYS) - PIECE_KEYS - OWNER_KEYS - ZOMBIE_KEYS - FORK_KEYS - FEATURE_KEYS - END_KEYS
    )
    of_trainers = {key.name for key in MANIFEST_KEYS if key.name.startswith(("topology", "carry", "metric"))}
    assert collect_keys(MANIFEST_KEYS, manifests(counter_run)) | CHECKOUT_KEYS == written - of_trainers


def test_the_records_of_a_fork_have_the_keys_of_the_tables(counter_run: Path, tmp_path: Path) -> None:
    make_counter(tmp_path, **{"config.total_steps": 45, "checkpoint.fork_from": {"run": str(counter_run)}})()
    assert collect_keys(MANIFEST_KEYS, manifests(tmp_path)) >= FORK_KEYS
    (row,) = [row for row in parse_lines((tmp_path / "events.jsonl").read_bytes()) if row["event"] == "fork"]
    details = next(event for event in EVENTS if event.name == "fork").details
    assert collect_keys((*EVENT_KEYS, *details), [row]) == list_names((*EVENT_KEYS, *details))


def test_a_manifest_in_a_bucket_has_the_keys_of_the_table(trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(url._DRIVERS, "gs", (__name__, GoogleBucket.__name__, ""))
    spec = {"name": "count", "job": "experiments.counter:Counter", "directory": "gs://bucket/run"}
    Counter(ExecutionSpec(**spec, config={"total_steps": 3, "width": 8}))()
    # Other buckets are made to look at the runs beside this one.
    objects = {name: content for bucket in GoogleBucket.made for name, content in bucket.objects.items()}
    found = [json.loads(content) for name, (content, _) in objects.items() if name.endswith("/manifest.json")]
    assert collect_keys(MANIFEST_KEYS, found) >= {"indexes", "files", "read_back"}
    tables = [json.loads(content) for name, (content, _) in objects.items() if name.endswith("/0.json")]
    assert collect_keys(INDEX_KEYS, tables) == list_names(INDEX_KEYS)
    tables = [json.loads(path.read_text()) for path in trained_run.glob("checkpoints/*/arrays.*/0.json")]
    assert collect_keys(INDEX_KEYS, tables) == list_names(INDEX_KEYS)


def test_manifests_with_a_file_for_each_piece_have_the_keys_of_the_table() -> None:
    paths = (ROOT / "tests/data/format_1/bucket").glob("checkpoints/*/manifest.json")
    assert collect_keys(MANIFEST_KEYS, [json.loads(path.read_text()) for path in paths]) >= PIECE_KEYS


def test_manifests_of_several_processes_have_the_keys_of_the_table(tmp_path: Path) -> None:
    pod = Pod(3, 2, 2, tmp_path)
    pod.save()
    assert collect_keys(MANIFEST_KEYS, [pod.manifest.to_json()]) >= OWNER_KEYS


def test_parts_of_the_fast_tier_have_the_keys_of_the_tables(tmp_path: Path) -> None:
    fast = {"checkpoint.local_directory": str(tmp_path / "fast"), "checkpoint.local_every_steps": 2}
    stop_after(make_counter(tmp_path / "run", **{"config.total_steps": 9} | fast), 5)
    parts = [json.loads(path.read_text()) for path in tmp_path.glob("fast/*/*/*/part.json")]
    for part in parts:
        part.pop("companions")
    assert collect_keys(MANIFEST_KEYS, parts) >= {"files", "indexes"}
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("fast/*/*/*/arrays/blocks.json")]
    assert collect_keys(INDEX_KEYS, tables) == list_names(INDEX_KEYS)


def test_the_events_of_runs_have_the_keys_of_the_table(trained_run: Path, counter_run: Path) -> None:
    rows = [row for run in (trained_run, counter_run) for row in parse_lines((run / "events.jsonl").read_bytes())]
    for row in rows:
        event = next((event for event in EVENTS if event.name == row["event"]), None)
        assert event is not None, f"{row['event']} is written but not in the table"
        assert collect_keys((*EVENT_KEYS, *event.details), [row]) >= list_names(EVENT_KEYS)
    often = {"start", "compile", "prepare", "init", "restore", "save", "commit", "preempt", "done"}
    assert {row["event"] for row in rows} >= often | {"fallback", "quarantine", "cadence", "grace"}
