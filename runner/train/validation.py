"""Validation: the mean loss over the real target tokens of fixed sets of batches."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from runner.config import TrainerConfig
from runner.data import Dataset
from runner.hosts.agreement import Hosts
from runner.train.step import Batch, finite, is_scalar
from runner.train.variables import PARAMS, VARIABLES, TrainState

Figures = dict[str, float | None]


@dataclass(frozen=True)
class ValidationSet:
    """Batches 0 .. `num_batches` of a set; `batch` makes one by its number."""

    name: str
    num_batches: int
    batch: Callable[[int], Batch]


def validation_sets(
    dataset: Dataset, config: TrainerConfig[Any], batch: Callable[[str, int], Batch]
) -> list[ValidationSet]:
    """Of each set `eval.batches` batches, or fewer if they hold all of it; `batch` makes one by set and number."""
    size, most = config.train.global_batch_examples, config.eval.batches
    return [
        ValidationSet(name, min(most, -(-examples.num_examples // size)), functools.partial(batch, name))
        for name, examples in dataset.validation.items()
    ]


class Validation:
    """The loss on validation sets, by a `val_step` that is compiled when it is first needed, or in the background.

    `abstract` is the train state's; `compile_val` compiles for one with no optimizer state, and of which nothing rides
    along; `is_stopping` says whether the job was asked to stop, which a whole evaluation must not delay. Made and
    called on every host.
    """

    def __init__(
        self,
        abstract: TrainState,
        compile_val: Callable[[TrainState], jax.stages.Compiled],
        sets: Sequence[ValidationSet],
        is_stopping: Callable[[], bool],
    ):
        self._abstract = abstract.replace(opt_state=(), riders={})
        self._compile_val, self._sets, self._is_stopping = compile_val, sets, is_stopping
        self._step: Future[jax.stages.Compiled] | None = None

    def begin_to_compile(self) -> None:
        """In the background, and not before a first row is out: tracing would slow down what the first steps need."""
        if self._step is None:
            compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
            self._step = compiler.submit(self._compile_val, self._abstract)
            compiler.shutdown(wait=False)

    @property
    def compiled(self) -> jax.stages.Compiled:
        """`(state, batch) -> (loss_sum, token_count, last_meta)`. May wait for the compiler."""
        self.begin_to_compile()
        assert self._step is not None
        return self._step.result()

    def state_of(self, weights: Any, step: int) -> TrainState:
        """What `val_step` is shown: the weights of `step`, and no optimizer state."""
        variables = weights.get(VARIABLES, {})
        return self._abstract.replace(params=weights[PARAMS], variables=variables, step=np.int32(step))

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> Figures | None:
        """The mean loss over all tokens of all batches, by its key in a row; None if the job was asked to stop.

        Of several sets that of each by its name, too. Beside it the scalars that `val_step` returns as meta, of the
        last batch of each.
        """
        state = self.state_of(weights, step)
        figures: Figures = {}
        loss_sum, token_count = 0.0, 0.0
        for held in self._sets:
            prefix = f"val/{held.name}" if len(self._sets) > 1 else "val"
            sums = self.sum(state, held)
            if sums is None:
                return None
            loss, count, meta = sums
            figures |= {f"{prefix}/{name}": finite(value) for name, value in meta.items() if is_scalar(value)}
            figures[f"{prefix}/loss"] = loss / (count or 1.0)
            loss_sum, token_count = loss_sum + loss, token_count + count
        return figures | {"val/loss": loss_sum / (token_count or 1.0)}

    def sum(self, state: TrainState, held: ValidationSet) -> tuple[float, float, Batch] | None:
        """Loss and real tokens of a set, added up, and the last meta; None if the job was asked to stop."""
        loss_sum, token_count, meta = jnp.float32(0), jnp.float32(0), {}
        for index in range(held.num_batches):
            if self._is_stopping():
                return None
            # At most one batch ahead of the device: a stop must not wait for a whole evaluation that is queued.
            jax.block_until_ready(loss_sum)
            loss, count, meta = self.compiled(state, held.batch(index))
            loss_sum, token_count = loss_sum + loss, token_count + count
        return float(loss_sum), float(token_count), meta
