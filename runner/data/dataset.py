"""Data set as the trainer sees it: examples by index, independent of devices, steps and micro-batches.

`load_dataset` opens the sources of a spec, splits each into training and validation tokens and packs both into
examples, or splits its examples if they are arrays, and makes the training order of each source. `Dataset.read` then
reads any range of the endless training stream, without iterating over what precedes it.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from runner.data.array_examples import ArrayExamples, ArraySource, open_array_source
from runner.data.corpus import make_teacher_dtypes
from runner.data.open_source import TextTokens, find_top_k, load_source_class, open_source, validate_shared_keys
from runner.data.packing import (
    DOCUMENT_DTYPES,
    PACKINGS,
    TOKEN_DTYPES,
    Examples,
    Fields,
    Sequences,
    TokenDtypes,
    describe_fields,
    make_token_fields,
)
from runner.data.sampling import FileOrder, LocalShuffle, Mixture, TokenSplit, probe_order, split_examples, split_tokens
from runner.data.source import Source
from runner.data.source_files import PYTHON_STDLIB
from runner.data.token_files import LOSS_WEIGHT, TEACHER_FIELDS, IdRange, TokenFiles, TokenSequence
from runner.data.tokenizers import Tokenizer
from runner.errors import DataError
from runner.spec import hash_record, is_class_path
from runner.storage import JsonObject, default_cache_directory

if TYPE_CHECKING:
    from runner.config import DataConfig, TokenSource, Unit


TRAIN, _VALIDATION = "train", "validation"
_MISSING_TARGETS_SHARE = 0.1  # share of the sequences without a target above which a run warns
_SAMPLE_EXAMPLES, _SAMPLE_RUN_EXAMPLES = 128, 16


class SkippedExamples(NamedTuple):
    """Range `first .. end` of examples of the training data that a run does not read."""

    first: int
    end: int


def get_batch_fields(config: "DataConfig") -> Fields:
    """Return the arrays of a batch by name, without the axes (S, B). Raises DataError.

    Data of arrays are opened, and their first example declares the fields. `padding_mask` is True for a real example.

    Tokens are not read. Each of their arrays has one value per token. `x` is the input, `y` the token after it,
    `padding_mask` is True where the target is real. If an example may hold several documents, `segment` numbers them
    from 1 (0: padding), and `position` restarts in each. `loss_weight` exists if only completion tokens count in the
    loss, and those of a teacher (`runner.data.corpus`) if `options` names `top_k`. The fields of a user-defined source
    are added to these.
    """
    if not config.has_tokens:
        return ArrayExamples(open_array_source(config.sources[0]), 0, 0).fields
    dtypes: TokenDtypes = TOKEN_DTYPES if config.packing == "concatenate" else DOCUMENT_DTYPES
    if any(token_source.train_on == "answers" for token_source in config.sources):
        dtypes = {**dtypes, LOSS_WEIGHT: np.float32}
    for token_source in config.sources:
        if is_class_path(token_source.source):
            own = load_source_class(token_source).fields
            if taken := sorted({*DOCUMENT_DTYPES} & {*own}):
                raise DataError(f"data.source={token_source.source}: declares the reserved field {taken[0]}; rename it")
            dtypes = {**dtypes, **own}
        elif (top_k := find_top_k(token_source.options.get("top_k"))) is not None:
            dtypes = {**dtypes, **make_teacher_dtypes(top_k)}
    return make_token_fields(dtypes, config.tokens_per_example)


@dataclass(frozen=True, eq=False)
class TrainSource:
    """Training split of one source: its examples and their order."""

    name: str
    label: str  # key and name in the spec, for messages
    source: Source | ArraySource
    num_units: int  # number of training tokens, or of examples if they are arrays
    examples: Examples
    order: Sequence[int]
    max_epochs: float | None  # limit of the spec, or None
    content: str = ""  # digest that determines the examples; sources with the same digest have the same examples
    first_example: int = 0  # number of examples of its endless stream that earlier stages of the run have used
    units_before: int = 0  # tokens (or examples) that earlier stages have used from sources of this name
    is_restarted: bool = False  # True if an earlier stage had the same tokens, divided into other examples

    def read(self, indices: np.ndarray) -> Sequences:
        """Return the examples at these indices, counted from `first_example` of the source's endless stream."""
        first = self.first_example
        return self.examples.read(np.array([self.order[first + index] for index in indices.tolist()], np.int64))


