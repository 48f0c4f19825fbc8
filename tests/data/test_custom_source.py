"""User-defined sources: their output is validated, and a run on one resumes like any other."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from runner.config import DataConfig
from runner.data import Source, load_dataset
from runner.errors import DataError, InvalidError
from runner.storage import LocalStore, read_json
from tests.data.datasets import READ_METHODS
from tests.support.tiny_jobs import make_gpt, stop_after


class Squares(Source):
    """Square numbers modulo 97, from an offset on."""

    def __init__(self, first: int, count: int = 1000):
        self.first, self.count = first, count

    vocabulary_size = 97

    @property
    def fingerprint(self) -> str:
        return f"squares from {self.first}"

    def __len__(self) -> int:
        return self.count

    def read(self, start: int, stop: int) -> np.ndarray:
        return (self.first + np.arange(start, stop)) ** 2 % 97


class Floats(Squares):
    def read(self, start: int, stop: int) -> np.ndarray:
        return super().read(start, stop).astype(np.float32)


class Short(Squares):
    def read(self, start: int, stop: int) -> np.ndarray:
        return super().read(start, stop)[1:]


class Listed(Squares):
    def read(self, start: int, stop: int) -> Any:
        return super().read(start, stop).tolist()


class Large(Squares):
    def read(self, start: int, stop: int) -> np.ndarray:
        return super().read(start, stop) + (np.arange(start, stop) == 5) * 97


class Negative(Squares):
    def read(self, start: int, stop: int) -> np.ndarray:
        return super().read(start, stop) - (np.arange(start, stop) == 5) * 97


class Nameless(Squares):
    fingerprint = ""


class Taking(Squares):
    fields: ClassVar = {"weight": np.float32, "y": np.float32}


class Drifting(Squares):
    reads = 0

    @property
    def fingerprint(self) -> str:
        return f"{self.reads}"

    def read(self, start: int, stop: int) -> np.ndarray:
        Drifting.reads += 1
        return super().read(start, stop)


class Unfinished(Source):
    pass


MODULE = "tests.data.test_custom_source"


def load(name: str, **changes: Any) -> Any:
    options = {"first": 3}
    config = DataConfig.model_validate(
        {"source": f"{MODULE}:{name}", "options": options, "sequence_length": 8, "validation_fraction": 0.1} | changes
    )
    return load_dataset(config, seed=0, batch_examples=16)


def test_sequences_are_windows_of_the_source() -> None:
    dataset = load("Squares")
    found = dataset.read("validation", 0, 2)
    np.testing.assert_array_equal(found["x"].ravel(), (3 + np.arange(900, 916)) ** 2 % 97)
    assert (found["y"][:, :-1] == found["x"][:, 1:]).all()
    assert dataset.vocabulary_size == 97
    dataset.validate_vocabulary(97)


def test_the_model_vocabulary_must_contain_its_ids() -> None:
    with pytest.raises(DataError, match=r"Squares: its ids go up to 96, the model's vocabulary is 90; .* at least 97"):
        load("Squares").validate_vocabulary(90)


def test_the_fingerprint_and_length_of_the_source_enter_the_dataset_fingerprint() -> None:
    fingerprints = [load("Squares", options=options).fingerprint for options in ({"first": 3}, {"first": 4})]
    fingerprints.append(load("Squares", options={"first": 3, "count": 2000}).fingerprint)
    assert len(set(fingerprints)) == 3
    assert fingerprints[0] == load("Squares").fingerprint


def test_all_read_methods_use_the_overridden_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def read_ranges(source: Squares, ranges: Any) -> list[np.ndarray]:
        asked.append(ranges)
        return [source.read(*range_) for range_ in ranges]

    monkeypatch.setattr(Squares, "read_ranges", read_ranges)
    source = load("Squares").train_sources[0].source
    assert (source.read_many(np.array([7, 20]), 9)[1] == source.read_ranges([(20, 29)])[0]).all()
    assert asked == [[(7, 16), (20, 29)], [(20, 29)]]
    monkeypatch.setattr(Squares, "read_ranges", lambda source, ranges: [])
    with pytest.raises(DataError, match="read_ranges gave 0 arrays, needs 1"):
        source.read_ranges([(0, 9)])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Floats", r"Floats: read\(0, 9\) gave float32 of shape \(9,\), needs an array of 9 integers"),
        ("Short", r"Short: read\(0, 9\) gave int64 of shape \(8,\), needs an array of 9 integers"),
        ("Listed", r"Listed: read\(0, 9\) gave list, needs an array of 9 integers"),
        ("Large", r"Large: id 161 at position 5 is outside its vocabulary of 97"),
        ("Negative", r"Negative: id -33 at position 5 is outside its vocabulary of 97"),
    ],
)
def test_the_output_of_a_source_is_validated(name: str, message: str) -> None:
    dataset = load(name, validation_fraction=0.0)
    for read in READ_METHODS.values():
        with pytest.raises(DataError, match=message):
            read(dataset.train_sources[0].source, 0, 9)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Squares", {}, r"Squares: data\.options: missing a required argument: 'first'"),
        ("Squares", {"first": 1, "last": 2}, r"data\.options: got an unexpected keyword argument 'last'"),
        ("Nameless", {"first": 1}, r"Nameless: fingerprint is ''; return a text"),
        ("Unfinished", {}, r"Unfinished: does not implement __len__, fingerprint, read, vocabulary_size"),
        ("Taking", {"first": 1}, r"Taking: declares the reserved field y"),
        ("Sqares", {"first": 1}, r"has no Sqares; did you mean Squares\?"),
        ("DataConfig", {}, r"DataConfig is not a subclass of Source"),
    ],
)
def test_an_invalid_source_class_is_rejected_in_one_line(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(name, options=options)


def test_a_dtype_is_rejected_for_a_source_class() -> None:
    with pytest.raises(DataError, match=r"data\.dtype=.*: nothing reads it, data\.source=.*Squares is a class"):
        load("Squares", dtype="uint16")


def test_options_are_rejected_for_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 100)
    with pytest.raises(DataError, match=r"data\.options=.*: nothing reads it, data\.source=.* names text files"):
        load("", source=str(tmp_path / "a.txt"))


def test_a_changed_source_is_detected_before_a_save() -> None:
    dataset = load("Drifting")
    dataset.check()
    dataset.read("train", 0, 1)
    with pytest.raises(DataError, match="its fingerprint changed since the job started"):
        dataset.check()


@pytest.mark.soak
def test_resumed_run_is_bit_identical_and_rejects_other_tokens(tmp_path: Path) -> None:
    def job(name: str, first: int = 3) -> Any:
        data = {"source": f"{MODULE}:Squares", "options": {"first": first}, "sequence_length": 16}
        return make_gpt(tmp_path / name, **{"config.data": data, "config.train.total_steps": 4})

    job("whole")()
    stopped = job("stopped")
    stop_after(stopped, 2)
    job("stopped")()
    assert read_json(LocalStore(tmp_path / "stopped"), "result.json") == read_json(
        LocalStore(tmp_path / "whole"), "result.json"
    )
    half = job("half")
    stop_after(half, 2)
    with pytest.raises(InvalidError, match="would be another trajectory"):
        job("half", first=4)()
