import os
import shutil
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from runner.config import DataConfig
from runner.data import load_dataset, load_global_batch, token_files
from runner.data.token_files import TokenSequence
from runner.errors import DataError
from tests.data.datasets import READ_METHODS, count_train_units, count_validation_examples, load, write_bin, write_npy


def test_y_is_the_token_after_x_and_training_has_no_padding(tmp_path: Path) -> None:
    dataset = load(write_bin(tmp_path / "a.bin", range(1000)), cache=tmp_path)
    x, y, padding_mask = dataset.read("train", 0, 5).values()
    assert x.shape == y.shape == padding_mask.shape == (5, 8)
    assert (x.dtype, y.dtype, padding_mask.dtype) == (np.int32, np.int32, np.bool_)
    assert (y == x + 1).all()
    assert (x[:, 0] % 8 == 0).all()
    assert padding_mask.all()


def test_an_epoch_trains_each_target_of_the_split_exactly_once(tmp_path: Path) -> None:
    dataset = load(write_bin(tmp_path / "a.bin", range(1000)), cache=tmp_path)
    assert (count_train_units(dataset), dataset.num_train_examples) == (800, 99)
    for epoch in range(2):
        y = dataset.read("train", epoch * 99, 99)["y"]
        assert sorted(y.ravel()) == list(range(1, 793))


def test_the_splits_share_no_token(tmp_path: Path) -> None:
    dataset = load(write_bin(tmp_path / "a.bin", range(1000)), cache=tmp_path)
    train = dataset.read("train", 0, dataset.num_train_examples)
    validation = dataset.read("validation", 0, count_validation_examples(dataset))
    assert max(train["x"].max(), train["y"].max()) < 800 <= min(validation["x"].min(), validation["y"].min())


def test_a_sequence_depends_only_on_its_number(tmp_path: Path) -> None:
    dataset = load(write_bin(tmp_path / "a.bin", range(1000)), cache=tmp_path)
    first = 10**9 * 512
    together = dataset.read("train", first, 6)
    again = load(tmp_path / "a.bin", cache=tmp_path)
    for row in range(6):
        np.testing.assert_array_equal(again.read("train", first + row, 1)["x"][0], together["x"][row])


def test_validation_is_in_order_and_padded_beyond_its_end(tmp_path: Path) -> None:
    dataset = load(write_bin(tmp_path / "a.bin", range(1000)), cache=tmp_path)
    assert count_validation_examples(dataset) == 24
    x, y, padding_mask = dataset.read("validation", 20, 10).values()
    assert x[:4, 0].tolist() == [960, 968, 976, 984]
    assert padding_mask[:4].all()
    assert not padding_mask[4:].any()
    assert not x[4:].any()
    assert not y[4:].any()
    assert not dataset.read("validation", 1000, 2)["padding_mask"].any()


def test_without_a_validation_fraction_there_is_no_validation(tmp_path: Path) -> None:
    dataset = load(write_bin(tmp_path / "a.bin", range(17)), cache=tmp_path, validation_fraction=0.0)
    assert (dataset.num_train_examples, count_validation_examples(dataset)) == (2, 0)
    assert not dataset.read("validation", 0, 3)["padding_mask"].any()


def test_the_fingerprint_depends_on_content_and_not_on_path_or_time(tmp_path: Path) -> None:
    for name, write in (("a.txt", lambda path: path.write_text("some text " * 50)), ("a.bin", write_small_bin)):
        write(tmp_path / name)
        there = tmp_path / f"elsewhere-{name}"
        shutil.copy(tmp_path / name, there)
        os.utime(there, (1, 1))
        here = load(tmp_path / name, cache=tmp_path / "one").fingerprint
        assert load(there, cache=tmp_path / "two").fingerprint == here
        assert load(there, cache=tmp_path / "two").fingerprint == here, "read from the cache"
        raw = bytearray(there.read_bytes())
        raw[250] ^= 1
        there.write_bytes(raw)
        assert load(there, cache=tmp_path / "two").fingerprint != here


def write_small_bin(path: Path) -> None:
    write_bin(path, range(500))


IDS = np.random.default_rng(0).integers(0, 60_000, (2, 500))
CHANGED_FILES: dict[str, tuple[np.ndarray, np.ndarray, str]] = {
    "cut": (IDS[0], IDS[1][:-9], "<u2"),
    "another of its size": (IDS[0], IDS[1][::-1], "<u2"),
    "in another order": (IDS[1], IDS[0], "<u2"),
    "of another type": (IDS[0], IDS[1], "<u4"),
}


