"""Data sets of arrays: their examples are validated, split and ordered like tokens."""

import asyncio
import errno
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.config import DataConfig, TokenSource
from runner.data import Dataset, Source, load_dataset, load_validation_set
from runner.data.array_examples import describe_slowest_read
from runner.errors import DataError, RetryableError, StorageError
from tests.data.datasets import count_train_units, count_validation_examples
from tests.support import arrays
from tests.support.arrays import BAD_EXAMPLES, Images

MODULE = "tests.support.arrays"
HERE = "tests.data.test_array_examples"
N = 205  # examples of `Images`


def load(source: str = f"{MODULE}:Images", seed: int = 0, **changes: Any) -> Dataset:
    config = DataConfig.model_validate({"source": source, "validation_fraction": 0.2} | changes)
    return load_dataset(config, seed=seed, batch_examples=16)


def test_fields_are_those_of_the_first_example_and_a_mask() -> None:
    found = {name: (field.dtype, field.shape, field.padding) for name, field in load().fields.items()}
    assert found == {
        "image": (np.float32, (4, 4, 1), 0),
        "label": (np.int32, (), -1),
        "index": (np.int32, (2,), 0),
        "padding_mask": (np.bool_, (), 0),
    }


def test_an_epoch_holds_each_training_example_once() -> None:
    dataset, images = load(), Images()
    assert (dataset.num_train_examples, count_train_units(dataset), count_validation_examples(dataset)) == (
        164,
        164,
        41,
    )
    for epoch in range(2):
        found = dataset.read("train", 164 * epoch, 164)
        indices = found["index"][:, 0].tolist()
        assert sorted(indices) == list(range(164))
        assert indices != sorted(indices)
        for place in (0, 77, 163):
            example = images[indices[place]]
            np.testing.assert_array_equal(found["image"][place], example["image"])
            assert found["label"][place] == example["label"]
        assert found["padding_mask"].all()


def test_a_validation_set_is_in_order_and_ends_with_padding() -> None:
    found = load().read("validation", 38, 6)
    assert found["index"][:3, 0].tolist() == [202, 203, 204]
    assert found["padding_mask"].tolist() == [True] * 3 + [False] * 3
    assert found["label"][3:].tolist() == [-1] * 3
    assert not found["image"][3:].any()
    assert not found["index"][3:].any()


def test_a_mixture_and_further_sets_are_those_of_tokens() -> None:
    source = {"source": f"{MODULE}:Images"}
    mixture = [
        {"name": "many", **source, "weight": 3},
        {"name": "few", **source, "options": {"examples": 50, "seed": 1}, "max_epochs": 2.0},
    ]
    data = {"source": "python-stdlib", "mixture": mixture, "validation": {"other": {**source, "options": {"seed": 2}}}}
    dataset = load(**data)
    assert {name: examples.num_examples for name, examples in dataset.validation.items()} == {
        "many": 41,
        "few": 10,
        "other": N,
    }
    assert [share.units for share in dataset.compute_shares(80)] == [60, 20]
    assert dataset.compute_metrics(80) == {
        "data/many/examples": 60,
        "data/few/examples": 20,
        "data/many/epochs": 60 / 164,
        "data/few/epochs": 0.5,
    }
    with pytest.raises(DataError, match=r"few=.*: the run takes 100 examples of it, 2\.5 epochs of its 40; max"):
        dataset.validate_epochs(400)
    other = {"name": "wide", **source, "options": {"size": 5}}
    with pytest.raises(DataError, match=r"wide=.*: its examples hold image float32 5x5x1,.* the first .* 4x4x1"):
        load(**data | {"mixture": [mixture[0], other]})


def test_a_named_set_is_read_whole() -> None:
    config = DataConfig(source=f"{MODULE}:Images")
    named = TokenSource(source=f"{MODULE}:Images", options={"seed": 7})
    dataset = load_validation_set(config, "data", named, vocabulary_size=0)
    assert dataset.validation["data"].num_examples == N
    np.testing.assert_array_equal(dataset.read("data", 3, 1)["image"][0], Images(seed=7)[3]["image"])


def test_a_class_may_read_a_data_set_of_grain() -> None:
    dataset = load(f"{MODULE}:GrainImages", options={"examples": 100, "factor": 2.0})
    found = dataset.read("validation", 0, 1)
    np.testing.assert_array_equal(found["image"][0], Images(100)[80]["image"] * 2)
    assert dataset.fields["label"].padding == 0


