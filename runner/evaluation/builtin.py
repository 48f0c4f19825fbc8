"""What `config.eval` asks for besides the loss, read and checked before the first step; and who answers.

What weights are scored on: sets of examples; and how many bytes their text has.

The evaluators that come with a trainer: the loss on its validation sets, and whatever else its spec asks for.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import flax.linen as nn
import numpy as np
from jax.sharding import Mesh

from runner.config import DataConfig, TokenSource, TrainerConfig
from runner.data import Dataset
from runner.data.packing import Examples, Fields, Sequences
from runner.distributed.preemption import StopNotice
from runner.errors import DataError
from runner.evaluation.generation import (
    SampleEvaluator,
    Sampler,
    TextCodec,
    encode_prompt,
    find_start_token,
    load_data_codec,
    load_source_codec,
    make_decoder,
    parse_ids,
)
from runner.evaluation.likelihood import (
    LikelihoodScorer,
    MultipleChoice,
    Question,
    compute_questions_digest,
    read_questions,
)
from runner.spec import Document
from runner.train.batch_layout import BatchLayout
from runner.train.evaluators import Evaluator, Validation, ValidationSize, make_validation_sets
from runner.train.lora import merge_adapter
from runner.train.setup import TrainSetup, TrainSetupBuilder
from runner.train.step import Batch


@dataclass(frozen=True)
class MultipleChoiceTask:
    """Questions by the name of their figures."""

    name: str
    questions: Sequence[Question]
    every_steps: int | None


@dataclass(frozen=True)
class EvaluationContext:
    """Where a model is asked: its weights lie on `mesh`, and so many rows of a batch on each device."""

    model: nn.Module
    mesh: Mesh
    sequences_per_device: int
    vocabulary_size: int
    is_stopping: Callable[[], bool]


@dataclass(frozen=True)
class EvaluationTasks:
    """.

    The tasks and the prompts of a spec, and what their tokens mean; made by `read_evaluation_tasks` on every host.
    """

    config: TrainerConfig[Any]
    language: TextCodec | None
    tasks: Sequence[MultipleChoiceTask]
    prompts: Sequence[tuple[str, list[int]]]

    @property
    def digest(self) -> str:
        """The same on every host, if all have read the same; empty if nothing is asked."""
        if not self.tasks:
            return ""
        return compute_questions_digest([question for task in self.tasks for question in task.questions])

    def make_multiple_choices(self, place: EvaluationContext) -> list[MultipleChoice]:
        """Who asks the questions of each task."""
        if not self.tasks:
            return []
        assert self.language is not None, "read_asked refuses questions without a tokenizer"
        length = self.config.data.sequence_length
        likelihood = LikelihoodScorer(place.model, place.mesh, length, place.sequences_per_device, place.is_stopping)
        first, encode = find_start_token(self.language, self.config.data), partial(encode_prompt, self.language)
        return [
            MultipleChoice(task.name, task.questions, encode, first, likelihood, task.every_steps)
            for task in self.tasks
        ]

    def make_samples(self, place: EvaluationContext) -> list[SampleEvaluator]:
        """Who writes the texts, if any are asked for."""
        rule = self.config.eval.samples
        if rule is None:
            return []
        length, dtype = self.config.data.sequence_length, self.config.precision.compute
        num_ids = place.vocabulary_size if self.language is None else self.language.tokenizer.vocabulary_size
        choose = Sampler(rule.temperature, rule.top_p).make_chooser(num_ids)

        def reader(variables: Any) -> Any:
            return make_decoder(place.model, variables, length, dtype, place.mesh)

        return [
            SampleEvaluator(
                self.prompts, self.language, reader, choose, rule.tokens, length, place.is_stopping, rule.every_steps
            )
        ]


def read_evaluation_tasks(document: Document, config: TrainerConfig[Any], vocabulary_size: int) -> EvaluationTasks:
    """Read what `config.eval` names. Raises `SpecError`: a file that is none, or no tokenizer for questions."""
    with document.errors_at("config.eval"):
        return _read(config, vocabulary_size)


def _read(config: TrainerConfig[Any], vocabulary_size: int) -> EvaluationTasks:
    rule = config.eval
    if not rule.multiple_choice and rule.samples is None:
        return EvaluationTasks(config, None, (), ())
    language: TextCodec | None = None
    try:
        language = load_data_codec(config.data)
    except DataError as error:
        if rule.multiple_choice:
            raise DataError(f"eval.multiple_choice needs the tokenizer of the data: {error}") from error
    tasks = [
        MultipleChoiceTask(each.name, read_questions(each.path, each.limit), each.every_steps)
        for each in rule.multiple_choice
    ]
    prompts = [] if rule.samples is None else rule.samples.prompts
    return EvaluationTasks(
        config, language, tasks, [(text, _ids_of(text, language, config, vocabulary_size)) for text in prompts]
    )


def _ids_of(text: str, language: TextCodec | None, config: TrainerConfig[Any], vocabulary_size: int) -> list[int]:
    if language is None:
        return parse_ids(text, vocabulary_size, "samples.prompts") or [0]
    return encode_prompt(language, text) or [find_start_token(language, config.data)]


_DECODED_TOKENS = 1 << 20  # at a time


@dataclass(frozen=True)
class LeadingExamples:
    """The first examples of a set: those that the run itself looks at."""

    examples: Examples
    num_examples: int
    fingerprint: str = ""

    @property
    def fields(self) -> Fields:
        """See `Examples`."""
        return self.examples.fields

    def read(self, numbers: np.ndarray) -> Sequences:
        """See `Examples`."""
        return self.examples.read(numbers)

    def make_order(self, seed: int, batch_examples: Fraction) -> Sequence[int]:
        """See `Examples`."""
        return self.examples.make_order(seed, batch_examples)


@dataclass(frozen=True, eq=False)
class EvaluationData:
    """The sets, as validation sets of a data set, and by name what their tokens mean, or why that is not known."""

    dataset: Dataset
    codecs: Mapping[str, TextCodec | str]

    def measure(self, name: str) -> ValidationSize:
        """Read a set once more, and count: of bytes each token is one; separators of other tokenizers are none.

        A character that the end of a row cuts may count as it is shown, by three bytes for each part.
        """
        language, fields = self.codecs[name], self.dataset.fields
        if isinstance(language, str):
            return ValidationSize(0, None, language)
        if "padding_mask" not in fields or "loss_weight" in fields:
            return ValidationSize(0, None, "its tokens do not count alike")
        num_targets = num_bytes = 0
        num_examples, at_once = (
            self.dataset.validation[name].num_examples,
            max(1, _DECODED_TOKENS // self.dataset.sequence_length),
        )
        for first in range(0, num_examples, at_once):
            rows = self.dataset.read(name, first, min(at_once, num_examples - first))
            ids = rows["y"][rows["padding_mask"]]
            num_targets += len(ids)
            num_bytes += _num_bytes(ids, language)
        return ValidationSize(num_targets, num_bytes)


def _num_bytes(ids: np.ndarray, language: TextCodec) -> int:
    if language.is_of_bytes:
        return len(ids)
    return len(
        language.tokenizer.decode(ids if language.separator is None else ids[ids != language.separator]).encode()
    )


def select_run_data(dataset: Dataset, config: TrainerConfig[Any]) -> EvaluationData:
    """Of a run's own validation sets as many examples as the run looks at."""
    data = config.data
    most = config.eval.batches * config.train.global_batch_examples
    sets = {name: LeadingExamples(held, min(most, held.num_examples)) for name, held in dataset.validation.items()}
    sources: dict[str, TokenSource] = {source.name: source for source in data.sources} | dict(data.validation)
    languages = {name: load_codec_or_reason(sources.get(name, data.sources[0]), data) for name in sets}
    return EvaluationData(replace(dataset, validation=sets), languages)