@pytest.mark.parametrize("change", CHANGED_FILES)
def test_changed_token_files_change_the_fingerprint(tmp_path: Path, change: str) -> None:
    found = {}
    for name, (first, second, dtype) in {"as before": (*IDS, "<u2"), change: CHANGED_FILES[change]}.items():
        (tmp_path / name).mkdir()
        for file, ids in (("a.bin", first), ("b.bin", second)):
            ids.astype(dtype).tofile(tmp_path / name / file)
        names = {"<u2": "uint16", "<u4": "uint32"}
        found[name] = load(tmp_path / name / "*.bin", cache=tmp_path / "cache", dtype=names[dtype]).fingerprint
    assert found[change] != found["as before"]


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"sequence_length": 7}, {"validation_fraction": 0.25}, {"tokenizer": "characters"}],
    ids=lambda change: next(iter(change)),
)
def test_the_fingerprint_covers_every_setting_of_the_batches(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "a.txt").write_text("some text " * 50)
    plain = load(tmp_path / "a.txt", cache=tmp_path / "cache")
    assert load(tmp_path / "a.txt", cache=tmp_path / "cache", **change).fingerprint != plain.fingerprint
    int(plain.fingerprint, 16)


def test_a_dtype_is_rejected_for_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 20)
    with pytest.raises(DataError, match=r"data\.dtype=uint16: nothing reads it, data\.source=.* names text files"):
        load(tmp_path / "a.txt", cache=tmp_path, dtype="uint16")


@pytest.mark.parametrize("separator", get_args(DataConfig.model_fields["document_separator"].annotation))
def test_a_document_separator_changes_the_fingerprint(tmp_path: Path, separator: str) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("some text " * 50)
    joined = load(f"{tmp_path}/?.txt", cache=tmp_path / "cache")
    (tmp_path / "all").write_text("some text " * 100)
    assert joined.fingerprint == load(tmp_path / "all", cache=tmp_path / "cache").fingerprint
    found = load(f"{tmp_path}/?.txt", cache=tmp_path / "cache", document_separator=separator)
    assert (found.fingerprint == joined.fingerprint) == (separator == "none")


@pytest.mark.parametrize("name", ["val", "valid", "test", "Train", "", None])
def test_unknown_split_names_are_rejected(tmp_path: Path, name: Any) -> None:
    dataset = load(write_bin(tmp_path / "a.bin", range(500)), cache=tmp_path)
    with pytest.raises(ValueError, match=f"got {name!r}, needs 'train' or 'validation'"):
        dataset.read(name, 0, 1)
    with pytest.raises(ValueError, match=f"got {name!r}, needs 'train' or 'validation'"):
        load_global_batch(
            dataset, name, 0, accumulate_steps=1, micro_batch=1, sharding=SingleDeviceSharding(jax.devices()[0])
        )


def test_the_standard_library_is_a_dataset_without_user_files(tmp_path: Path) -> None:
    dataset = load("python-stdlib", cache=tmp_path, sequence_length=256, validation_fraction=0.05)
    assert count_train_units(dataset) > 5_000_000
    assert dataset.tokenizer is not None
    text = dataset.tokenizer.decode(dataset.read("train", 0, 64)["x"].ravel())
    assert "self" in text


def test_an_empty_dataset_is_rejected(tmp_path: Path) -> None:
    for name in ("a.txt", "a.bin"):
        (tmp_path / name).touch()
        for tokenizer in ("bytes", "characters"):
            with pytest.raises(DataError, match=rf"data\.source=.*{name}: is empty: it holds 0 tokens"):
                load(tmp_path / name, cache=tmp_path / "cache", tokenizer=tokenizer)
    write_npy(tmp_path / "a.npy", [])
    with pytest.raises(DataError, match="is empty"):
        load(tmp_path / "a.npy", cache=tmp_path / "cache")


def test_a_dataset_shorter_than_a_window_is_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.source=.*a\.bin: the training split has 4 tokens"):
        load(write_bin(tmp_path / "a.bin", range(5)), cache=tmp_path)


def test_text_has_the_vocabulary_of_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc" * 50)
    dataset = load(tmp_path / "a.txt", cache=tmp_path / "cache")
    assert dataset.vocabulary_size == 256
    dataset.validate_vocabulary(256)
    with pytest.raises(
        DataError, match=r"data\.tokenizer=bytes has 256 token ids, the model's vocabulary 128; use .* 256"
    ):
        dataset.validate_vocabulary(128)
    assert load(tmp_path / "a.txt", cache=tmp_path / "cache", tokenizer="characters").vocabulary_size == 3


