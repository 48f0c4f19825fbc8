"""Order of flushes: files and their directories are flushed to disk before a name that refers to them is published."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from runner.checkpoint.arrays import ArrayWriter
from runner.checkpoint.manifest import remove_files, uncommit
from runner.cli.app import run_command
from runner.distributed.agreement import Hosts, Liveness
from runner.distributed.key_value import KeyValueStore
from runner.storage import LocalStore, append_line
from runner.storage.store import ABSENT
from tests.support.tiny_jobs import make_counter, make_gpt, stop_after
from tests.support.tokenise_inputs import make_tokenise_job, write_text_files


def get_key(path: Path | int) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


class FlushRecorder:
    """Record of all flushes by Python, which lists unflushed files when a name is published."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._times: dict[tuple[int, int], int] = {}
        self._published: dict[tuple[int, int], int] = {}  # time of the last publication in each directory
        self.checked: list[str] = []
        self._publish, self._fsync = {name: getattr(os, name) for name in ("link", "replace", "rename")}, os.fsync
        self._watched: dict[str, Callable[[Path, Path], Path]] = {}
        monkeypatch.setattr(os, "fsync", self._record)
        for name in self._publish:
            monkeypatch.setattr(os, name, self._make_publisher(name))

    def _record(self, descriptor: int) -> None:
        self._fsync(descriptor)
        self._times[get_key(descriptor)] = time.time_ns()

    def _make_publisher(self, name: str) -> Callable[..., Any]:
        def publish(source: Any, target: Any, *more: Any, **options: Any) -> Any:
            find_tree = self._watched.get(Path(target).name)
            if find_tree is not None:
                assert self.list_unflushed(find_tree(Path(source), Path(target))) == []
                self.checked.append(Path(target).name)
            result = self._publish[name](source, target, *more, **options)
            self._published[get_key(Path(target).parent)] = time.time_ns()
            return result

        return publish

    def watch(self, name: str, find_tree: Callable[[Path, Path], Path]) -> None:
        """Assert that a tree is flushed when `name` is published; `find_tree` gets the temporary and the final path."""
        self._watched[name] = find_tree

    def list_unflushed(self, tree: Path) -> list[str]:
        """List the files and directories below `tree` that changed since their last flush."""
        paths = [tree, *tree.rglob("*")] if tree.is_dir() else [tree]
        late = []
        for path in paths:
            # Publishing changes the directory of the temporary file, which is flushed right afterwards.
            if self._is_late(path) and not (path.is_dir() and any(path.glob(".*.tmp"))):
                late.append(str(path.relative_to(tree)))
        return late

    def _is_late(self, path: Path) -> bool:
        # In a directory of published names, the later removal of temporary names is ignored.
        key = get_key(path)
        return self._times.get(key, 0) < self._published.get(key, path.stat().st_mtime_ns)

    def list_late_parents(self, path: Path, root: Path) -> list[str]:
        """List the parent directories of `path` up to `root` that changed since their last flush."""
        return [str(each) for each in path.parents if each.is_relative_to(root) and self._is_late(each)]


@pytest.fixture
def flushes(monkeypatch: pytest.MonkeyPatch) -> FlushRecorder:
    return FlushRecorder(monkeypatch)


def test_all_files_of_a_checkpoint_are_flushed_before_its_manifest(flushes: FlushRecorder, tmp_path: Path) -> None:
    flushes.watch("manifest.json", lambda _, manifest: manifest.parent)
    flushes.watch("result.json", lambda temporary, _: temporary)
    root = tmp_path / "above" / "run"
    make_counter(root, **{"config.total_steps": 20, "checkpoint.every_steps": 10})()
    assert flushes.checked == ["manifest.json", "manifest.json", "result.json"]
    assert flushes.list_late_parents(root / "checkpoints" / "20" / "manifest.json", root) == []
    assert flushes.list_late_parents(root / "result.json", tmp_path) == []
    assert flushes.list_unflushed(root / "events.jsonl") == []


def test_a_fast_tier_part_is_flushed_before_its_rename(flushes: FlushRecorder, tmp_path: Path) -> None:
    flushes.watch("16", lambda temporary, _: temporary)
    options = {"checkpoint.local_directory": str(tmp_path / "new" / "fast"), "checkpoint.local_every_steps": 8}
    stop_after(make_counter(tmp_path / "run", **{"config.total_steps": 20} | options), 17)
    assert flushes.checked == ["16"]
    (part,) = tmp_path.glob("new/fast/*/*/16/part.json")
    assert flushes.list_late_parents(part.parent, tmp_path) == []


class SecondProcess(Hosts):
    """The second process of a job, which calls `on_report` when it reports to the first."""

    def __init__(self, on_report: Callable[[], None]) -> None:
        store = KeyValueStore(None)
        super().__init__(1, 2, store, Liveness(store, 1, 2, {}))
        self._on_report = on_report

    def collect(self, folder: str, value: Any, deadline_seconds: float) -> list[Any]:
        self._on_report()
        raise OSError("enough")


