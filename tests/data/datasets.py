"""Small datasets of every kind of source."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from runner.config import DataConfig
from runner.data import Dataset, Source, load_dataset
from tests.data.buckets import make_random_shards, write_corpus

DEFAULTS = {"sequence_length": 8, "validation_fraction": 0.2}


def load(
    source: Path | str,
    *,
    cache: Path,
    seed: int = 0,
    batch_examples: int = 16,
    vocabulary_size: int | None = None,
    **changes: Any,
) -> Dataset:
    config = DataConfig.model_validate({**DEFAULTS, "source": str(source), **changes})
    return load_dataset(
        config, seed=seed, batch_examples=batch_examples, vocabulary_size=vocabulary_size, cache_directory=cache
    )


def count_train_units(dataset: Dataset) -> int:
    """Return the number of training tokens (or examples) in all sources."""
    return sum(train.num_units for train in dataset.train_sources)


def count_validation_examples(dataset: Dataset) -> int:
    """Return the number of examples in all validation sets."""
    return sum(examples.num_examples for examples in dataset.validation.values())


# All methods that read the ids of a source.
READ_METHODS: dict[str, Callable[[Source, int, int], Any]] = {
    "read": lambda source, start, stop: source.read(start, stop),
    "read_many": lambda source, start, stop: source.read_many(np.array([start, 0]), stop - start),
    "read_ranges": lambda source, start, stop: source.read_ranges([(start, stop), (0, 5)]),
}


def write_bin(path: Path, ids: Sequence[int] | np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.asarray(ids, "<u2").tofile(path)
    return path


def write_npy(path: Path, ids: Sequence[int] | np.ndarray, dtype: str = "<i4") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, np.asarray(ids, dtype))
    return path


def write_documents(directory: Path, num_documents: int, seed: int) -> str:
    """Write text files of many lengths, a few longer than any example here, and return the glob that matches them."""
    directory.mkdir(parents=True)
    random = np.random.default_rng(seed)
    for index, size in enumerate(random.zipf(1.4, num_documents).clip(1, 400)):
        (directory / f"{index:04}.txt").write_bytes(random.integers(97, 123, size).astype("u1").tobytes())
    return str(directory / "*.txt")


def _write_mixture(directory: Path) -> dict[str, Any]:
    tokens = write_bin(directory / "tokens.bin", np.arange(2000))
    array = write_npy(directory / "array.npy", np.arange(3000, 4000))
    return {
        "mixture": [
            {"name": "text", "source": write_documents(directory / "text", 80, 3), "weight": 2},
            {"name": "tokens", "source": str(tokens), "weight": 1.5},
            {"name": "array", "source": str(array), "weight": 0.25},
        ]
    }


def mark_every_third(ids: np.ndarray) -> np.ndarray:
    """Mark every third id as a completion token."""
    return ids % 3 == 0


def _write_dialogues(directory: Path) -> str:
    sizes = np.random.default_rng(6).zipf(1.4, 300).clip(1, 400).tolist()
    shards = make_random_shards([sizes[:100], sizes[100:], [3]], seed=6, vocabulary_size=250)
    return str(write_corpus(directory, shards, vocabulary_size=1000, marks_of=mark_every_third))


def _write_tables(directory: Path) -> str:
    """Write two Parquet files of sequences with labels."""
    random = np.random.default_rng(8)
    directory.mkdir(parents=True)
    for number in range(2):
        rows = [random.integers(0, 1000, size).tolist() for size in random.zipf(1.4, 150).clip(1, 400)]
        labels = [[token if token % 3 else -100 for token in row] for row in rows]
        pq.write_table(pa.table({"input_ids": rows, "labels": labels}), directory / f"{number}.parquet")
    return f"{directory}/*.parquet"


def _write_random_corpus(directory: Path) -> str:
    sizes = np.random.default_rng(5).zipf(1.4, 300).clip(1, 400).tolist()
    shards = [sizes[:100], sizes[100:], [3]]
    return str(write_corpus(directory, make_random_shards(shards), vocabulary_size=1000))


# All kinds of dataset; what holds for one kind must hold for all.
KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "text": lambda directory: {"source": write_documents(directory / "text", 80, 1)},
    "tokens": lambda directory: {"source": str(write_bin(directory / "a.bin", np.arange(3000)))},
    "mixture": _write_mixture,
    "corpus": lambda directory: {"source": _write_random_corpus(directory), "packing": "documents"},
    "documents": lambda directory: {"source": write_documents(directory / "text", 200, 2), "packing": "documents"},
    "answers": lambda directory: {"source": _write_dialogues(directory), "packing": "documents", "train_on": "answers"},
    "tables": lambda directory: {"source": _write_tables(directory), "packing": "documents", "train_on": "answers"},
    "arrays": lambda directory: {"source": "tests.support.arrays:Images", "sequence_length": None},
    "array_mixture": lambda directory: {
        "mixture": [
            {"name": "many", "source": "tests.support.arrays:Images", "weight": 2.5},
            {"name": "few", "source": "tests.support.arrays:GrainImages", "options": {"examples": 50}},
        ],
        "sequence_length": None,
    },
    "pad": lambda directory: {"source": write_documents(directory / "text", 80, 2), "packing": "pad"},
}


def load_kind(kind: str, directory: Path, **changes: Any) -> Dataset:
    """Load a dataset of one of `KINDS`, made in `directory` unless it exists."""
    changes = make_config(kind, directory) | changes
    return load(changes.pop("source", "python-stdlib"), cache=directory / "cache", **changes)


def make_config(kind: str, directory: Path) -> dict[str, Any]:
    """Return the data config of one of `KINDS`, whose files are written once."""
    path = directory / f"{kind}.json"
    if not path.exists():
        path.write_text(json.dumps(KINDS[kind](directory / kind)))
    found: dict[str, Any] = json.loads(path.read_text())
    return found
