"""A data set as the trainer sees it: examples by number. Knows no devices, steps or micro-batches."""

import hashlib
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from runner.data.format import open_format
from runner.data.protocol import Checked, Source
from runner.data.source import find_source, is_class
from runner.data.store import open_token_files
from runner.data.text import Text, load_text
from runner.data.tokenizer import Tokenizer
from runner.data.window import Split, make_order, probe_order, split_tokens
from runner.errors import DataError, InvalidError
from runner.spec import load_class
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
    _tokens: Source
    _train: Split
    _validation: Split
    _order: "Sequence[int]"

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
        """Every id is below it: the tokenizer's, or the source's own; token files are read whole, once."""
        return self._tokens.vocabulary_size

    def check(self) -> None:
        """Raise DataError if the tokens are no longer those that the job began with. Cheap: before each save.

        Of token files sizes and times are looked at. Text is read once, at the start, so its files may change.
        """
        self._tokens.check()

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
            start = part.window_start(window)
            windows[row] = self._tokens.read(start, start + self.sequence_length + 1)
        is_real[:num_real] = True
        return {"x": windows[:, :-1], "y": windows[:, 1:], "padding_mask": is_real}


def load_dataset(
    config: "DataConfig", *, seed: int, vocabulary_size: int | None = None, cache_directory: Path | None = None
) -> Dataset:
    """Find, tokenise (or open) and split the data. Called on every host; each works for itself.

    `seed` gives the train order, `vocabulary_size` is the model's, where the spec names it. Raises DataError where the
    data cannot serve the config.
    """
    tokens = _open(config, default_cache_directory() if cache_directory is None else cache_directory, vocabulary_size)
    tokenizer = tokens.tokenizer if isinstance(tokens, Text) else None
    if not len(tokens):
        raise DataError(f"data.source={config.source}: is empty: it holds 0 tokens")
    try:
        train, validation = split_tokens(
            len(tokens), validation_fraction=config.validation_fraction, sequence_length=config.sequence_length
        )
    except DataError as error:
        raise DataError(f"data.source={config.source}: {error}") from error
    order = make_order(train.num_windows, seed=seed)
    content = {
        "tokens": tokens.fingerprint,
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
    )


def _open(config: "DataConfig", cache_directory: Path, vocabulary_size: int | None) -> Source:
    """The tokens that `data.source` names. Refuses keys that it does not read."""
    if is_class(config.source):
        _refuse_unread(config, "is a class", ("dtype", "document_separator"))
        return _make_own(config)
    files = find_source(config.source)
    if files.format:
        _refuse_unread(config, f"is of {files.format}", ("dtype", "document_separator"))
        return open_format(files, config.options, cache_directory, vocabulary_size)
    if files.holds_tokens:
        _refuse_unread(config, "names token files", ("document_separator", "options"))
        return open_token_files(files, cache_directory, config.dtype, vocabulary_size)
    _refuse_unread(config, "names text files", ("dtype", "options"))
    return Text(load_text(files, config.tokenizer, cache_directory, _SEPARATORS[config.document_separator]))


def _refuse_unread(config: "DataConfig", kind: str, keys: "Sequence[str]") -> None:
    for key in keys:
        value = getattr(config, key)
        if value != type(config).model_fields[key].get_default(call_default_factory=True):
            raise DataError(f"data.{key}={value}: nothing reads it, data.source={config.source} {kind}; leave it out")


def _make_own(config: "DataConfig") -> Source:
    """The source that a class of somebody else's makes."""
    name = f"data.source={config.source}"
    try:
        own: type[Source] = load_class(config.source, Source)
    except InvalidError as error:
        raise DataError(f"{name}: {error}") from error
    if lacking := sorted(getattr(own, "__abstractmethods__", ())):
        raise DataError(f"{name}: lacks {', '.join(lacking)}")
    try:
        inspect.signature(own).bind(**config.options)
    except TypeError as error:
        raise DataError(f"{name}: data.options: {error}") from error
    return Checked(own(**config.options), name)


def check_vocabulary(dataset: Dataset, vocabulary_size: int) -> None:
    """Raise DataError if the data holds a token id that a model of `vocabulary_size` ids cannot embed.

    Immediate for text; token files are read whole the first time, and the answer is cached, unless they are too many
    for that: then a row that holds such an id raises it.
    """
    try:
        dataset._tokens.refuse_vocabulary(vocabulary_size)
    except DataError as error:
        raise DataError(f"data.source={dataset.source}: {error}") from error
