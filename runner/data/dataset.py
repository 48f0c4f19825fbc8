"""A data set as the trainer sees it: examples by number. Knows no devices, steps or micro-batches."""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from runner.data.corpus import LOSS_WEIGHT
from runner.data.open_source import load_source_class, open_source, validate_options_read
from runner.data.packing import DOCUMENT_FIELDS, PACKINGS, TOKEN_FIELDS, Examples, Fields, LocalShuffle, Sequences
from runner.data.sampling import Mixture, TokenSplit, probe_order, split_tokens
from runner.data.source import Source
from runner.data.source_files import is_class_path
from runner.data.text import TextTokens
from runner.data.token_files import IdRange, TokenFiles
from runner.data.tokenizers import Tokenizer
from runner.errors import DataError
from runner.storage import JsonObject, default_cache_directory

if TYPE_CHECKING:
    from runner.config import DataConfig, MixtureSource, TokenSource


TRAIN, VALIDATION = "train", "validation"


def get_batch_fields(config: "DataConfig") -> Fields:
    """The arrays of a batch by name, with their dtypes; each has one value a token. Reads no data.

    `x` is the input, `y` the token after it, `padding_mask` is True where the target is real. Where an example may hold
    several documents, `segment` counts them from 1 (0: padding), and `position` begins anew in each. Where answers
    alone count, `loss_weight` says so. What a class of somebody else's declares stands beside them. Raises DataError if
    it declares one of the first five.
    """
    fields = dict(TOKEN_FIELDS if config.packing == "concatenate" else DOCUMENT_FIELDS)
    if any(named.train_on == "answers" for named in config.sources):
        fields[LOSS_WEIGHT] = np.float32
    for named in config.sources:
        if is_class_path(named.source):
            own = load_source_class(named).fields
            if taken := sorted({*DOCUMENT_FIELDS} & {*own}):
                raise DataError(f"data.source={named.source}: declares the field {taken[0]}, which is the batch's own")
            fields |= own
    return fields


@dataclass(frozen=True, eq=False)
class TrainSource:
    """One source that training draws from: its examples, without what is kept out, and their order."""

    name: str
    label: str
    source: Source
    num_tokens: int
    examples: Examples
    order: Sequence[int]
    max_epochs: float | None

    def read(self, numbers: np.ndarray) -> Sequences:
        """The examples of its endless stream that have these numbers."""
        return self.examples.read(np.array([self.order[number] for number in numbers.tolist()], np.int64))


@dataclass(frozen=True)
class SourceShare:
    """What a part gives to the first examples of a run, and what all hosts together fetch for it, if none is cached."""

    name: str
    tokens: int
    epochs: float
    bytes_fetched: int


