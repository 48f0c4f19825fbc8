"""Export at the end of a run (`config.export`): whole or not at all, once, and refused before the first step."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.gpt import PretrainGPT
from runner import BaseTrainer
from runner.errors import InvalidError, StorageError
from runner.huggingface import export as exports
from runner.huggingface.export import MARK_FILE, has_export, publish_directory
from runner.storage import LocalStore
from tests.data.buckets import URL, serve_from
from tests.support.memory_bucket import MemoryDriver
from tests.support.tiny_jobs import make_gpt, stop_after
from tests.test_values import TrainLookup


def make(tmp_path: Path, out: Any = "out", **changes: Any) -> BaseTrainer:
    export = {"config.export": None if out is None else {"directory": str(tmp_path / out)}}
    return make_gpt(tmp_path / "run", **export | {"config.schedule": {"name": "constant"}} | changes)


def read_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_run_ends_with_an_export_and_makes_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(make(tmp_path), 5)
    assert not (tmp_path / "out").exists()
    make(tmp_path)()
    files = read_files(tmp_path / "out")
    assert {"config.json", "model.safetensors", "tokenizer.json", MARK_FILE} <= {*files}
    assert json.loads(files[MARK_FILE])["step"] == 8
    monkeypatch.setattr(exports, "publish_directory", pytest.fail)
    monkeypatch.setattr("runner.trainer.publish_directory", pytest.fail)
    make(tmp_path)()
    assert read_files(tmp_path / "out") == files
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


def test_a_finished_run_takes_the_key(tmp_path: Path) -> None:
    make(tmp_path, None)()
    make(tmp_path)()
    make(tmp_path, "other")()
    assert read_files(tmp_path / "out") == read_files(tmp_path / "other")


def test_an_export_that_fails_is_made_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise StorageError("away")

    with monkeypatch.context() as patched:
        patched.setattr("runner.trainer.export_into", fail)
        for _ in range(2):
            with pytest.raises(StorageError, match="away"):
                make(tmp_path)()
            assert not (tmp_path / "out").exists()
    make(tmp_path)()
    assert has_export(str(tmp_path / "out"), json.loads((tmp_path / "out" / MARK_FILE).read_bytes()))


REFUSED: dict[str, tuple[type[BaseTrainer], str]] = {
    "a model without a layout": (TrainLookup, "does not map its parameters"),
    "something else there": (PretrainGPT, "is not empty; nothing is overwritten"),
    "the run's own directory": (PretrainGPT, "in the directory of the run"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_export_that_cannot_be_made_is_refused_before_the_first_step(kind: str, tmp_path: Path) -> None:
    job_class, reason = REFUSED[kind]
    out = "run/out" if "own" in kind else "out"
    if "else" in kind:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("precious")
    changes: dict[str, Any] = {"config.export": {"directory": str(tmp_path / out)}}
    if job_class is TrainLookup:
        changes |= {"job": "tests.test_values:TrainLookup", "config.model.vocabulary_size": 256}
    job = make_gpt(tmp_path / "run", job_class, **changes)
    with pytest.raises(InvalidError, match=f"config.export: .*{reason}"):
        job()
    assert not LocalStore(tmp_path / "run").exists("job.json")


def test_a_longer_run_does_not_replace_the_export(tmp_path: Path) -> None:
    make(tmp_path)()
    files = read_files(tmp_path / "out")
    longer = {"config.train": {"total_steps": 10, "global_batch_examples": 16}}
    with pytest.raises(InvalidError, match="an export of this run with other options or step"):
        make(tmp_path, **longer)()
    make(tmp_path, "longer", **longer)()
    assert read_files(tmp_path / "out") == files
    assert json.loads((tmp_path / "longer" / MARK_FILE).read_bytes())["step"] == 10


def test_an_upload_that_was_killed_is_continued_by_the_same_export_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_from(monkeypatch, MemoryDriver())
    bucket = f"{URL}/out"
    mark = {"run": "a", "step": 8}
    store = exports.open_store(bucket)
    store.write(MARK_FILE, exports.encode_json(mark))
    assert not has_export(bucket, mark)
    with pytest.raises(InvalidError, match="is not empty"):
        has_export(bucket, mark | {"run": "b"})
    with publish_directory(bucket, mark) as made:
        (made / "config.json").write_text("{}")
    assert has_export(bucket, mark)