@pytest.mark.parametrize("kind", BAD_EXAMPLES)
def test_a_bad_example_is_named(kind: str) -> None:
    dataset = load(f"{MODULE}:Bad", options={"kind": kind}, validation_fraction=0.0)
    with pytest.raises(DataError, match=BAD_EXAMPLES[kind][1]) as caught:
        dataset.read("train", 0, 40)
    assert str(caught.value).startswith(f"data.source={MODULE}:Bad: example 6")


class Refilled(Images):
    """Every example is in the same memory."""

    buffer = np.zeros((4, 4, 1), np.float32)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.buffer[:] = super().__getitem__(index)["image"]
        return {"image": self.buffer, "label": 0}


class Remote(Images):
    """Data set that fails in one of its places."""

    def __init__(self, place: str, kind: str):
        super().__init__()
        self.place, self.kind = place, kind
        self.fail_at("constructor")

    def fail_at(self, place: str) -> None:
        if self.place == place:
            raise ERRORS[self.kind][0]

    def __len__(self) -> int:
        self.fail_at("length")
        return super().__len__()

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.fail_at("example")
        return super().__getitem__(index)

    @property
    def fingerprint(self) -> str:
        self.fail_at("fingerprint")
        return "remote"

    @fingerprint.setter
    def fingerprint(self, name: str) -> None:
        pass


def wrap(cause: Exception) -> Exception:
    """Return an error of a library that another one has caused."""
    error = RuntimeError("request failed")
    error.__cause__ = cause
    return error


ERRORS: dict[str, tuple[Exception, type[Exception]]] = {
    "reset": (ConnectionResetError("reset"), RetryableError),
    "time": (TimeoutError("late"), RetryableError),
    "name": (socket.gaierror(-3, "no name"), RetryableError),
    "route": (OSError(errno.EHOSTUNREACH, "no route"), RetryableError),
    "stale": (OSError(errno.ESTALE, "stale"), RetryableError),
    "storage": (StorageError("503"), RetryableError),
    "caused": (wrap(wrap(ConnectionRefusedError("refused"))), RetryableError),
    "file": (FileNotFoundError(errno.ENOENT, "gone"), DataError),
    "bug": (ZeroDivisionError("a bug"), DataError),
    "missing": (AttributeError("no such attribute"), DataError),
}


@pytest.mark.parametrize("place", ["constructor", "length", "example", "fingerprint"])
@pytest.mark.parametrize("kind", ERRORS)
def test_a_network_that_fails_is_no_mistake_in_the_data(place: str, kind: str) -> None:
    with pytest.raises(ERRORS[kind][1], match=r"raised ") as caught:
        load(f"{HERE}:Remote", options={"place": place, "kind": kind})
    assert type(caught.value) is ERRORS[kind][1]
    assert f"data.source={HERE}:Remote" in str(caught.value)


class Lazy(Mapping[str, Any]):
    """Example whose fields raise when they are read."""

    def __init__(self, error: BaseException):
        self.error = error

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter(["label"])

    def __getitem__(self, name: str) -> Any:
        raise self.error


class LazyDict(dict[str, Any]):
    """Dict whose `items` raises."""

    def __init__(self, error: BaseException):
        super().__init__(label=0)
        self.error = error

    def items(self) -> Any:
        raise self.error


class Rude(Images):
    """Data set whose code raises what is no `Exception`, or in a place that seems to be no code."""

    def __init__(self, place: str, kind: str):
        super().__init__()
        self.place, self.error = place, RUDE_ERRORS[kind]
        self.fail_at("opening it")

    def fail_at(self, place: str) -> None:
        if self.place == place:
            raise self.error

    def __len__(self) -> int:
        self.fail_at("__len__")
        return super().__len__()

    def __getitem__(self, index: int) -> Any:
        if index != 6:
            return super().__getitem__(index)
        self.fail_at("example 6: __getitem__")
        lazy = {"example 6: items": LazyDict, "example 6: items of a mapping": Lazy}.get(self.place)
        return super().__getitem__(index) if lazy is None else lazy(self.error)

    @property
    def padding(self) -> dict[str, int]:  # type: ignore[override]
        self.fail_at("padding")
        return {}

    @property
    def fingerprint(self) -> str:
        self.fail_at("fingerprint")
        return "rude"

    @fingerprint.setter
    def fingerprint(self, name: str) -> None:
        pass


RUDE_ERRORS: dict[str, BaseException] = {
    "generator": GeneratorExit("closed"),
    "stop": StopIteration("no more"),
    "interrupt": KeyboardInterrupt("by the library"),
    "exit": SystemExit("no data"),
    "cancelled": asyncio.CancelledError("cancelled"),
    "bug": ZeroDivisionError("a bug"),
}
RUDE_PLACES = (
    "opening it",
    "__len__",
    "padding",
    "fingerprint",
    "example 6: __getitem__",
    "example 6: items",
    "example 6: items of a mapping",
)