class ExampleOrigin(NamedTuple):
    """Place of a training example in the data."""

    source: TrainSource
    epoch: int  # passes over its source that were complete before it, by the order of the source
    number: int  # of the example among those of its source

    @property
    def spans(self) -> np.ndarray:
        """Spans of tokens that it holds, as in `runner.data.packing`; (0, 2) for arrays."""
        return self.source.examples.get_spans(self.number)


@dataclass(frozen=True)
class SourceShare:
    """Contribution of a source to the first examples of a run."""

    name: str
    units: int  # tokens (or examples) that are read, including those of earlier stages
    epochs: float  # passes over the source, including skipped examples
    bytes_fetched: int  # bytes that all hosts together fetch for it, if nothing is cached


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples of all sources of a run, made by `load_dataset`. Immutable and thread-safe."""

    source: str  # names in the spec, for messages
    unit: "Unit"  # `tokens`, or `examples` if the data are arrays
    units_per_example: int  # tokens of an example; 1 if the data are arrays
    fields: Fields  # arrays of a batch (`get_batch_fields`)
    fingerprint: str
    tokenizer: Tokenizer | None  # tokenizer of text; None for token ids, which were made elsewhere, and for arrays
    train_sources: Sequence[TrainSource]  # sources of the training stream, in the proportions of the mixture
    validation: Mapping[str, Examples]  # examples of the validation splits and of further sets, by name
    _sources: Mapping[str, Source | ArraySource]  # sources of training and validation by their labels
    _mixture: Mixture

    @property
    def num_train_examples(self) -> int:
        """Number of training examples in one epoch of each source."""
        return sum(train.examples.num_examples for train in self.train_sources)

    @property
    def vocabulary_size(self) -> int:
        """Exclusive upper bound of the training ids; 0 for arrays. May read all token files, if it is not known yet."""
        return max(train.source.vocabulary_size for train in self.train_sources)

    @property
    def sources(self) -> list[Source | ArraySource]:
        """Sources of training and validation."""
        return [*self._sources.values()]

    def check(self, is_main: bool = True) -> None:
        """Raise DataError if the tokens have changed since the job started. Cheap, so that each save can call it.

        Process 0 checks all files. The other hosts read nothing of a bucket, and check some files of a disk, which may
        be their own copies.
        """
        for source in self._sources.values():
            if is_main or not isinstance(source, TokenSequence):
                source.check()
            else:
                source.check_part()

    def validate_vocabulary(self, size: int) -> None:
        """Raise DataError if a source is known to hold an id that a model of `size` ids cannot embed.

        Immediate for text and corpora. Token files are read whole the first time, and the result is cached. If their
        vocabulary is trusted instead, `read` raises the error when it finds an invalid id.
        """
        for label, source in self._sources.items():
            try:
                source.validate_vocabulary(size)
            except DataError as error:
                raise DataError(f"{label}: {error}") from error

    def list_warnings(self, batch_examples: int) -> list[str]:
        """Return a line for each doubtful source or validation set, and for a batch that exceeds the data.

        Reads a sample of the data.
        """
        lines = [*self._find_validation_tails(), *self.find_missing_targets()]
        if batch_examples > self.num_train_examples:
            lines.append(
                f"train.global_batch_examples={batch_examples:,} is more than the {self.num_train_examples:,} training "
                f"examples of {self.source}, so every step takes some of them several times; use a smaller batch, or "
                "more data"
            )
        return lines

    def _find_validation_tails(self) -> list[str]:
        """Return a line for each folder of text whose validation split is made of the last files by name.

        Python's standard library, the corpus of the shipped specs, is left out.
        """
        lines: list[str] = []
        if any(label.startswith("data.validation.") for label in self._sources):
            return lines
        for train in self.train_sources:
            source = train.source
            if not isinstance(source, TextTokens) or train.label.endswith(f"={PYTHON_STDLIB}"):
                continue
            num_files = int((source.ends > train.num_units).sum())
            if len(source.ends) > 1 and num_files and len(source) > train.num_units:
                lines.append(
                    f"{train.label}: validation takes the last {num_files:,} of {len(source.ends):,} files by name; if "
                    "names sort the files by kind or by date, put a representative set into config.data.validation"
                )
        return lines

    def find_missing_targets(self) -> list[str]:
        """Return a line for each source or validation set of which many sequences have no target.

        A sequence has none if only completion tokens count and it ends within a prompt. Up to `_SAMPLE_EXAMPLES`
        sequences of each are read, and only of those whose targets have weights.
        """
        sets = {train.label: train.examples for train in self.train_sources}
        sets |= {f"validation set {name}": examples for name, examples in self.validation.items()}
        lines = []
        for label, examples in sets.items():
            if LOSS_WEIGHT not in examples.fields or not examples.num_examples:
                continue
            # Neighbours are read together, because a bucket answers one request for many sequences.
            run_length = min(_SAMPLE_RUN_EXAMPLES, examples.num_examples)
            firsts = np.linspace(0, examples.num_examples - run_length, _SAMPLE_EXAMPLES // _SAMPLE_RUN_EXAMPLES)
            indices = np.unique(firsts.astype(np.int64)[:, None] + np.arange(run_length))
            sequences = examples.read(indices)
            has_target = (sequences["padding_mask"] & (sequences[LOSS_WEIGHT] > 0)).any(axis=1)
            share = 1 - has_target.mean()
            if share > _MISSING_TARGETS_SHARE:
                lines.append(
                    f"{label}: {share:.0%} of {len(indices)} sampled sequences have no target, because their "
                    f"prompts are longer than sequence_length={self.units_per_example}; steps without a target train "
                    "nothing; use longer sequences, or leave such dialogues out"
                )
        return lines

    @property
    def needs_id_scan(self) -> bool:
        """True if the range of the ids of a token file is known only after reading all of them."""
        return any(isinstance(source, TokenFiles) and source.id_limit is None for source in self._sources.values())

    def find_id_ranges(self, trusted_vocabulary_size: int | None) -> dict[str, JsonObject]:
        """Return the id range of each source of token files, by label. Reads all ids, unless the cache has the result.

        With a trusted vocabulary a source with many ids is not read, and each of its ids is checked when it is used.
        """
        self.set_id_ranges(trusted_vocabulary_size, {})
        sources = {label: source for label, source in self._sources.items() if isinstance(source, TokenFiles)}
        return {label: asdict(source.id_range) for label, source in sources.items() if source.id_limit is None}

    def list_records(self) -> dict[str, JsonObject]:
        """Return the records of what was read of all objects in a bucket, which spare other hosts these reads."""
        sources = [source for source in self._sources.values() if isinstance(source, TokenFiles)]
        return {key: record for source in sources for key, record in source.records.items()}

    def set_id_ranges(self, trusted_vocabulary_size: int | None, found: Mapping[str, JsonObject]) -> None:
        """Use the result of `find_id_ranges` on another host. Reading an id outside its range is then an error."""
        for label, source in self._sources.items():
            if isinstance(source, TokenFiles) and trusted_vocabulary_size is not None:
                source.trust_vocabulary(trusted_vocabulary_size)
            if isinstance(source, TokenFiles) and label in found:
                source.set_id_range(IdRange(**found[label]))

    def continue_stages(self, earlier: Sequence[tuple["Dataset", int, Sequence[SkippedExamples]]]) -> "Dataset":
        """Return this data set for a stage: its sources continue at the positions that earlier stages have reached.

        A source with the same examples as an earlier one continues in its order, even if name and weight differ and
        stages in between did not use it. Any other source starts a new epoch. `earlier` has the data set of each
        earlier stage (itself a result of this method), its number of examples up to the next stage, and its skipped
        ranges.
        """
        # Keep the order of the first stage that had the source, because an order may depend on the share of the batch.
        left: dict[tuple[str, int], tuple[Sequence[int], int]] = {}
        units: dict[str, int] = {}
        known: set[str] = set()
        for dataset, num_examples, skipped in earlier:
            counts = dataset._mixture.count_examples(num_examples)
            for key, train, count in zip(dataset._list_contents(), dataset.train_sources, counts, strict=True):
                left[key] = train.order, train.first_example + count
                known.add(train.source.fingerprint)
            units |= {share.name: share.units for share in dataset.compute_shares(num_examples, skipped)}
        continued = []
        for key, train in zip(self._list_contents(), self.train_sources, strict=True):
            order, first = left.get(key, (train.order, 0))
            is_restarted = key not in left and train.source.fingerprint in known
            before = units.get(train.name, 0)
            continued.append(
                replace(train, order=order, first_example=first, units_before=before, is_restarted=is_restarted)
            )
        return replace(self, train_sources=continued)

    def continue_equal(self, before: "Dataset") -> "Dataset":
        """Return this data set, of a stage with the data of the stage before it, at the position of that data set."""
        sources = [
            replace(train, order=other.order, first_example=other.first_example, units_before=other.units_before)
            for train, other in zip(self.train_sources, before.train_sources, strict=True)
        ]
        return replace(self, train_sources=sources)

    def _list_contents(self) -> list[tuple[str, int]]:
        """Return the digest of each source, and the number of sources before it with the same digest."""
        contents = [train.content for train in self.train_sources]
        return [(content, contents[:index].count(content)) for index, content in enumerate(contents)]

    def compute_shares(self, num_examples: int, skipped: Sequence[SkippedExamples] = ()) -> list[SourceShare]:
        """Return the contribution of each source to the run up to `num_examples` of this data set.

        Examples in the ranges `skipped` are not read, but count in epochs, which measure the position in a source.
        """
        length, count_examples = self.units_per_example, self._mixture.count_examples
        positions = count_examples(num_examples)
        counts = np.array(positions, object)
        for first, end in skipped:
            counts -= np.array(count_examples(end), object) - np.array(count_examples(first), object)
        return [
            SourceShare(
                train.name,
                units=train.units_before + count * length,
                epochs=(train.first_example + position) / train.examples.num_examples,
                bytes_fetched=count * (length + 1) * train.source.bytes_fetched_per_token,
            )
            for train, position, count in zip(self.train_sources, positions, counts.tolist(), strict=True)
        ]

    def compute_metrics(self, num_examples: int, skipped: Sequence[SkippedExamples] = ()) -> dict[str, float]:
        """Return the tokens (or examples) and epochs of each source, for a row; empty if there is one source."""
        shares = self.compute_shares(num_examples, skipped) if len(self.train_sources) > 1 else []
        units = {f"data/{share.name}/{self.unit}": share.units for share in shares}
        return units | {f"data/{share.name}/epochs": share.epochs for share in shares}

    def validate_epochs(self, num_examples: int) -> None:
        """Raise DataError if a run of `num_examples` would exceed the `max_epochs` of a source."""
        for train, share in zip(self.train_sources, self.compute_shares(num_examples), strict=True):
            if train.max_epochs is not None and share.epochs > train.max_epochs:
                raise DataError(
                    f"{train.label}: the run takes {share.units:,} {self.unit} of it, {share.epochs:.4g} epochs of its "
                    f"{train.examples.num_examples * self.units_per_example:,}; max_epochs={train.max_epochs:g} is "
                    "the limit: give it less weight, or train for fewer steps"
                )

    def validate_split(self, name: str) -> None:
        """Raise ValueError if no split has this name."""
        names = [TRAIN, *(self.validation or (_VALIDATION,))]
        if name not in names:
            raise ValueError(f"got {name!r}, needs {' or '.join(map(repr, names))}")

    def read(self, split: str, first: int, count: int) -> Sequences:
        """Return examples `first .. first + count` of a split, see `read_numbers`."""
        assert first >= 0
        return self.read_numbers(split, np.arange(first, first + count))

    def read_numbers(self, split: str, numbers: np.ndarray) -> Sequences:
        """Return the examples with these numbers (N,), ascending; each field has the shape (N, *shape of the field).

        The training split is an endless stream, shuffled unless `data.shuffle` is false. A validation set is in order,
        and beyond its last example everything is padding, so that a loss weighted by real targets counts each
        validation target exactly once. All examples are requested together, because a bucket answers one request for
        many as fast as for one. Raises ValueError for an unknown split, DataError for changed or invalid data.
        """
        self.validate_split(split)
        count = len(numbers)
        if split != TRAIN:
            examples = self.validation.get(split)
            sequences = {
                name: np.full((count, *field.shape), field.padding, field.dtype) for name, field in self.fields.items()
            }
            num_real = 0 if examples is None else int(np.searchsorted(numbers, examples.num_examples))
            if examples is not None and num_real:
                for name, values in self._add_weights(examples.read(numbers[:num_real])).items():
                    sequences[name][:num_real] = values
            return sequences
        if len(self.train_sources) == 1:
            return self.train_sources[0].read(numbers)
        # One read for each source of the mixture, whose examples are then scattered over the batch.
        sequences = {name: np.empty((count, *field.shape), field.dtype) for name, field in self.fields.items()}
        sources, indices = self._locate(numbers)
        for source in np.unique(sources):
            rows = np.flatnonzero(sources == source)
            for name, values in self._add_weights(self.train_sources[source].read(indices[rows])).items():
                sequences[name][rows] = values
        return sequences

    def _locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each example of the mixture, and its number in the stream of the source."""
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
        located = [self._mixture.locate(int(run[0]), len(run)) for run in runs]
        sources, indices = (np.concatenate(parts) for parts in zip(*located, strict=True))
        return sources, indices

    def find_origins(self, numbers: np.ndarray) -> list[ExampleOrigin]:
        """Return where the training examples with these numbers (N,), ascending, come from."""
        origins = []
        for source, index in zip(*(found.tolist() for found in self._locate(numbers)), strict=True):
            train = self.train_sources[source]
            position = train.first_example + index
            origins.append(ExampleOrigin(train, position // train.examples.num_examples, train.order[position]))
        return origins

    def _add_weights(self, sequences: Sequences) -> Sequences:
        """Add a loss weight of 1 for each real target, if this source has no weights and another source has."""
        if LOSS_WEIGHT in sequences or LOSS_WEIGHT not in self.fields:
            return sequences
        return sequences | {LOSS_WEIGHT: sequences["padding_mask"].astype(self.fields[LOSS_WEIGHT].dtype)}


def load_dataset(
    config: "DataConfig",
    *,
    seed: int,
    batch_examples: int,
    vocabulary_size: int | None = None,
    cache_directory: Path | None = None,
    may_have_unread_keys: bool = False,
) -> Dataset:
    """Open, tokenise where necessary, and split the data. Called on every host, without communication between hosts.

    The order of packed documents depends on `batch_examples`, the global batch size. `may_have_unread_keys` is True for
    a later stage, whose shared keys may be those that an earlier one reads. Raises DataError if the data cannot serve
    the config, OSError if a bucket does not answer.
    """
    cache_directory = default_cache_directory() if cache_directory is None else cache_directory
    sources: dict[str, Source | ArraySource] = {}
    train_sources: list[TrainSource] = []
    validation: dict[str, Examples] = {}

    def open_labelled(label: str, token_source: "TokenSource") -> Source | ArraySource:
        try:
            if config.has_tokens:
                sources[label] = open_source(token_source, config, cache_directory, vocabulary_size)
            else:
                sources[label] = open_array_source(token_source)
        except DataError as error:
            # The messages of `open_source` name `data.source`. Prefix the key of an entry of `mixture` or `validation`.
            key = label.partition("=")[0]
            raise error if key == "data.source" else DataError(f"{key}: {error}") from error
        return sources[label]

    # A single source is a mixture of one.
    mixture = Mixture([token_source.weight for token_source in config.sources])
    for token_source, share in zip(config.sources, mixture.shares, strict=True):
        label = (
            f"data.mixture.{token_source.name}={token_source.source}"
            if config.mixture
            else f"data.source={token_source.source}"
        )
        source = open_labelled(label, token_source)
        try:
            if isinstance(source, ArraySource):
                train_split, validation_split = split_examples(len(source), config.validation_fraction)
            else:
                train_split, validation_split = split_tokens(
                    len(source),
                    validation_fraction=config.validation_fraction,
                    sequence_length=config.tokens_per_example,
                )
        except DataError as error:
            raise DataError(f"{label}: {error}") from error
        # Validation tokens are split off before packing, so that no training example contains one.
        examples = _make_examples(source, config, train_split)
        if not examples.num_examples:
            raise DataError(f"{label}: no document has two tokens; a document needs a token and the one after it")
        # In a mixture the seed of a source is derived from its name, so that the orders of the sources are independent.
        source_seed = zlib.crc32(f"{seed} {token_source.name}".encode()) if config.mixture else seed
        order: Sequence[int] = FileOrder(examples.num_examples)
        if config.shuffle:
            order = examples.make_order(source_seed, share * batch_examples)
        tokenizer = source.tokenizer if isinstance(source, TextTokens) else None
        text = None if tokenizer is None else [tokenizer.name, tokenizer.characters]
        parts = [source.fingerprint, asdict(train_split), type(examples).__name__, examples.fingerprint, text]
        # A stage that changes the order begins a new epoch.
        parts += [] if config.shuffle else ["in order"]
        train_sources.append(
            TrainSource(
                token_source.name,
                label,
                source,
                train_split.num_tokens,
                examples,
                order,
                token_source.max_epochs,
                content=hash_record({"content": parts}),
            )
        )
        if validation_split.num_tokens:
            name = token_source.name if config.mixture else _VALIDATION
            validation[name] = _make_examples(source, config, validation_split)
    # The sets in `data.validation` are used whole, without a split.
    for name, validation_source in config.validation.items():
        source = open_labelled(f"data.validation.{name}={validation_source.source}", validation_source)
        if not source.bytes_fetched_per_token:
            _ = source.fingerprint  # with which `check` compares files on a disk that were possibly replaced
        validation[name] = _make_examples(source, config, TokenSplit(0, len(source), config.units_per_example))
    if not may_have_unread_keys:
        validate_shared_keys(config, [source for source in sources.values() if isinstance(source, Source)])
    fields = get_batch_fields(config)
    _validate_examples(
        fields,
        {train.label: train.examples for train in train_sources}
        | {f"data.validation {name}": examples for name, examples in validation.items()},
    )

    # The fingerprint covers everything that the training examples depend on. Validation does not affect training.
    content: JsonObject = {"validation_fraction": config.validation_fraction}
    if config.has_tokens:
        content["sequence_length"] = config.sequence_length
    if config.mixture:
        content["mixture"] = [
            [token_source.name, token_source.weight, _describe_content(train)]
            for token_source, train in zip(config.mixture, train_sources, strict=True)
        ]
    else:
        content |= _describe_content(train_sources[0])
    return Dataset(
        source=" + ".join(token_source.source for token_source in config.sources),
        unit=config.unit,
        units_per_example=config.units_per_example,
        fields=fields,
        fingerprint=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
        tokenizer=next((source.tokenizer for source in sources.values() if isinstance(source, TextTokens)), None),
        train_sources=train_sources,
        validation=validation,
        _sources=sources,
        _mixture=mixture,
    )


def _make_examples(source: Source | ArraySource, config: "DataConfig", split: TokenSplit) -> Examples:
    if isinstance(source, ArraySource):
        return ArrayExamples(source, split.start, split.num_tokens)
    return PACKINGS[config.packing](source, split)


def _describe_content(train: TrainSource) -> JsonObject:
    """Return the values of one source that enter the fingerprint of the data set."""
    if isinstance(train.source, ArraySource):
        order = probe_order(train.order, num_windows=train.examples.num_examples)
        return {"arrays": train.source.fingerprint, "num_examples": len(train.source), "order": order}
    text = train.source if isinstance(train.source, TextTokens) else None
    content = {
        "tokens": train.source.fingerprint,
        "num_tokens": len(train.source),
        "tokenizer": None
        if text is None
        else [text.tokenizer.name, text.tokenizer.vocabulary_size, text.tokenizer.characters],
        "order": probe_order(train.order, num_windows=train.examples.num_examples),
    }
    # Token windows do not depend on documents. More keys here would change the fingerprint of existing runs.
    if not train.examples.fingerprint:
        return content
    # Packed examples also depend on the ends of documents, and their order on the size of the batch.
    content["packing"] = train.examples.fingerprint
    content["ends"] = hashlib.sha256(text.ends.astype("<i8").data).hexdigest() if text is not None else None
    if isinstance(train.order, LocalShuffle):
        content["batch_examples"] = str(train.order.batch_examples)
    return content


def load_validation_set(
    config: "DataConfig", name: str, token_source: "TokenSource", *, vocabulary_size: int
) -> Dataset:
    """Return all of one source, in order, as the validation set `name` of a data set without training data.

    Called on every host. In dialogues the completion tokens count, unless `token_source` says otherwise. Packing and
    sequence length are those of `config`. Raises DataError.
    """
    # Arrays must be those of the training data. Fields of tokens follow from the keys of this source, which replace
    # those of the training data, except for packing and sequence length.
    fields = {} if config.has_tokens else dict(get_batch_fields(config))
    config = config.model_copy(
        update={"mixture": [], **{key: getattr(token_source, key) for key in type(token_source).model_fields}}
    )
    label = f"data.source={token_source.source}"
    source: Source | ArraySource
    if config.has_tokens:
        directory = default_cache_directory()
        source = open_source(token_source, config, directory, vocabulary_size, default_train_on="answers")
        fields = {**get_batch_fields(config), **make_token_fields(source.fields, config.tokens_per_example)}
    else:
        source = open_array_source(token_source)
    examples = _make_examples(source, config, TokenSplit(0, len(source), config.units_per_example))
    _validate_examples(fields, {label: examples})
    dataset = Dataset(
        token_source.source,
        config.unit,
        config.units_per_example,
        fields,
        fingerprint="",
        tokenizer=None,
        train_sources=(),
        validation={name: examples},
        _sources={label: source},
        _mixture=Mixture(()),
    )
    dataset.validate_vocabulary(vocabulary_size)
    return dataset


def _validate_examples(fields: Fields, sets: Mapping[str, Examples]) -> None:
    """Raise DataError if a set has no example, or lacks a field of the batch except loss weights, which are added."""
    weights = {LOSS_WEIGHT: fields[LOSS_WEIGHT]} if LOSS_WEIGHT in fields else {}
    teacher = {name: fields[name] for name in TEACHER_FIELDS if name in fields}
    for label, examples in sets.items():
        # A validation loss is that of the data alone, so its batches may hold zeros instead of predictions.
        added = {**weights, **teacher} if label.startswith("data.validation") else weights
        if isinstance(examples, ArrayExamples):
            # The padding of the first source is used for all.
            found, needed = describe_fields(examples.fields), describe_fields(fields)
            if found != needed:
                raise DataError(f"{label}: its examples hold {found}; those of the first source hold {needed}")
        elif {**added, **examples.fields} != dict(fields):
            raise DataError(f"{label}: has the fields {', '.join(examples.fields)}, needs {', '.join(fields)}")
        if not examples.num_examples:
            raise DataError(f"{label}: holds less than one example; use more tokens or a shorter data.sequence_length")