def load_codec_or_reason(named: TokenSource, data: DataConfig) -> TextCodec | str:
    """What the tokens of a source mean, or why that is not known."""
    try:
        return load_source_codec(named, data)
    except DataError as error:
        return str(error)


class BuiltinEvaluators:
    """Those of one job. Made and called on every host, once the train step is compiled.

    `batch` makes a batch by set and number; `stop` says whether the job was asked to stop.
    """

    def __init__(
        self,
        setup_builder: TrainSetupBuilder,
        train_setup: TrainSetup,
        layout: BatchLayout,
        asked: EvaluationTasks,
        batch: Callable[[str, int], Batch],
        stop: StopNotice,
    ):
        config, dataset = setup_builder.config, setup_builder.dataset
        self._asked = asked
        self._place = EvaluationContext(
            setup_builder.model(),
            train_setup.mesh,
            layout.micro_batch_examples,
            setup_builder.vocabulary_size,
            stop.poll,
        )
        self._has_sets = bool(dataset.validation)
        self.validation = Validation(
            merge_adapter(train_setup.abstract_state),
            lambda abstract: train_setup.compile_val(setup_builder.val_step, abstract, layout),
            make_validation_sets(dataset, config, batch),
            stop.poll,
            select_run_data(dataset, config).measure if config.eval.bits_per_byte else None,
        )

    @functools.cached_property
    def _of_keys(self) -> dict[str, Sequence[Evaluator]]:
        """Those that a key of `config.eval` asks for."""
        return {
            "multiple_choice": self._asked.make_multiple_choices(self._place),
            "samples": self._asked.make_samples(self._place),
        }

    def __iter__(self) -> Iterator[Evaluator]:
        """Iterate over all of them, the same objects each time."""
        if self._has_sets:
            yield self.validation
        for evaluators in self._of_keys.values():
            yield from evaluators

    def validate_chosen(self, returned: Any, document: Document) -> list[Evaluator]:
        """What a job's `evaluator` has returned, as a list.

        Raises `SpecError` if that leaves out what a key asks for, which nothing reads then.
        """
        chosen = [] if returned is None else list(returned) if isinstance(returned, list | tuple) else [returned]
        for key, asked in self._of_keys.items():
            if any(each not in chosen for each in asked):
                reason = "nothing reads it, evaluator() returns others; return [*self.builtin_evaluators, ...]"
                raise document.error(f"config.eval.{key}", reason)
        return chosen

    def start_compiling(self, chosen: Sequence[Evaluator]) -> None:
        """What takes time and is not needed for the first steps."""
        if self.validation in chosen:
            self.validation.start_compiling()