@pytest.mark.parametrize("place", RUDE_PLACES)
@pytest.mark.parametrize("kind", RUDE_ERRORS)
def test_whatever_a_data_set_raises_is_an_error_that_names_it(place: str, kind: str) -> None:
    # As the runner's own handler: an interrupt is then none of the user.
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(DataError) as caught:
            load(f"{HERE}:Rude", options={"place": place, "kind": kind}, validation_fraction=0.0).read("train", 0, N)
    finally:
        signal.signal(signal.SIGINT, previous)
    error = RUDE_ERRORS[kind]
    where = re.escape(place.removesuffix(" of a mapping"))
    # Python itself reports a `StopIteration` in a generator, which reads the items of a mapping, as another error.
    reported = f"(RuntimeError: generator raised StopIteration|{type(error).__name__}: {error})"
    assert re.fullmatch(rf"data\.source={HERE}:Rude: {where} raised {reported}", str(caught.value))


def test_ctrl_c_while_an_example_is_read_is_no_error_of_the_data_set() -> None:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            load(f"{HERE}:Rude", options={"place": "__len__", "kind": "interrupt"})
    finally:
        signal.signal(signal.SIGINT, previous)


class Factory:
    """Callable with random access that is no class."""

    def __call__(self, **options: Any) -> Images:
        raise AssertionError("called")

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("called")


make_few = Factory()


def make_images(**options: Any) -> Images:
    raise AssertionError("called")


class Opened:
    """Class without random access."""

    def __new__(cls, **options: Any) -> Any:
        raise AssertionError("called")

    def __len__(self) -> int:
        return 1


class Replaced(Images):
    def __new__(cls) -> Any:
        return [1]


class Unsized(Images):
    def __new__(cls) -> Any:
        return 1


def test_a_class_may_make_another_data_set() -> None:
    with pytest.raises(DataError, match="example 0: is a int, needs a dict"):
        load(f"{HERE}:Replaced")


class Nothing(Images):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {}


class Taken(Images):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"example": index}


class Named(Images):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"no name": index}


class Random(Images):
    padding = {}  # noqa: RUF012

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": np.random.default_rng().standard_normal(3)}


class Endless(Images):
    def __len__(self) -> int:
        return sys.maxsize


class Countless:
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"label": index}


class Padded(Images):
    padding = {"mask": 1}  # noqa: RUF012


class Halved(Images):
    padding = {"label": 0.5}  # noqa: RUF012


class Unopened(Images):
    def __init__(self) -> None:
        raise FileNotFoundError("no such directory")


