"""Exports: readable by safetensors, bit-identical to the checkpoint, and either complete or absent."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from runner.checkpoint import inspect
from runner.config import DataConfig
from runner.errors import InvalidError, StorageError
from runner.huggingface import export as write
from runner.huggingface.export import ExportOptions, export
from runner.spec import dump_spec
from runner.storage import LocalStore, Store, open_store
from tests.checkpoint.test_checkpoint import Attempt
from tests.huggingface.small import SmallFamily, convert_to_tensors, make_leaves, nest, write_export
from tests.huggingface.test_load import load, make_sharded
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket
from tests.support.tiny_jobs import make_counter

URL = "gs://bucket/run"


@pytest.fixture(params=["disk", "bucket"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """A run with checkpoints of steps 1 and 2."""
    store: Store = LocalStore(tmp_path / "run")
    if request.param == "bucket":
        store = make_memory_bucket()
        monkeypatch.setattr(inspect, "open_store", lambda text: store if text == URL else open_store(text))
    attempt = Attempt(store, tmp_path / "staging")
    attempt.where = URL if request.param == "bucket" else str(tmp_path / "run")
    for step in (1, 2):
        state = {"step": jnp.int32(step), **nest({name: jnp.asarray(leaf) for name, leaf in make_leaves(step).items()})}
        attempt.save(str(step), state)
        assert attempt.saver.wait_until_finished()
    attempt.attempt.background_writer.flush()
    store.write("spec.yaml", dump_spec(make_counter(tmp_path / "other").resolved_spec()).encode())
    return attempt


def export_tensors(run: Attempt, out: Path, step: int | str = "newest", **options: Any) -> dict[str, np.ndarray]:
    """Export a step and return the tensors of all files as the library reads them."""
    export(run.where, step, SmallFamily(), None, str(out), ExportOptions(**options))
    found: dict[str, np.ndarray] = {}
    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            assert file.metadata() == {"format": "pt"}
        found |= load_file(path)
    return found


def are_tensors_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(
        (found[name].dtype, found[name].shape, found[name].tobytes()) == (value.dtype, value.shape, value.tobytes())
        for name, value in expected.items()
    )


def test_an_export_is_bit_identical_and_can_be_imported(run: Attempt, tmp_path: Path):
    before = run.content()
    (tmp_path / "out").mkdir()  # an empty target directory is allowed
    assert are_tensors_equal(export_tensors(run, tmp_path / "out"), convert_to_tensors(make_leaves(2)))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == SmallFamily().config() | {"torch_dtype": "float32"}
    for name, leaf in load(tmp_path / "out", make_sharded(make_leaves(5), (2, 2, 2))).items():
        assert np.asarray(leaf).tobytes() == make_leaves(2)[name].tobytes(), name
    assert are_tensors_equal(export_tensors(run, tmp_path / "first", 1), convert_to_tensors(make_leaves(1)))
    assert run.content() == before
    run.fence.check()


def test_shards_keep_their_size_limit_and_are_in_the_index(run: Attempt, tmp_path: Path):
    expected = convert_to_tensors(make_leaves(2))
    assert are_tensors_equal(export_tensors(run, tmp_path / "out", shard_bytes=4000), expected)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(value.nbytes for value in expected.values())}
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[-1] == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    for file in files:
        held = load_file(tmp_path / "out" / file)
        assert sum(value.nbytes for value in held.values()) <= 4000
        assert {name for name, place in index["weight_map"].items() if place == file} == held.keys()
    assert load(tmp_path / "out", make_sharded(make_leaves(5), (2, 2, 2))).keys() == make_leaves().keys()


def test_another_type_is_rounded_to_nearest_and_overflow_refused(run: Attempt, tmp_path: Path):
    nearest = {name: value.astype(ml_dtypes.bfloat16) for name, value in convert_to_tensors(make_leaves(2)).items()}
    assert are_tensors_equal(export_tensors(run, tmp_path / "out", dtype="bfloat16"), nearest)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    large = {name: value * 1e6 for name, value in make_leaves(3).items()}
    run.save("3", {"step": jnp.int32(3), **nest({name: jnp.asarray(leaf) for name, leaf in large.items()})})
    assert run.saver.wait_until_finished()
    with pytest.raises(InvalidError, match="has values that float16 cannot hold; use another --dtype"):
        export_tensors(run, tmp_path / "narrow", dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir() if "narrow" in path.name) == []


def test_a_damaged_newest_step_is_reported_and_the_previous_exported(
    run: Attempt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run.flip_bit(run.largest_file(2))
    assert are_tensors_equal(export_tensors(run, tmp_path / "out"), convert_to_tensors(make_leaves(1)))
    assert "checkpoint 2 is not good" in capsys.readouterr().err
    with pytest.raises(InvalidError, match="CRC-32C"):
        export_tensors(run, tmp_path / "other", 2)
    assert [path.name for path in tmp_path.iterdir() if "other" in path.name and path.is_dir()] == []


def test_an_existing_target_is_refused_before_reading(tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("kept")
    for out, message in (
        ("full", "full is not empty; nothing is overwritten"),
        ("full/kept", "is a file, needs a dir"),
    ):
        with pytest.raises(InvalidError, match=message):
            export("nowhere", "newest", SmallFamily(), None, str(tmp_path / out))
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "kept"]


def test_a_target_created_meanwhile_is_kept(run: Attempt, tmp_path: Path):
    class LateFamily(SmallFamily):
        def config(self) -> dict[str, Any]:
            (tmp_path / "out").mkdir(exist_ok=True)
            (tmp_path / "out" / "other").write_text("kept")
            return super().config()

    with pytest.raises(InvalidError, match="out is not empty; nothing is overwritten"):
        export(run.where, "newest", LateFamily(), None, str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["other"]
    assert [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_a_checkpoint_of_another_model_is_refused_by_leaf(run: Attempt, tmp_path: Path):
    class OtherFamily(SmallFamily):
        def pieces(self) -> list[Any]:
            return super().pieces()[:-1]

    with pytest.raises(InvalidError, match=r"checkpoint 2 is not of this model: params\.blocks\.expert: no piece has"):
        export(run.where, "newest", OtherFamily(), None, str(tmp_path / "out"))


def test_the_config_is_uploaded_last(run: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    driver = MemoryDriver()
    out = make_memory_bucket(driver)
    monkeypatch.setattr(write, "open_store", lambda text: out)
    sent: list[str] = []
    driver.before = lambda verb, key: sent.append(key) if verb == "put" else None
    export(run.where, "newest", SmallFamily(), None, "gs://bucket/out", ExportOptions(shard_bytes=4000))
    assert sent[-1].endswith("config.json")
    assert sum(key.endswith("config.json") and "generation" not in key for key in sent) == 1
    found = load(out, make_sharded(make_leaves(5), (2, 2, 2)))
    assert all(np.asarray(found[name]).tobytes() == value.tobytes() for name, value in make_leaves(2).items())
    with pytest.raises(InvalidError, match="is not empty; nothing is overwritten"):
        export(run.where, "newest", SmallFamily(), None, "gs://bucket/out")


def test_a_full_disk_is_retryable_and_leaves_nothing(run: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write.os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="No space left"):
        export_tensors(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json", "generation_config.json"])
def test_a_full_disk_is_not_mistaken_for_a_damaged_checkpoint(
    name: str, run: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_bytes = Path.write_bytes

    def fill(path: Path, content: bytes) -> int:
        if path.name == name:
            raise OSError(28, "No space left on device")
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(StorageError, match=f"No space left.*{name}"):
        export_tensors(run, tmp_path / "out", shard_bytes=4000)
    assert "checkpoint" not in capsys.readouterr().err


def test_a_failing_disk_is_not_mistaken_for_a_damaged_checkpoint(
    run: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*arguments: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(np, "memmap", fail)
    with pytest.raises(StorageError, match=r"Input/output error.*safetensors"):
        export_tensors(run, tmp_path / "out")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(run: Attempt, tmp_path: Path):
    class ShortFamily(SmallFamily):
        def config(self) -> dict[str, Any]:
            return super().config() | {"vocab_size": 200}

    text = tmp_path / "text.txt"
    text.write_text("text")
    data = DataConfig(source=str(text), sequence_length=16)
    with pytest.raises(InvalidError, match="the tokenizer has 256 ids, the model a vocabulary of 200"):
        export(run.where, "newest", ShortFamily(), data, str(tmp_path / "out"))


def test_an_export_equals_weights_written_by_hand(run: Attempt, tmp_path: Path):
    by_hand = write_export(tmp_path / "hand", convert_to_tensors(make_leaves(2)))
    export_tensors(run, tmp_path / "out")
    assert are_tensors_equal(
        load_file(tmp_path / "out" / "model.safetensors"), load_file(by_hand / "model.safetensors")
    )
