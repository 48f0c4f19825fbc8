"""Built-in evaluators of a trainer: the loss on its validation sets, and the tasks of `config.eval`.

Tasks are read and checked before the first step. `EvaluationData` selects the validation examples that a run evaluates,
and counts the bytes of their text.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import numpy as np

from runner.config import DataConfig, TokenSource, TrainerConfig
from runner.data import Dataset
from runner.data.packing import Examples, Fields, Sequences
from runner.distributed.agreement import Hosts
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
    EvaluationContext,
    LikelihoodScorer,
    Question,
    compute_accuracies,
    make_pairs,
    read_questions,
)
from runner.spec import Document
from runner.spec.imports import import_extra
from runner.train.evaluators import EvaluationMetrics, Evaluator, Validation, ValidationSize, make_validation_sets
from runner.train.layout import BatchLayout, make_val_layout
from runner.train.setup import TrainSetup, TrainSetupBuilder
from runner.train.step import Batch
from runner.train.weights import get_model_state

HARNESS = "runner.evaluation.harness"  # needs the extra lm-eval, and is therefore imported on demand
_DECODED_TOKENS = 1 << 20  # decoded at a time, so that memory stays bounded


@dataclass(frozen=True)
class MultipleChoiceTask:
    """Questions and the name of their metrics."""

    name: str
    questions: Sequence[Question]
    every_steps: int | None  # steps between two evaluations; None: `eval.every_steps`
    sequences_per_device: int | None = None  # sequences that a device scores at a time; None: those of the context


class MultipleChoice:
    """Evaluator with the metrics `val/<name>/acc`, `acc_norm` and `acc_bytes`. Made and called on every host."""

    def __init__(
        self,
        name: str,
        questions: Sequence[Question],
        encode: Callable[[str], Sequence[int]],
        first: int,
        likelihood: LikelihoodScorer,
        every_steps: int | None = None,
    ):
        self.name, self.every_steps = name, every_steps
        self._questions, self._likelihood = questions, likelihood
        self._pairs = make_pairs(questions, encode, first)

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> EvaluationMetrics | None:
        """Return the metrics by their key in a row; None if the job was asked to stop."""
        metrics = self.score(weights)
        return None if metrics is None else {f"val/{self.name}/{key}": value for key, value in metrics.items()}

    def score(self, weights: Any) -> dict[str, float] | None:
        """Return `acc`, `acc_norm` and `acc_bytes`; None if the job was asked to stop. Called on every host."""
        results = self._likelihood.score(weights, self._pairs)
        return None if results is None else compute_accuracies(self._questions, results)


@dataclass(frozen=True)
class EvaluationTasks:
    """Tasks and prompts of a spec. Made by `read_evaluation_tasks` on every host."""

    config: TrainerConfig[Any]
    codec: TextCodec | None  # codec of the data; None if unknown or not needed
    tasks: Sequence[MultipleChoiceTask]
    prompts: Sequence[tuple[str, list[int]]]  # text and ids of each prompt
    harness: Any = None  # `HarnessTasks` of `runner.evaluation.harness`, which needs an extra

    @property
    def digest(self) -> str:
        """Digest of all questions, to compare hosts; empty without questions."""
        if not self.tasks:
            return ""
        questions = [question for task in self.tasks for question in task.questions]
        return hashlib.sha256(repr(questions).encode()).hexdigest()

    def make_multiple_choices(self, context: EvaluationContext) -> list[MultipleChoice]:
        """Return the evaluator of each task."""
        if not self.tasks:
            return []
        assert self.codec is not None, "`read_evaluation_tasks` refuses questions without a tokenizer"
        sizes = [task.sequences_per_device or context.sequences_per_device for task in self.tasks]
        # Tasks with batches of one size share a compiled program.
        scorers = {
            size: LikelihoodScorer(
                context.model, context.mesh, self.config.data.tokens_per_example, size, context.is_stopping
            )
            for size in set(sizes)
        }
        first, encode = find_start_token(self.codec, self.config.data), partial(encode_prompt, self.codec)
        return [
            MultipleChoice(task.name, task.questions, encode, first, scorers[size], task.every_steps)
            for task, size in zip(self.tasks, sizes, strict=True)
        ]

    def make_harness_scores(self, context: EvaluationContext) -> list[Evaluator]:
        """Return the evaluator of the tasks of lm-evaluation-harness, if the spec names some."""
        if self.harness is None:
            return []
        return [import_extra(HARNESS).HarnessScores(context, self.config, self.harness)]

    def make_samples(self, context: EvaluationContext) -> list[SampleEvaluator]:
        """Return the evaluator that writes samples, if the spec asks for it."""
        samples = self.config.eval.samples
        if samples is None:
            return []
        length, dtype = self.config.data.tokens_per_example, self.config.precision.compute
        num_ids = context.vocabulary_size if self.codec is None else self.codec.tokenizer.vocabulary_size
        return [
            SampleEvaluator(
                self.prompts,
                self.codec,
                lambda variables: make_decoder(context.model, variables, length, dtype, context.mesh),
                Sampler(samples.temperature, samples.top_p).make_chooser(num_ids),
                samples.tokens,
                length,
                context.is_stopping,
                samples.every_steps,
            )
        ]


def read_evaluation_tasks(document: Document, config: TrainerConfig[Any], vocabulary_size: int) -> EvaluationTasks:
    """Read the files that `config.eval` names. Raises `SpecError` if one is invalid, or questions lack a tokenizer."""
    samples, multiple_choice, named = config.eval.samples, config.eval.multiple_choice, config.eval.harness
    harness: Any = None
    if named is not None:
        with document.errors_at("config.eval.harness"):
            load_data_codec(config.data)  # the texts of the tasks need a tokenizer
            harness = import_extra(HARNESS).load_tasks(named.tasks, named.include_path, "tasks")
            harness.load()
    if not multiple_choice and samples is None:
        return EvaluationTasks(config, None, (), (), harness)
    with document.errors_at("config.eval"):
        codec: TextCodec | None = None
        try:
            codec = load_data_codec(config.data)
        except DataError as error:
            if multiple_choice:
                raise DataError(f"eval.multiple_choice needs the tokenizer of the data: {error}") from error
        tasks = [
            MultipleChoiceTask(
                each.name, read_questions(each.path, each.limit), each.every_steps, each.micro_batch_examples
            )
            for each in multiple_choice
        ]
        prompts = []
        for text in [] if samples is None else samples.prompts:
            if codec is None:  # then a prompt is a list of ids
                ids = parse_ids(text, vocabulary_size, "samples.prompts") or [0]
            else:
                ids = encode_prompt(codec, text) or [find_start_token(codec, config.data)]
            prompts.append((text, ids))
        return EvaluationTasks(config, codec, tasks, prompts, harness)


@dataclass(frozen=True)
class _LeadingExamples:
    """First examples of a validation set: those that the run itself evaluates. Implements `Examples`."""

    examples: Examples
    num_examples: int
    fingerprint: str = ""

    @property
    def fields(self) -> Fields:
        return self.examples.fields

    def read(self, numbers: np.ndarray) -> Sequences:
        return self.examples.read(numbers)

    def get_spans(self, index: int) -> np.ndarray:
        return self.examples.get_spans(index)

    def make_order(self, seed: int, batch_examples: Fraction) -> Sequence[int]:
        return self.examples.make_order(seed, batch_examples)


@dataclass(frozen=True, eq=False)
class EvaluationData:
    """Validation sets to evaluate."""

    dataset: Dataset  # data set with these validation sets
    codecs: Mapping[str, TextCodec | str]  # codec of each set by name, or the reason why it is unknown

    def measure(self, name: str) -> ValidationSize:
        """Read a set once more, and count its targets and the bytes of their text.

        With a tokenizer of bytes each token is one byte; separators of other tokenizers have none. A character that is
        split by the end of a sequence counts three bytes for each part (U+FFFD).
        """
        codec, fields = self.codecs[name], self.dataset.fields
        if isinstance(codec, str):
            return ValidationSize(0, None, codec)
        # Bits per byte divide a sum over all tokens by the bytes of all text, so every token must have weight 1.
        if "padding_mask" not in fields or "loss_weight" in fields:
            return ValidationSize(0, None, "its tokens do not count alike")
        num_targets = num_bytes = 0
        num_examples = self.dataset.validation[name].num_examples
        chunk_examples = max(1, _DECODED_TOKENS // self.dataset.units_per_example)
        for first in range(0, num_examples, chunk_examples):
            sequences = self.dataset.read(name, first, min(chunk_examples, num_examples - first))
            # Only targets count: the first token of a sequence is not predicted.
            ids = sequences["y"][sequences["padding_mask"]]
            num_targets += len(ids)
            if codec.is_of_bytes:
                num_bytes += len(ids)
            else:
                # Separators are targets with a loss, but are not part of the text.
                text_ids = ids[~np.isin(ids, [each for each in (codec.begin, codec.separator) if each is not None])]
                num_bytes += len(codec.tokenizer.decode(text_ids).encode())
        return ValidationSize(num_targets, num_bytes)


def _select_run_examples(dataset: Dataset, config: TrainerConfig[Any]) -> Dataset:
    """Return a dataset with as many examples of each validation set as a run evaluates, whatever its batches."""
    limit = config.eval.batches * config.train.global_batch_examples
    sets = {
        name: _LeadingExamples(examples, min(limit, examples.num_examples))
        for name, examples in dataset.validation.items()
    }
    return replace(dataset, validation=sets)


def select_run_data(dataset: Dataset, config: TrainerConfig[Any]) -> EvaluationData:
    """Return a run's own validation sets, each with as many examples as the run evaluates."""
    # The same examples as in the run, so that the loss is the one of its rows.
    data, sets = config.data, _select_run_examples(dataset, config).validation
    sources: dict[str, TokenSource] = {source.name: source for source in data.sources} | dict(data.validation)
    codecs = {name: load_codec_or_reason(sources.get(name, data.sources[0]), data) for name in sets}
    return EvaluationData(replace(dataset, validation=sets), codecs)


