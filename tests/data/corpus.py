"""Small data sets for these tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runner.config import DataConfig
from runner.data import Dataset, load_dataset

DEFAULTS = {"sequence_length": 8, "validation_fraction": 0.2}


def load(
    source: Path | str, *, cache: Path, seed: int = 0, vocabulary_size: int | None = None, **changes: Any
) -> Dataset:
    config = DataConfig.model_validate({**DEFAULTS, "source": str(source), **changes})
    return load_dataset(config, seed=seed, vocabulary_size=vocabulary_size, cache_directory=cache)


def write_bin(path: Path, ids: Sequence[int] | np.ndarray) -> Path:
    np.asarray(ids, "<u2").tofile(path)
    return path


def write_npy(path: Path, ids: Sequence[int] | np.ndarray, dtype: str = "<i4") -> Path:
    np.save(path, np.asarray(ids, dtype))
    return path
