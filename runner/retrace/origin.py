"""Examples of a training step: their sources and documents, and what they hold. Needs the data alone."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runner.checkpoint.manifest import read_newest_manifest
from runner.data import TRAIN
from runner.data.dataset import ExampleOrigin
from runner.data.source import Source
from runner.errors import DataError
from runner.evaluation.generation import TextCodec, load_data_codec
from runner.storage import JsonObject, Store
from runner.train.features.stability import Stability
from runner.train.stages import list_restarts
from runner.trainer import BaseTrainer

_SEARCHED_TOKENS = 1 << 12  # before a position, for the beginning of its document; doubled until it is found
_SEARCHED_TOKENS_MAX = 1 << 24


@dataclass(frozen=True)
class DocumentPart:
    """Tokens of one document in an example."""

    place: str  # position and file, as the source describes them
    position: int  # of its first token in the source
    num_tokens: int  # inputs of the model
    document: int | None  # position at which its document begins; None if the source has no documents
    text: str | None  # text of its inputs, None if no tokenizer is known


@dataclass(frozen=True)
class StepExample:
    """Example of a training step."""

    number: int  # in the step, from 0
    source: str  # name of its source
    epoch: int
    index: int  # among the examples of its source
    parts: Sequence[DocumentPart]  # empty for arrays
    fields: Mapping[str, str]  # arrays by name, as text; empty for tokens


def makes_own_batches(job: BaseTrainer) -> bool:
    """Return True if only the code of a job knows where the examples of its batches come from."""
    return type(job).batch is not BaseTrainer.batch


def list_unknown(arrays: Mapping[str, np.ndarray]) -> list[StepExample]:
    """Return the examples of a batch, (N, ...) by field, whose origin is not known."""
    count = len(next(iter(arrays.values())))
    shown = [{name: _format_array(values[number]) for name, values in arrays.items()} for number in range(count)]
    return [StepExample(number, "batch", 0, number, [], fields) for number, fields in enumerate(shown)]


def adopt_past(job: BaseTrainer, store: Store) -> None:
    """Set the position of a job in its data to that of a run: roll-backs, and starts of stages. The job is only read.

    Raises `InvalidError` if a record of a roll-back is damaged.
    """
    newest = read_newest_manifest(store)
    if newest is not None:
        job.programs.restarts = frozenset(list_restarts(newest.identity))
    for feature in job.features:
        if isinstance(feature, Stability):
            feature.adopt_records({} if newest is None else newest.identity, store)


class ExampleReader:
    """Reader of the examples of any step of a job."""

    def __init__(self, job: BaseTrainer):
        """Open the tokenizer of the data, if it is known. `adopt_past` comes first."""
        self._job = job
        self._codec: TextCodec | None = None
        with contextlib.suppress(DataError):  # token ids say nothing of their tokenizer
            self._codec = load_data_codec(job.config.data) if job.config.data.has_tokens else None

    def read(self, step: int) -> list[StepExample]:
        """Return the examples of the step that ends with `step` completed ones. Raises `DataError`."""
        program, data_step = self._job.programs.locate_batch(step - 1)
        dataset = self._job.programs.get_dataset(program.plan.number)
        size = program.plan.config.train.global_batch_examples
        numbers = np.arange(data_step * size, (data_step + 1) * size)
        origins, arrays = dataset.find_origins(numbers), dataset.read_numbers(TRAIN, numbers)
        return [
            StepExample(
                number,
                origin.source.name,
                origin.epoch,
                origin.number,
                [*self._list_parts(origin)],
                {} if len(origin.spans) else {name: _format_array(values[number]) for name, values in arrays.items()},
            )
            for number, origin in enumerate(origins)
        ]

    def _list_parts(self, origin: ExampleOrigin) -> Iterator[DocumentPart]:
        source = origin.source.source
        for start, length in origin.spans.tolist():
            assert isinstance(source, Source), "arrays have no spans"
            stop = start + length
            ends = source.document_ends(start, stop - 1).tolist() if source.has_documents else []
            for first, last in zip([start, *ends], [*ends, stop], strict=True):
                document = find_document_start(source, first) if source.has_documents else None
                text = None if self._codec is None else self.decode(source.read(first, last))
                yield DocumentPart(source.describe_position(first), first, last - first, document, text)

    def decode(self, ids: np.ndarray) -> str | None:
        """Return the text of ids; None if no tokenizer is known."""
        return None if self._codec is None else self._codec.tokenizer.decode([int(each) for each in ids])


def find_document_start(source: Source, position: int) -> int:
    """Return the position at which a document begins; the earliest one that was looked at, if it is very long."""
    searched = _SEARCHED_TOKENS
    while True:
        first = max(position - searched, 0)
        # An end is the position behind a document, at which the next one begins.
        ends = source.document_ends(first, position) if first < position else np.zeros(0, np.int64)
        if len(ends):
            return int(ends[-1])
        if first == 0 or searched >= _SEARCHED_TOKENS_MAX:
            return first
        searched *= 2


def _format_array(values: np.ndarray) -> str:
    """Return a number as it is, and of an array its shape, type and range."""
    if not values.ndim:
        return str(values.item())
    shape = "x".join(map(str, values.shape))
    if not values.size or values.dtype.kind not in "fiub":
        return f"{values.dtype} {shape}"
    smallest, largest = values.min().item(), values.max().item()
    return f"{values.dtype} {shape}, {smallest:.4g} to {largest:.4g}"


def to_json(example: StepExample) -> JsonObject:
    """Return an example as plain data."""
    return {
        "number": example.number,
        "source": example.source,
        "epoch": example.epoch,
        "index": example.index,
        "parts": [
            {
                "place": part.place,
                "position": part.position,
                "tokens": part.num_tokens,
                "document": part.document,
                "text": part.text,
            }
            for part in example.parts
        ],
        **({"fields": dict(example.fields)} if example.fields else {}),
    }
