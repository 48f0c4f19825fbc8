"""Small data sets for these tests, and a stand-in for the spec's data section."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from runner.data import Dataset, load_dataset


@dataclass(frozen=True)
class Config:
    source: str
    tokenizer: Literal["bytes", "characters"] = "bytes"
    sequence_length: int = 8
    validation_fraction: float = 0.2


def load(source: Path | str, *, cache: Path, seed: int = 0, **changes: Any) -> Dataset:
    return load_dataset(replace(Config(str(source)), **changes), seed=seed, cache_directory=cache)


def write_bin(path: Path, ids: Sequence[int] | np.ndarray) -> Path:
    np.asarray(ids, "<u2").tofile(path)
    return path


def write_npy(path: Path, ids: Sequence[int] | np.ndarray, dtype: str = "<i4") -> Path:
    np.save(path, np.asarray(ids, dtype))
    return path