def load_codec_or_reason(source: TokenSource, data: DataConfig) -> TextCodec | str:
    """Return the codec of a source, or the reason why it is unknown."""
    try:
        return load_source_codec(source, data)
    except DataError as error:
        return str(error)


def list_returned(returned: Any) -> list[Evaluator]:
    """Return the return value of a job's `evaluator` as a list."""
    return [] if returned is None else [*returned] if isinstance(returned, list | tuple) else [returned]


class BuiltinEvaluators:
    """Built-in evaluators of one job, in iteration order. Made and called on every host, after compilation."""

    def __init__(
        self,
        setup_builder: TrainSetupBuilder,
        train_setup: TrainSetup,
        layout: BatchLayout,
        tasks: EvaluationTasks,
        batch: Callable[[str, int], Batch],
        stop: StopNotice,
        val_step: Future[jax.stages.Compiled] | None = None,
    ):
        """Prepare the evaluators of a training job on its devices.

        `batch` makes a batch by set and index, and `val_step` is the validation step, if it is compiled already.
        """
        config, dataset = setup_builder.config, setup_builder.dataset
        self._tasks = tasks
        self._context = EvaluationContext(
            setup_builder.recipe.model(),
            train_setup.mesh,
            layout.micro_batch_examples,
            setup_builder.vocabulary_size,
            stop.poll,
        )
        # `validation` exists without validation sets too, but then has nothing to evaluate.
        self._has_sets = bool(dataset.validation)
        own_data, val_layout = _select_run_examples(dataset, config), make_val_layout(config, layout)
        if val_layout != layout:
            batch = partial(val_layout.batch, own_data)
        self.validation = Validation(
            get_model_state(train_setup.abstract_state),
            lambda abstract: train_setup.compile_val(setup_builder.recipe.val_step, abstract, val_layout),
            make_validation_sets(own_data, val_layout.global_batch_examples, batch),
            stop.poll,
            select_run_data(dataset, config).measure if config.eval.bits_per_byte else None,
            val_step,
        )

    @functools.cached_property
    def _by_key(self) -> dict[str, Sequence[Evaluator]]:
        """Evaluators by the key of `config.eval` that asks for them."""
        return {
            "multiple_choice": self._tasks.make_multiple_choices(self._context),
            "samples": self._tasks.make_samples(self._context),
            "harness": self._tasks.make_harness_scores(self._context),
        }

    def __iter__(self) -> Iterator[Evaluator]:
        """Iterate over all evaluators, the same objects each time."""
        if self._has_sets:
            yield self.validation
        # The loss comes first, because it is cheap, and hooks and `keep_best` need it.
        for evaluators in self._by_key.values():
            yield from evaluators

    def validate_chosen(self, returned: Any, document: Document) -> list[Evaluator]:
        """Return the return value of a job's `evaluator` as a list.

        Raises `SpecError` if it lacks an evaluator that a key of the spec asks for, because nothing would read the key.
        """
        chosen = list_returned(returned)
        for key, evaluators in self._by_key.items():
            # Compared by identity of the cached objects, so a job must return those of `builtin_evaluators`.
            if any(each not in chosen for each in evaluators):
                reason = "nothing reads it, evaluator() returns others; return [*self.builtin_evaluators, ...]"
                raise document.error(f"config.eval.{key}", reason)
        return chosen

    def start_compiling(self, chosen: Sequence[Evaluator]) -> None:
        """Start slow work in the background that the first steps do not need."""
        if self.validation in chosen:
            self.validation.start_compiling()
