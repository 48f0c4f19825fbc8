"""What weights are scored on: a run's own validation sets, or any source; and how many bytes its text has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from runner.config import TokenSource
from runner.data import Dataset, load_set
from runner.data.packing import Examples, Fields, Rows
from runner.errors import DataError, InvalidError
from runner.inference.opening import Opened
from runner.inference.text import Language, find_language, language_of
from runner.trainer import BaseTrainer

DATA = "data"  # the set that the command line names
_DECODED_TOKENS = 1 << 20  # at a time


@dataclass(frozen=True)
class FirstExamples:
    """The first examples of a set: those that the run itself looks at."""

    examples: Examples
    num_examples: int
    fingerprint: str = ""

    @property
    def fields(self) -> Fields:
        """See `Examples`."""
        return self.examples.fields

    def read(self, numbers: np.ndarray) -> Rows:
        """See `Examples`."""
        return self.examples.read(numbers)

    def make_order(self, seed: int, batch_examples: Fraction) -> Sequence[int]:
        """See `Examples`."""
        return self.examples.make_order(seed, batch_examples)


@dataclass(frozen=True)
class Size:
    """How many real targets a set has, and how many bytes their text; None, and why, where that is not known."""

    num_targets: int
    num_bytes: int | None
    reason: str = ""


@dataclass(frozen=True, eq=False)
class ScoredData:
    """The sets, as validation sets of a data set, and by name what their tokens mean, or why that is not known."""

    dataset: Dataset
    languages: Mapping[str, Language | str]

    def size(self, name: str) -> Size:
        """Read a set once more, and count: of bytes each token is one; separators of other tokenizers are none.

        A character that the end of a row cuts may count as it is shown, by three bytes for each part.
        """
        language, fields = self.languages[name], self.dataset.fields
        if isinstance(language, str):
            return Size(0, None, language)
        if "padding_mask" not in fields or "loss_weight" in fields:
            return Size(0, None, "its tokens do not count alike")
        num_targets = num_bytes = 0
        num_examples, at_once = (
            self.dataset.validation[name].num_examples,
            max(1, _DECODED_TOKENS // self.dataset.sequence_length),
        )
        for first in range(0, num_examples, at_once):
            rows = self.dataset.rows(name, first, min(at_once, num_examples - first))
            ids = rows["y"][rows["padding_mask"]]
            num_targets += len(ids)
            num_bytes += _num_bytes(ids, language)
        return Size(num_targets, num_bytes)


def _num_bytes(ids: np.ndarray, language: Language) -> int:
    if language.is_of_bytes:
        return len(ids)
    return len(
        language.tokenizer.decode(ids if language.separator is None else ids[ids != language.separator]).encode()
    )


def open_scored_data(run: Opened, named: TokenSource | None) -> ScoredData:
    """All of a source, or of the run's own validation sets as many examples as the run looks at. On every host.

    Raises `InvalidError` if there is nothing to score, or if the ids of the source mean something else to the run.
    """
    job = run.job
    data = job.config.data
    if named is not None:
        language = _language(named, job)
        _refuse_another(language, job, named)
        return ScoredData(load_set(data, DATA, named, vocabulary_size=job.vocabulary_size), {DATA: language})
    dataset = job.dataset
    dataset.refuse_vocabulary(job.vocabulary_size)
    if not dataset.validation:
        raise InvalidError(f"{run.store.url}: its spec keeps no validation set; name a source with --data")
    most = job.config.eval.batches * job.config.train.global_batch_examples
    sets = {name: FirstExamples(held, min(most, held.num_examples)) for name, held in dataset.validation.items()}
    sources: dict[str, TokenSource] = {source.name: source for source in data.sources} | dict(data.validation)
    languages = {name: _language(sources.get(name, data.sources[0]), job) for name in sets}
    return ScoredData(replace(dataset, validation=sets), languages)


def _language(named: TokenSource, job: BaseTrainer) -> Language | str:
    try:
        return find_language(named, job.config.data)
    except DataError as error:
        return str(error)


def _refuse_another(found: Language | str, job: BaseTrainer, named: TokenSource) -> None:
    """Raise `DataError` if the ids of a source are known to mean something else than those that the run trains on."""
    try:
        own = language_of(job.config.data)
    except DataError:
        return
    if isinstance(found, Language) and found.kind != own.kind:
        raise DataError(
            f"--data {named.source}: its tokens are of another tokenizer ({found.kind.get('kind')}) than those of the "
            f"run ({own.kind.get('kind')}); tokenise it with the run's"
        )
