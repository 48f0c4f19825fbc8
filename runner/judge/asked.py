"""What `config.eval` asks for besides the loss, read and checked before the first step; and who answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
from jax.sharding import Mesh

from runner.config import TrainerConfig
from runner.errors import DataError
from runner.judge.choice import Sampling
from runner.judge.decode import make_reader
from runner.judge.likelihood import Likelihood
from runner.judge.multiple_choice import MultipleChoice
from runner.judge.question import Question, digest_of_questions, read_questions
from runner.judge.samples import Samples
from runner.judge.text import Language, encode_prompt, first_token, language_of, parse_ids
from runner.spec import Document


@dataclass(frozen=True)
class Task:
    """Questions by the name of their figures."""

    name: str
    questions: Sequence[Question]
    every_steps: int | None


@dataclass(frozen=True)
class EvaluationContext:
    """Where a model is asked: its weights lie on `mesh`, and so many rows of a batch on each device."""

    model: nn.Module
    mesh: Mesh
    rows_per_device: int
    vocabulary_size: int
    is_stopping: Callable[[], bool]


@dataclass(frozen=True)
class Asked:
    """The tasks and the prompts of a spec, and what their tokens mean; made by `read_asked` on every host."""

    config: TrainerConfig[Any]
    language: Language | None
    tasks: Sequence[Task]
    prompts: Sequence[tuple[str, list[int]]]

    @property
    def digest(self) -> str:
        """The same on every host, if all have read the same; empty if nothing is asked."""
        if not self.tasks:
            return ""
        return digest_of_questions([question for task in self.tasks for question in task.questions])

    def multiple_choices(self, place: EvaluationContext) -> list[MultipleChoice]:
        """Who asks the questions of each task."""
        if not self.tasks:
            return []
        assert self.language is not None, "read_asked refuses questions without a tokenizer"
        length = self.config.data.sequence_length
        likelihood = Likelihood(place.model, place.mesh, length, place.rows_per_device, place.is_stopping)
        first, encode = first_token(self.language, self.config.data), partial(encode_prompt, self.language)
        return [
            MultipleChoice(task.name, task.questions, encode, first, likelihood, task.every_steps)
            for task in self.tasks
        ]

    def samples(self, place: EvaluationContext) -> list[Samples]:
        """Who writes the texts, if any are asked for."""
        rule = self.config.eval.samples
        if rule is None:
            return []
        length, dtype = self.config.data.sequence_length, self.config.precision.compute
        num_ids = place.vocabulary_size if self.language is None else self.language.tokenizer.vocabulary_size
        choose = Sampling(rule.temperature, rule.top_p).make_choose(num_ids)

        def reader(variables: Any) -> Any:
            return make_reader(place.model, variables, length, dtype, place.mesh)

        return [
            Samples(
                self.prompts, self.language, reader, choose, rule.tokens, length, place.is_stopping, rule.every_steps
            )
        ]


def read_asked(document: Document, config: TrainerConfig[Any], vocabulary_size: int) -> Asked:
    """Read what `config.eval` names. Raises `SpecError`: a file that is none, or no tokenizer for questions."""
    with document.blaming("config.eval"):
        return _read(config, vocabulary_size)


def _read(config: TrainerConfig[Any], vocabulary_size: int) -> Asked:
    rule = config.eval
    if not rule.multiple_choice and rule.samples is None:
        return Asked(config, None, (), ())
    language: Language | None = None
    try:
        language = language_of(config.data)
    except DataError as error:
        if rule.multiple_choice:
            raise DataError(f"eval.multiple_choice needs the tokenizer of the data: {error}") from error
    tasks = [Task(each.name, read_questions(each.path, each.limit), each.every_steps) for each in rule.multiple_choice]
    prompts = [] if rule.samples is None else rule.samples.prompts
    return Asked(
        config, language, tasks, [(text, _ids_of(text, language, config, vocabulary_size)) for text in prompts]
    )


def _ids_of(text: str, language: Language | None, config: TrainerConfig[Any], vocabulary_size: int) -> list[int]:
    if language is None:
        return parse_ids(text, vocabulary_size, "samples.prompts") or [0]
    return encode_prompt(language, text) or [first_token(language, config.data)]