def test_each_process_flushes_its_own_files_before_it_reports(flushes: FlushRecorder, tmp_path: Path) -> None:
    target = tmp_path / "checkpoints" / "1" / "arrays.1"
    target.mkdir(parents=True)
    for name in ("0.0.bin", "0.json", "11.0.bin"):
        (target / name).touch()
    late: list[str] = []
    hosts = SecondProcess(lambda: late.extend(flushes.list_unflushed(target)))
    finish = ArrayWriter(LocalStore(tmp_path), hosts, tmp_path).start("checkpoints/1/arrays.1", {"x": jnp.arange(3)})
    with pytest.raises(OSError, match="enough"):
        finish(60.0)
    assert sorted(late) == ["0.0.bin", "0.json", "11.0.bin"]
    assert flushes.list_late_parents(target, tmp_path) == []


def test_the_files_of_a_checkpoint_are_deleted_after_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, calls = LocalStore(tmp_path), list[str]()
    store.write("checkpoints/1/manifest.json", b"{}")
    store.write("checkpoints/1/arrays.1/data", b"data")

    def record(name: str) -> None:
        act = getattr(LocalStore, name)
        monkeypatch.setattr(LocalStore, name, lambda store, path: [calls.append(f"{name} {path}"), act(store, path)])

    for name in ("remove", "flush_names", "remove_tree"):
        record(name)
    uncommit(store, "checkpoints/1", 1)
    remove_files(store, "checkpoints/1", 1)
    assert calls[:2] == ["remove checkpoints/1/manifest.json", "flush_names checkpoints/1"]
    assert {call.partition(" ")[0] for call in calls[2:]} == {"remove_tree"}


@pytest.mark.parametrize("source", ["a/b", "a"])
def test_a_rename_is_flushed(source: str, flushes: FlushRecorder, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    store.write("a/b/c.txt", b"content")
    store.move_tree(source, "quarantine/1")
    for directory in (store.root / source, store.root / "quarantine" / "1"):
        assert flushes.list_late_parents(directory, tmp_path) == []


@pytest.mark.soak
def test_metrics_are_flushed_before_the_commit(flushes: FlushRecorder, tmp_path: Path) -> None:
    flushes.watch("manifest.json", lambda _, manifest: manifest.parents[2] / "metrics.jsonl")
    job = make_gpt(tmp_path / "run", **{"checkpoint.every_steps": 4, "config.train.total_steps": 4})
    job()
    assert flushes.checked == ["manifest.json"]
    flushes.watch("out", lambda temporary, _: temporary)
    assert run_command(["export", str(job.store.root), "-o", str(tmp_path / "out")]) == 0
    assert flushes.checked[-1] == "out"
    assert flushes.list_late_parents(tmp_path / "out", tmp_path) == []


def test_a_corpus_is_flushed_before_its_index(flushes: FlushRecorder, tmp_path: Path) -> None:
    flushes.watch("index.json", lambda _, index: index.parent)
    source = write_text_files(tmp_path / "texts", ["one", "two", "three"])
    make_tokenise_job(tmp_path / "run", **{"config.source": source})()
    assert flushes.checked == ["index.json"]


def upload(store: LocalStore, name: str) -> None:
    source = store.root.parents[1] / "source"
    source.write_bytes(b"content")
    store.upload(source, name, 60.0)


def create_from(store: LocalStore, name: str) -> None:
    store.write("a/beside/other", b"other")
    store.create_from("a/beside", name, b"content")


def replace_if(store: LocalStore, name: str) -> None:
    store.write_if(name, b"content", store.write_if(name, b"other", ABSENT))


WRITES: dict[str, Callable[[LocalStore, str], Any]] = {
    "write": lambda store, name: store.write(name, b"content"),
    "write_chunks": lambda store, name: store.write_chunks(name, [b"con", b"tent"]),
    "write_if, absent": lambda store, name: store.write_if(name, b"content", ABSENT),
    "write_if": replace_if,
    "create_from": create_from,
    "upload": upload,
}


@pytest.mark.parametrize("kind", WRITES)
def test_every_write_is_flushed_with_its_directories(kind: str, flushes: FlushRecorder, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "new" / "run")
    (tmp_path / "source").write_bytes(b"content")
    WRITES[kind](store, "a/b.txt" if kind == "create_from" else "a/b/c.txt")
    assert flushes.list_unflushed(store.root / "a") == []
    assert flushes.list_late_parents(store.root / "a", tmp_path / "new") == []


def test_a_short_write_of_a_line_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:3]))
    append_line(tmp_path / "log.jsonl", b'{"a": 1}\n')
    assert (tmp_path / "log.jsonl").read_bytes() == b'{"a": 1}\n'
