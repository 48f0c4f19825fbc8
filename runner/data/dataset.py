"""A data set as the trainer sees it: examples by number. Knows no devices, steps or micro-batches."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from runner.data.source import Source, find_source
from runner.data.store import IdRange, Tokens, open_token_files, scan_cached
from runner.data.text import load_text
from runner.data.tokenizer import Tokenizer
from runner.data.window import Split, make_order, probe_order, split_tokens
from runner.errors import DataError
from runner.storage import default_cache_directory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runner.config import DataConfig

SplitName = Literal["train", "validation"]
_SEPARATORS = {"none": b"", "newline": b"\n", "nul": b"\0"}

Rows = dict[str, np.ndarray]


def batch_fields(config: "DataConfig") -> dict[str, type[np.generic]]:
    """The arrays of a batch by name, with their dtypes; each has one value a token.

    `x` is the input, `y` the token after it, `padding_mask` is True where the target is real.
    """
    return {"x": np.int32, "y": np.int32, "padding_mask": np.bool_}


@dataclass(frozen=True, eq=False)
class Dataset:
    """Immutable, and safe to read from several threads. Made by `load_dataset`."""

    source: str
    sequence_length: int
    fields: "Mapping[str, type[np.generic]]"
    fingerprint: str
    tokenizer: Tokenizer | None  # None for token files, whose ids came from elsewhere
    _tokens: Tokens
    _train: Split
    _validation: Split
    _order: "Sequence[int]"
    _cache_directory: Path

    @property
    def num_train_tokens(self) -> int:
        return self._train.num_tokens

    @property
    def num_train_windows(self) -> int:
        """Examples in one epoch."""
        return self._train.num_windows

    @property
    def num_validation_tokens(self) -> int:
        return self._validation.num_tokens

    @property
    def num_validation_windows(self) -> int:
        return self._validation.num_windows

    @property
    def vocabulary_size(self) -> int:
        """The tokenizer's; for token files the largest id + 1, which reads them all, once. Raises DataError."""
        return self.tokenizer.vocabulary_size if self.tokenizer is not None else self._id_range.largest + 1

    @cached_property
    def _id_range(self) -> IdRange:
        id_range = scan_cached(self._tokens, self._cache_directory)
        if id_range.smallest < 0:
            position = self._tokens.describe_position(id_range.smallest_position)
            raise DataError(f"data.source={self.source}: token id {id_range.smallest} at {position} is negative")
        return id_range

    def check_files(self) -> None:
        """Raise DataError if a token file is no longer what it was when the job began. Looks at sizes and times only.

        Text is read once, at the start, so its files may change.
        """
        self._tokens.check_files()

    def split(self, name: SplitName) -> Split:
        """Return the part of the tokens that has this name. Raises ValueError for any other."""
        splits = {"train": self._train, "validation": self._validation}
        if name not in splits:
            raise ValueError(f"got {name!r}, needs 'train' or 'validation'")
        return splits[name]

    def rows(self, split: SplitName, first: int, count: int) -> Rows:
        """Return examples `first .. first + count` of a split, each field (count, T).

        Train is an endless shuffled stream. Validation is in order, and beyond its last window all is padding, so
        that a loss weighted by real tokens counts each validation target exactly once.
        """
        assert first >= 0
        windows = np.zeros((count, self.sequence_length + 1), np.int32)
        is_real = np.zeros((count, self.sequence_length), np.bool_)
        part = self.split(split)
        num_real = count if split == "train" else min(count, max(0, part.num_windows - first))
        for row in range(num_real):
            window = self._order[first + row] if split == "train" else first + row
            self._tokens.read_into(windows[row], part.window_start(window))
        is_real[:num_real] = True
        return {"x": windows[:, :-1], "y": windows[:, 1:], "padding_mask": is_real}


def load_dataset(config: "DataConfig", *, seed: int, cache_directory: Path | None = None) -> Dataset:
    """Find, tokenise (or map) and split the data. Called on every host; each works for itself.

    `seed` gives the train order. Raises DataError where the data cannot serve the config.
    """
    cache_directory = default_cache_directory() if cache_directory is None else cache_directory
    source = find_source(config.source)
    tokens, tokenizer, digest = _open_tokens(config, source, cache_directory)
    if not len(tokens):
        raise DataError(f"data.source={config.source}: is empty: {len(source.files)} files hold 0 tokens")
    try:
        train, validation = split_tokens(
            len(tokens), validation_fraction=config.validation_fraction, sequence_length=config.sequence_length
        )
    except DataError as error:
        raise DataError(f"data.source={config.source}: {error}") from error
    order = make_order(train.num_windows, seed=seed)
    content = {
        "tokens": digest,
        "num_tokens": len(tokens),
        "tokenizer": tokenizer and [tokenizer.name, tokenizer.vocabulary_size, tokenizer.characters],
        "sequence_length": config.sequence_length,
        "validation_fraction": config.validation_fraction,
        "order": probe_order(order, num_windows=train.num_windows),
    }
    return Dataset(
        source=config.source,
        sequence_length=config.sequence_length,
        fields=batch_fields(config),
        fingerprint=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
        tokenizer=tokenizer,
        _tokens=tokens,
        _train=train,
        _validation=validation,
        _order=order,
        _cache_directory=cache_directory,
    )


def _open_tokens(config: "DataConfig", source: Source, cache_directory: Path) -> tuple[Tokens, Tokenizer | None, str]:
    """The tokens that a source holds, or that its text becomes, the tokenizer if it is text, and a digest of them."""
    separator = _SEPARATORS[config.document_separator]
    if not source.holds_tokens:
        if config.dtype is not None:
            raise DataError(f"data.dtype={config.dtype}: nothing reads it, data.source={config.source} names text")
        text = load_text(source, config.tokenizer, cache_directory, separator)
        return Tokens([text.ids]), text.tokenizer, text.sha256
    if separator:
        raise DataError(
            f"data.document_separator={config.document_separator} is for text files, data.source={config.source} "
            "names token files; leave it out"
        )
    tokens = open_token_files(source, config.dtype)
    return tokens, None, tokens.probe() if len(tokens) else ""


def check_vocabulary(dataset: Dataset, vocabulary_size: int) -> None:
    """Raise DataError if the data holds a token id that a model of `vocabulary_size` ids cannot embed.

    Immediate for text; token files are read whole the first time, and the answer is cached.
    """
    need = dataset.vocabulary_size
    if need <= vocabulary_size:
        return
    if dataset.tokenizer is not None:
        raise DataError(
            f"data.tokenizer={dataset.tokenizer.name} has {need:,} token ids, the model's vocabulary "
            f"{vocabulary_size:,}; use a vocabulary of at least {need:,}"
        )
    position = dataset._tokens.describe_position(dataset._id_range.largest_position)
    raise DataError(
        f"data.source={dataset.source}: token id {need - 1:,} at {position} is beyond the model's vocabulary of "
        f"{vocabulary_size:,} ids; use a vocabulary of at least {need:,}"
    )