class Tokens(Source):
    pass


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        (f"{HERE}:Nothing", {}, "example 0: is empty, needs a dict of arrays by field"),
        (f"{HERE}:Taken", {}, "example 0: has the reserved field example; rename it"),
        (f"{HERE}:Named", {}, "example 0: has a field named 'no name'; use"),
        (
            f"{HERE}:Random",
            {},
            "example 0 has other values when it is read again; derive random numbers",
        ),
        (f"{HERE}:Refilled", {}, r"example 0 is overwritten when another one is read; return a copy"),
        (f"{HERE}:Endless", {}, r"has 9,\d\d\d,.* examples; leave out repeat"),
        (f"{HERE}:Countless", {}, "Countless: the class has no __len__; a data set of arrays needs random access"),
        (f"{HERE}:Opened", {}, "Opened: the class has no __getitem__; a data set of arrays needs random access"),
        (f"{HERE}:Unsized", {}, "Unsized: makes a int; a data set has __len__ and __getitem__"),
        (f"{HERE}:make_few", {}, "make_few: is a Factory; name a class with __len__ and __getitem__"),
        (f"{HERE}:make_images", {}, "make_images: is a function; name a class with"),
        ("subprocess:check_call", {"options": {"args": "touch called", "shell": True}}, "is a function; name a class"),
        ("subprocess:Popen", {"options": {"args": "touch called", "shell": True}}, "the class has no __len__"),
        (f"{HERE}:Padded", {}, "padding names mask, and its examples hold image, label, index"),
        (f"{HERE}:Halved", {}, "padding of label is 0.5, which is no int32"),
        (f"{HERE}:Unopened", {}, "opening it raised FileNotFoundError: no such directory"),
        (f"{HERE}:Tokens", {}, "is a Source of tokens, and data.sequence_length is missing"),
        (f"{HERE}:N", {}, "is a int; name a class with"),
        (f"{MODULE}:Image", {}, "has no Image; did you mean Images?"),
        (f"{MODULE}:Images", {"options": {"width": 3}}, "data.options: got an unexpected keyword argument 'width'"),
        (f"{MODULE}:Images", {"options": {"examples": 0}}, "is empty: it holds 0 examples"),
        (f"{MODULE}:Images", {"options": {"examples": 1}}, "the training split has no example: .* a smaller fraction"),
        (
            f"{MODULE}:Images",
            {"validation_fraction": 1e-20},
            "the validation split has no example: .* a larger",
        ),
        (
            f"{MODULE}:Images",
            {"sequence_length": 8},
            "not a subclass of Source.*; for .* arrays, leave",
        ),
    ],
)
def test_a_class_that_is_no_data_set_is_refused(source: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(source, **changes)


def test_the_fingerprint_follows_content_length_and_name(tmp_path: Path) -> None:
    def fingerprint(**options: Any) -> str:
        return load(options=options).fingerprint

    different = [{}, {"examples": 204}, {"seed": 1}, {"size": 5}, {"name": "renamed"}]
    assert len({fingerprint(**options) for options in different}) == len(different)
    assert fingerprint() == fingerprint(seed=0)
    changed = tmp_path / "changed"
    options = {"changed": str(changed), "at": 204}
    before = load(f"{MODULE}:Changing", options=options).fingerprint
    changed.touch()
    assert load(f"{MODULE}:Changing", options=options).fingerprint != before


def test_a_data_set_that_changes_while_the_job_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = load(options={"name": "first"})
    dataset.check()
    monkeypatch.setattr(Images, "__len__", lambda images: images.examples + 1)
    with pytest.raises(DataError, match="its fingerprint or length changed since the job started"):
        dataset.check()


def test_what_is_open_is_shared_and_then_forgotten() -> None:
    one, other = load(seed=0), load(seed=1)
    assert one.train_sources[0].source is other.train_sources[0].source
    assert load(options={"seed": 4}).train_sources[0].source is not one.train_sources[0].source


def test_an_example_that_hangs_is_described(tmp_path: Path) -> None:
    until = tmp_path / "until"
    dataset = load(f"{MODULE}:Stubborn", options={"until": str(until), "at": 7}, validation_fraction=0.0)
    assert describe_slowest_read() == ""
    reader = threading.Thread(target=dataset.read, args=("train", 0, N))
    reader.start()
    while not (found := describe_slowest_read()):
        time.sleep(0.05)
    until.touch()
    reader.join()
    assert found.startswith(f"example 7 of {MODULE}:Stubborn has been read for ")
    assert describe_slowest_read() == ""


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_threads_change_no_example(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr("runner.data.array_examples.ALONE_SECONDS", seconds)
    dataset, images = load(), Images()
    assert (dataset.read("validation", 0, 41)["image"] == np.stack([images[164 + i]["image"] for i in range(41)])).all()
    with pytest.raises(DataError, match=BAD_EXAMPLES["raises"][1]):
        load(f"{MODULE}:Bad", options={"kind": "raises"}, validation_fraction=0.0).read("train", 0, 40)


def test_a_slow_example_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    dataset = load(options={"seed": 8})
    monkeypatch.setattr("runner.data.array_examples.SLOW_SECONDS", 0.0)
    dataset.read("validation", 0, 20)
    assert len([line for line in capfd.readouterr().err.splitlines() if "steps wait for their slowest" in line]) == 1


def test_a_server_that_does_not_answer_may_answer_later(tmp_path: Path) -> None:
    options = {"until": str(tmp_path / "until"), "at": 7, "is_unreachable": True}
    dataset = load(f"{MODULE}:Stubborn", options=options, validation_fraction=0.0)
    with pytest.raises(RetryableError, match="example 7: __getitem__ raised ConnectionResetError: the server"):
        dataset.read("train", 0, N)


def test_bfloat16_and_booleans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    bfloat16 = np.dtype(arrays.jnp.bfloat16)
    example = {
        "wide": np.float64(1.5),
        "big": np.array([7], ">i2"),
        "narrow": np.zeros(2, bfloat16),
        "flag": True,
        "byte": np.uint8(3),
    }
    monkeypatch.setattr(Images, "__getitem__", lambda images, index: example)
    monkeypatch.setattr(Images, "padding", {"wide": float("nan")})
    found = load(options={"seed": 9}).read("validation", 40, 2)
    assert {name: str(array.dtype) for name, array in found.items()} == {
        "wide": "float32",
        "big": "int16",
        "narrow": "bfloat16",
        "flag": "bool",
        "byte": "uint8",
        "padding_mask": "bool",
    }
    assert np.isnan(found["wide"]).tolist() == [False, True]
    assert found["big"][0] == 7