def test_an_id_beyond_the_vocabulary_is_reported_with_file_and_position(tmp_path: Path) -> None:
    write_bin(tmp_path / "a.bin", range(50))
    write_bin(tmp_path / "b.bin", [1, 2, 50304, *range(40)])
    for _ in range(2):
        dataset = load(tmp_path / "*.bin", cache=tmp_path / "cache")
        assert dataset.vocabulary_size == 50305
        dataset.validate_vocabulary(50305)
        message = r"token id 50,304 at position 2 of .*b\.bin is beyond the model's vocabulary of 50,304 ids; .* 50,305"
        with pytest.raises(DataError, match=message):
            dataset.validate_vocabulary(50304)


def test_large_files_are_checked_when_read_if_the_vocabulary_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "SCANNED_TOKENS_MAX", 100)
    write_bin(tmp_path / "a.bin", range(90))
    write_npy(tmp_path / "b.npy", [*range(20), 95, *range(20), -1, *range(20)])

    with monkeypatch.context() as patch:
        patch.delattr(TokenSequence, "scan")
        dataset = load(tmp_path / "?.*", cache=tmp_path / "cache", vocabulary_size=95)
        dataset.validate_vocabulary(dataset.vocabulary_size)
    assert dataset.vocabulary_size == 95
    for read in READ_METHODS.values():
        read(dataset.train_sources[0].source, 0, 110)
        beyond = r"token id 95 at position 20 of .*b\.npy is beyond .* of 95 ids; .* least 96"
        with pytest.raises(DataError, match=beyond):
            read(dataset.train_sources[0].source, 100, 120)
    with pytest.raises(DataError, match=r"token id -1 at position 41 of .*b\.npy is negative"):
        dataset.read("validation", 0, 3)
    few = load(tmp_path / "a.bin", cache=tmp_path / "few", vocabulary_size=80)
    with pytest.raises(DataError, match=r"token id 89 at position 89 of .*a\.bin is beyond"):
        few.validate_vocabulary(80)


def test_a_negative_id_is_rejected(tmp_path: Path) -> None:
    dataset = load(write_npy(tmp_path / "a.npy", [*range(50), -1]), cache=tmp_path / "cache")
    with pytest.raises(DataError, match=r"token id -1 at position 50 of .*a\.npy is negative"):
        dataset.validate_vocabulary(100)


@pytest.mark.parametrize(
    ("names", "changes", "named"),
    [
        (["a", "b", "c", "d"], {}, "the last 1 of 4 files"),
        (["d", "c", "b", "a"], {"validation_fraction": 0.5}, "the last 2 of 4 files"),
        (["a"], {}, None),
        (["a", "b"], {"validation_fraction": 0.0}, None),
        (["a", "b"], {"validation": {"own": {"source": "OWN"}}}, None),
    ],
)
def test_a_validation_split_of_the_last_files_of_a_folder_is_reported(
    names: list[str], changes: dict[str, Any], named: str | None, tmp_path: Path
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "own").mkdir()
    for name in names:
        (tmp_path / "text" / f"{name}.txt").write_text(f"text of {name} " * 20)
    (tmp_path / "own" / "a.txt").write_text("a text of its own " * 20)
    if "validation" in changes:
        changes = {"validation": {"own": {"source": str(tmp_path / "own" / "*.txt")}}}
    config = DataConfig.model_validate(
        {"source": str(tmp_path / "text" / "*.txt"), "tokenizer": "bytes", "sequence_length": 8, **changes}
    )
    dataset = load_dataset(config, seed=0, batch_examples=4, cache_directory=tmp_path / "cache")
    lines = dataset.list_warnings(4)
    assert len(lines) == (named is not None)
    assert all(named in line and "config.data.validation" in line for line in lines)


def test_the_last_files_of_the_standard_library_are_not_reported(tmp_path: Path) -> None:
    config = DataConfig.model_validate({"source": "python-stdlib", "tokenizer": "bytes", "sequence_length": 8})
    dataset = load_dataset(config, seed=0, batch_examples=4)
    assert dataset.list_warnings(4) == []


def test_a_batch_larger_than_the_data_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 40)
    config = DataConfig.model_validate({"source": str(tmp_path / "a.txt"), "tokenizer": "bytes", "sequence_length": 8})
    dataset = load_dataset(config, seed=0, batch_examples=64, cache_directory=tmp_path / "cache")
    number = dataset.num_train_examples
    assert dataset.list_warnings(number) == []
    (line,) = dataset.list_warnings(number + 1)
    assert line.startswith(f"train.global_batch_examples={number + 1} is more than the {number} training examples of")
