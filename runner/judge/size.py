"""What weights are scored on: sets of examples; and how many bytes their text has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from runner.config import DataConfig, TokenSource, TrainerConfig
from runner.data import Dataset
from runner.data.packing import Examples, Fields, Rows
from runner.errors import DataError
from runner.judge.text import Language, find_language
from runner.train.validation import Size

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


def own_sets(dataset: Dataset, config: TrainerConfig[Any]) -> ScoredData:
    """Of a run's own validation sets as many examples as the run looks at."""
    data = config.data
    most = config.eval.batches * config.train.global_batch_examples
    sets = {name: FirstExamples(held, min(most, held.num_examples)) for name, held in dataset.validation.items()}
    sources: dict[str, TokenSource] = {source.name: source for source in data.sources} | dict(data.validation)
    languages = {name: language_or_reason(sources.get(name, data.sources[0]), data) for name in sets}
    return ScoredData(replace(dataset, validation=sets), languages)


def language_or_reason(named: TokenSource, data: DataConfig) -> Language | str:
    """What the tokens of a source mean, or why that is not known."""
    try:
        return find_language(named, data)
    except DataError as error:
        return str(error)