@dataclass(frozen=True, eq=False)
class Dataset:
    """Immutable, and safe to read from several threads. Made by `load_dataset`.

    Attributes:
        source: what the spec names, for messages.
        fields: see `get_batch_fields`.
        tokenizer: of text; None for token ids, which came from elsewhere.
        parts: what training draws from, in the proportions of the mixture.
        validation: the examples kept out, and those of further sets, by name.
    """

    source: str
    sequence_length: int
    fields: Fields
    fingerprint: str
    tokenizer: Tokenizer | None
    parts: Sequence[TrainSource]
    validation: Mapping[str, Examples]
    _sources: Mapping[str, Source]  # all of them, by what the spec calls them
    _mixture: Mixture

    @property
    def num_train_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_train_examples(self) -> int:
        """In one epoch of each source."""
        return sum(part.examples.num_examples for part in self.parts)

    @property
    def num_validation_examples(self) -> int:
        return sum(examples.num_examples for examples in self.validation.values())

    @property
    def vocabulary_size(self) -> int:
        """Every id to train on is below it: the tokenizer's, or the source's own; token files are read whole, once."""
        return max(part.source.vocabulary_size for part in self.parts)

    def check(self) -> None:
        """Raise DataError if the tokens are no longer those that the job began with. Cheap: before each save.

        Of token files sizes and times are looked at. Text is read once, at the start, so its files may change.
        """
        for source in self._sources.values():
            source.check()

    def validate_vocabulary(self, size: int) -> None:
        """Raise DataError if a source is known to hold a token id that a model of `size` ids cannot embed.

        Immediate for text and corpora; token files are read whole the first time, and the answer is cached, unless they
        are too many for that: then a row that holds such an id raises it.
        """
        for label, source in self._sources.items():
            try:
                source.validate_vocabulary(size)
            except DataError as error:
                raise DataError(f"{label}: {error}") from error

    @property
    def needs_id_scan(self) -> bool:
        """Whether all ids of a token file are to be read, to know which they are."""
        return any(isinstance(source, TokenFiles) and source.id_limit is None for source in self._sources.values())

    def find_id_ranges(self, believed: int | None) -> dict[str, JsonObject]:
        """Which ids the token files hold, by source. Reads all of them, unless this host has done so before.

        `believed` is a vocabulary that is known to hold the ids: then of many none is read before it is needed.
        """
        self.set_id_ranges(believed, {})
        sources = {label: source for label, source in self._sources.items() if isinstance(source, TokenFiles)}
        return {label: asdict(source.id_range) for label, source in sources.items() if source.id_limit is None}

    def set_id_ranges(self, believed: int | None, found: Mapping[str, JsonObject]) -> None:
        """Believe what `find_id_ranges` has given on another host; an id that is beyond it is named when it is read."""
        for label, source in self._sources.items():
            if isinstance(source, TokenFiles) and believed is not None:
                source.trust_vocabulary(believed)
            if isinstance(source, TokenFiles) and label in found:
                source.take(IdRange(**found[label]))

    def shares(self, num_examples: int) -> list[SourceShare]:
        """What each part gives to the first `num_examples` of the run."""
        counts = self._mixture.counts(num_examples)
        T = self.sequence_length
        return [
            SourceShare(
                part.name,
                count * T,
                count / part.examples.num_examples,
                count * (T + 1) * part.source.bytes_fetched_per_token,
            )
            for part, count in zip(self.parts, counts, strict=True)
        ]

    def figures(self, num_examples: int) -> dict[str, float]:
        """What a row says of the first `num_examples`: what each source of a mixture gave, by its key."""
        shares = self.shares(num_examples) if len(self.parts) > 1 else []
        tokens = {f"data/{share.name}/tokens": share.tokens for share in shares}
        return tokens | {f"data/{share.name}/epochs": share.epochs for share in shares}

    def validate_epochs(self, num_examples: int) -> None:
        """Raise DataError if a run of `num_examples` would read a source more often than its `max_epochs`."""
        for part, share in zip(self.parts, self.shares(num_examples), strict=True):
            if part.max_epochs is not None and share.epochs > part.max_epochs:
                raise DataError(
                    f"{part.label}: the run takes {share.tokens:,} tokens of it, {share.epochs:.4g} epochs of its "
                    f"{part.examples.num_examples * self.sequence_length:,}; max_epochs={part.max_epochs:g} allows "
                    "fewer: give it less weight, or train for fewer steps"
                )

    def read(self, split: str, first: int, count: int) -> Sequences:
        """Return examples `first .. first + count` of a split, each field (count, T).

        Train is an endless shuffled stream. A validation set is in order, and beyond its last example all is padding,
        so that a loss weighted by real tokens counts each validation target exactly once.
        """
        assert first >= 0
        self.validate_split(split)
        if split == TRAIN:
            return self._train_rows(first, count)
        examples = self.validation.get(split)
        rows = {name: np.zeros((count, self.sequence_length), dtype) for name, dtype in self.fields.items()}
        num_real = min(count, max(0, examples.num_examples - first)) if examples is not None else 0
        if examples is not None and num_real:
            for name, found in self._weighted(examples.read(np.arange(first, first + num_real))).items():
                rows[name][:num_real] = found
        return rows

    def validate_split(self, name: str) -> None:
        """Raise ValueError if no part of the data has this name."""
        names = [TRAIN, *(self.validation or (VALIDATION,))]
        if name not in names:
            raise ValueError(f"got {name!r}, needs {' or '.join(map(repr, names))}")

    def _train_rows(self, first: int, count: int) -> Sequences:
        if len(self.parts) == 1:
            return self.parts[0].read(np.arange(first, first + count))
        rows = {name: np.empty((count, self.sequence_length), dtype) for name, dtype in self.fields.items()}
        parts, numbers = self._mixture.place(first, count)
        for index in np.unique(parts):
            mine = np.flatnonzero(parts == index)
            for name, found in self._weighted(self.parts[index].read(numbers[mine])).items():
                rows[name][mine] = found
        return rows

    def _weighted(self, rows: Sequences) -> Sequences:
        """`rows`, each of whose real targets counts 1 if its source does not weigh them and another does."""
        if LOSS_WEIGHT in rows or LOSS_WEIGHT not in self.fields:
            return rows
        return rows | {LOSS_WEIGHT: rows["padding_mask"].astype(self.fields[LOSS_WEIGHT])}


