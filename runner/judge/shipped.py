"""The evaluators that come with a trainer: the loss on its validation sets, and whatever else its spec asks for."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from runner.hosts.preemption import StopNotice
from runner.judge.asked import Asked, EvaluationContext
from runner.judge.size import own_sets
from runner.spec import Document
from runner.train.adapter import model_state
from runner.train.batch_layout import BatchLayout
from runner.train.blueprint import Blueprint
from runner.train.design import Design
from runner.train.evaluation import Evaluator
from runner.train.step import Batch
from runner.train.validation import Validation, validation_sets


class Shipped:
    """Those of one job. Made and called on every host, once the train step is compiled.

    `batch` makes a batch by set and number; `stop` says whether the job was asked to stop.
    """

    def __init__(
        self,
        design: Design,
        blueprint: Blueprint,
        layout: BatchLayout,
        asked: Asked,
        batch: Callable[[str, int], Batch],
        stop: StopNotice,
    ):
        config, dataset = design.config, design.dataset
        self._asked = asked
        self._place = EvaluationContext(
            design.model(), blueprint.mesh, layout.micro_batch_examples, design.vocabulary_size, stop.poll
        )
        self._has_sets = bool(dataset.validation)
        self.validation = Validation(
            model_state(blueprint.abstract_state),
            lambda abstract: blueprint.compile_val(design.val_step, abstract, layout),
            validation_sets(dataset, config, batch),
            stop.poll,
            own_sets(dataset, config).size if config.eval.bits_per_byte else None,
        )

    @functools.cached_property
    def _of_keys(self) -> dict[str, Sequence[Evaluator]]:
        """Those that a key of `config.eval` asks for."""
        return {
            "multiple_choice": self._asked.multiple_choices(self._place),
            "samples": self._asked.samples(self._place),
        }

    @property
    def evaluators(self) -> list[Evaluator]:
        """All of them, the same objects each time."""
        loss = [self.validation] if self._has_sets else []
        return [*loss, *(each for found in self._of_keys.values() for each in found)]

    def check(self, returned: Any, document: Document) -> list[Evaluator]:
        """What a job's `evaluator` has returned, as a list.

        Raises `SpecError` if that leaves out what a key asks for, which nothing reads then.
        """
        chosen = [] if returned is None else list(returned) if isinstance(returned, list | tuple) else [returned]
        for key, asked in self._of_keys.items():
            if any(each not in chosen for each in asked):
                reason = "nothing reads it, evaluator() returns others; return [*self.shipped.evaluators, ...]"
                raise document.error(f"config.eval.{key}", reason)
        return chosen

    def begin_to_compile(self, chosen: Sequence[Evaluator]) -> None:
        """What takes time and is not needed for the first steps."""
        if self.validation in chosen:
            self.validation.begin_to_compile()
