"""Validation: the mean loss over the real target tokens of fixed sets of batches."""

import functools
import math
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
from runner.terminal import warn
from runner.train.evaluation import Figures
from runner.train.meta import SUMS, Shown, means_of, shown
from runner.train.step import Batch
from runner.train.variables import PARAMS, VARIABLES, TrainState


@dataclass(frozen=True)
class ValidationSet:
    """Batches 0 .. `num_batches` of a set; `batch` makes one by its number."""

    name: str
    num_batches: int
    batch: Callable[[int], Batch]


@dataclass(frozen=True)
class Size:
    """How many real targets a set has, and how many bytes their text; None, and why, where that is not known."""

    num_targets: int
    num_bytes: int | None
    reason: str = ""


@dataclass(frozen=True)
class SetSums:
    """Loss and real tokens of a set, added up; and its meta, as rows hold it, by name."""

    loss: float
    num_tokens: float
    meta: dict[str, Shown]


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
    along; `is_stopping` says whether the job was asked to stop, which a whole evaluation must not delay; `size_of`, if
    given, how many bytes a set's text has, by its name. Made and called on every host.
    """

    def __init__(
        self,
        abstract: TrainState,
        compile_val: Callable[[TrainState], jax.stages.Compiled],
        sets: Sequence[ValidationSet],
        is_stopping: Callable[[], bool],
        size_of: Callable[[str], Size] | None = None,
    ):
        self._size_of = None if size_of is None else functools.cache(size_of)
        self._told: set[str] = set()  # the sets of whose bytes it is told that they are not known
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

        Of several sets that of each by its name, too. Beside it what `val_step` returns as meta, of the last batch of
        each, and the means of its `sums` over all of them; and bits per byte where sizes are asked for.
        """
        state = self.state_of(weights, step)
        figures: Figures = {}
        total = SetSums(0.0, 0.0, {})
        num_bytes: int | None = 0
        for held in self._sets:
            prefix = f"val/{held.name}" if len(self._sets) > 1 else "val"
            sums = self.sum(state, held)
            if sums is None:
                return None
            own_bytes = self._num_bytes(held.name, sums, hosts)
            figures |= {f"{prefix}/{name}": value for name, value in sums.meta.items()}
            figures |= self._figures(prefix, sums, own_bytes)
            total = SetSums(total.loss + sums.loss, total.num_tokens + sums.num_tokens, {})
            num_bytes = None if num_bytes is None or own_bytes is None else num_bytes + own_bytes
        return figures | self._figures("val", total, num_bytes)

    def _figures(self, prefix: str, sums: SetSums, num_bytes: int | None) -> Figures:
        found: Figures = {f"{prefix}/loss": sums.loss / (sums.num_tokens or 1.0)}
        if self._size_of is not None:
            found[f"{prefix}/bits_per_byte"] = sums.loss / math.log(2) / num_bytes if num_bytes else None
        return found

    def _num_bytes(self, name: str, sums: SetSums, hosts: Hosts) -> int | None:
        """Bytes of the text of a set, if the loss is of just its targets; counted by host 0. One line where it is not.

        The first time it may take as long as to decode the set.
        """
        if self._size_of is None:
            return None
        size = self._size_of(name) if hosts.is_main else Size(0, None)
        reason = size.reason
        if size.num_bytes is not None and size.num_targets != sums.num_tokens:
            reason = f"it has {size.num_targets} targets, and the loss is of {sums.num_tokens:g}"
        if hosts.is_main and reason and name not in self._told:
            self._told.add(name)
            warn(f"{name}: bits per byte are not known: {reason}")
        known: int | None = hosts.agree(None if reason else size.num_bytes)
        return known

    def sum(self, state: TrainState, held: ValidationSet) -> SetSums | None:
        """What the batches of a set add up to; None if the job was asked to stop."""
        loss_sum, token_count, meta = jnp.float32(0), jnp.float32(0), {}
        sums: Any = None
        for index in range(held.num_batches):
            if self._is_stopping():
                return None
            # At most one batch ahead of the device: a stop must not wait for a whole evaluation that is queued.
            jax.block_until_ready(loss_sum)
            loss, count, meta = self.compiled(state, held.batch(index))
            loss_sum, token_count = loss_sum + loss, token_count + count
            if SUMS in meta:
                sums = meta[SUMS] if sums is None else jax.tree.map(jnp.add, sums, meta[SUMS])
        last = {name: value for name, value in meta.items() if name != SUMS}
        means = {} if sums is None else means_of(sums, token_count)
        found = {name: shown(value) for name, value in jax.device_get({**last, **means}).items()}
        return SetSums(float(loss_sum), float(token_count), found)