def load_dataset(
    config: "DataConfig",
    *,
    seed: int,
    batch_examples: int,
    vocabulary_size: int | None = None,
    cache_directory: Path | None = None,
) -> Dataset:
    """Find, tokenise (or open) and split the data. Called on every host; each works for itself.

    `seed` and, of packed documents, `batch_examples`, those of a step on all hosts, give the train order;
    `vocabulary_size` is the model's, where the spec names it. Raises DataError where the data cannot serve the config.
    """
    cache_directory = default_cache_directory() if cache_directory is None else cache_directory

    sources: dict[str, Source] = {}
    parts: list[TrainSource] = []
    validation: dict[str, Examples] = {}
    mixture = Mixture([named.weight for named in config.sources])
    for named, share in zip(config.sources, mixture.shares, strict=True):
        label = f"data.mixture.{named.name}={named.source}" if config.mixture else f"data.source={named.source}"
        source = sources[label] = _open(label, named, config, cache_directory, vocabulary_size)
        train, held_out = _split(label, source, config)
        parts.append(_make_part(named, label, source, train, config, seed, share * batch_examples))
        if held_out.num_tokens:
            validation[named.name if config.mixture else VALIDATION] = PACKINGS[config.packing](source, held_out)
    for name, further in config.validation.items():
        label = f"data.validation.{name}={further.source}"
        source = sources[label] = _open(label, further, config, cache_directory, vocabulary_size)
        validation[name] = PACKINGS[config.packing](source, TokenSplit(0, len(source), config.sequence_length))
    validate_options_read(config, sources.values())
    fields = get_batch_fields(config)
    _refuse_unusable(
        fields,
        {part.label: part.examples for part in parts}
        | {f"data.validation {name}": examples for name, examples in validation.items()},
    )
    return Dataset(
        source=" + ".join(named.source for named in config.sources),
        sequence_length=config.sequence_length,
        fields=fields,
        fingerprint=_fingerprint(config, parts),
        tokenizer=next((source.tokenizer for source in sources.values() if isinstance(source, TextTokens)), None),
        parts=parts,
        validation=validation,
        _sources=sources,
        _mixture=mixture,
    )


def _open(
    label: str, named: "TokenSource", config: "DataConfig", cache_directory: Path, vocabulary_size: int | None
) -> Source:
    """One source of several, which an error names."""
    try:
        return open_source(named, config, cache_directory, vocabulary_size)
    except DataError as error:
        key = label.partition("=")[0]
        raise error if key == "data.source" else DataError(f"{key}: {error}") from error


def load_validation_set(config: "DataConfig", name: str, named: "TokenSource", *, vocabulary_size: int) -> Dataset:
    """All tokens of one source in order, as the validation set `name`; there is nothing to train on.

    `config` says how long rows are and what they hold. Called on every host. Raises DataError where the source cannot
    serve that, or a model of `vocabulary_size` ids. Of dialogues the answers count, unless `named` says otherwise.
    """
    config = config.model_copy(update={"mixture": [], **{key: getattr(named, key) for key in type(named).model_fields}})
    label = f"data.source={named.source}"
    source = open_source(named, config, default_cache_directory(), vocabulary_size, unsaid="answers")
    examples = PACKINGS[config.packing](source, TokenSplit(0, len(source), config.sequence_length))
    fields = {**get_batch_fields(config), **source.fields}
    _refuse_unusable(fields, {label: examples})
    found = Dataset(
        named.source, config.sequence_length, fields, "", None, (), {name: examples}, {label: source}, Mixture(())
    )
    found.validate_vocabulary(vocabulary_size)
    return found


def _split(label: str, source: Source, config: "DataConfig") -> tuple[TokenSplit, TokenSplit]:
    try:
        return split_tokens(
            len(source), validation_fraction=config.validation_fraction, sequence_length=config.sequence_length
        )
    except DataError as error:
        raise DataError(f"{label}: {error}") from error


def _make_part(
    named: "MixtureSource",
    label: str,
    source: Source,
    split: TokenSplit,
    config: "DataConfig",
    seed: int,
    batch_examples: Fraction,
) -> TrainSource:
    examples = PACKINGS[config.packing](source, split)
    if not examples.num_examples:
        raise DataError(f"{label}: no document has two tokens; a document needs a token and the one after it")
    own_seed = zlib.crc32(f"{seed} {named.name}".encode()) if config.mixture else seed
    order = examples.make_order(own_seed, batch_examples)
    return TrainSource(named.name, label, source, split.num_tokens, examples, order, named.max_epochs)


def _refuse_unusable(fields: Fields, sets: Mapping[str, Examples]) -> None:
    """Every set must fill the batch, and hold something. One that weighs no target gives each the weight 1."""
    weights = {LOSS_WEIGHT: fields[LOSS_WEIGHT]} if LOSS_WEIGHT in fields else {}
    for label, examples in sets.items():
        if {**weights, **examples.fields} != dict(fields):
            raise DataError(f"{label}: has the fields {', '.join(examples.fields)}, needs {', '.join(fields)}")
        if not examples.num_examples:
            raise DataError(f"{label}: holds less than one example")


def _fingerprint(config: "DataConfig", parts: Sequence[TrainSource]) -> str:
    """Of all that the training examples depend on. What validates moves no weights, and is not in it."""
    content: JsonObject = {
        "sequence_length": config.sequence_length,
        "validation_fraction": config.validation_fraction,
    }
    if config.mixture:
        content["mixture"] = [
            [named.name, named.weight, _content(part)] for named, part in zip(config.mixture, parts, strict=True)
        ]
    else:
        content |= _content(parts[0])
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _content(part: TrainSource) -> JsonObject:
    tokenizer = part.source.tokenizer if isinstance(part.source, TextTokens) else None
    content = {
        "tokens": part.source.fingerprint,
        "num_tokens": len(part.source),
        "tokenizer": tokenizer and [tokenizer.name, tokenizer.vocabulary_size, tokenizer.characters],
        "order": probe_order(part.order, num_windows=part.examples.num_examples),
    }
    if not part.examples.fingerprint:
        return content
    ends = (
        hashlib.sha256(part.source.ends.astype("<i8").data).hexdigest() if isinstance(part.source, TextTokens) else None
    )
    rows = {"batch_examples": str(part.order.batch_examples)} if isinstance(part.order, LocalShuffle) else {}
    return content | {"packing": part.examples.fingerprint, "ends": ends} | rows
