"""What rides along with the parameters in the train state, by name: averages of weights, counters of hooks.

A rider is a pytree below `riders` of the state, saved, restored, compared and fingerprinted like every leaf. What has
the name and the shape of a parameter lies as that does; all else is on every device. Where nothing asks for a rider
there is no leaf, and the state and the program are those without.

A rider that has an `update` changes with each step, inside the program of the step, after the optimizer. One that has
none stays as it is there, and is replaced on the host between two steps.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from runner.errors import InvalidError
from runner.train.variables import Meta


@dataclass(frozen=True)
class Halves:
    """What the gradients over the two halves of a global batch, by the order of its examples, have in common.

    Attributes:
        squares: the square of the norm of each half's mean gradient; float32[2].
        product: their scalar product.
        counts: what the targets of each half count for; float32[2].
    """

    squares: jax.Array
    product: jax.Array
    counts: jax.Array


@dataclass(frozen=True)
class Observation:
    """What a step shows its riders. All of it is traced.

    Attributes:
        step: completed steps, with this one; int32.
        params: those of the next step, in the type in which they are stored.
        grads: of the mean loss over the whole batch, float32, before any clipping.
        halves: only where a rider `sees_halves`.
    """

    step: jax.Array
    params: Any
    grads: Any
    halves: Halves | None = None


@dataclass(frozen=True)
class Rider:
    """One pytree that rides along, and how it changes. Its functions are pure: nothing else of it is kept.

    Attributes:
        name: its branch below `riders` of the state.
        init: what it is before the first step, from the parameters; arrays of its own, as a step donates them. Also
            where the parameters of another run are begun with.
        update: (what it is, what the step shows) -> (what it is then, scalars for the step's row), of the same shapes
            and types; None: steps leave it alone.
        sees_halves: whether it needs the gradients of both halves of the batch, which cost the memory of one more, and
            an even number of micro-batches.
    """

    name: str
    init: Callable[[Any], Any]
    update: Callable[[Any, Observation], tuple[Any, Meta]] | None = None
    sees_halves: bool = False


def compared(first: Any, both: Any, counts: jax.Array, divisor: jax.Array | None) -> Halves:
    """What two halves of a batch have in common, from the gradients of the first and of both, added up.

    Gradients are of sums that were divided by `divisor`, if any; `counts` is of each half.
    """
    second = jax.tree.map(jnp.subtract, both, first)
    shares = jnp.maximum(counts, jnp.finfo(jnp.float32).tiny) / (1.0 if divisor is None else divisor)
    products = [
        jax.tree.reduce(jnp.add, jax.tree.map(jnp.vdot, *pair))
        for pair in [(first, first), (second, second), (first, second)]
    ]
    squares = jnp.stack(products[:2]) / shares**2
    return Halves(squares, products[2] / (shares[0] * shares[1]), counts)


def init_riders(riders: Sequence[Rider], params: Any) -> Any:
    """All of `riders` by name, as they are before the first step. Raises `InvalidError` if two have one name."""
    for name, count in Counter(rider.name for rider in riders).items():
        if count > 1:
            raise InvalidError(f"{count} riders of the job are called {name!r}; give each a name of its own")
    return {rider.name: rider.init(params) for rider in riders}


def ride(riders: Sequence[Rider], own: Any, seen: Observation) -> tuple[Any, Meta]:
    """(all that rides along after a step, scalars for its row), from what it was before. To be traced."""
    after = dict(own)
    scalars: Meta = {}
    for rider in riders:
        if rider.update is not None:
            after[rider.name], own_scalars = rider.update(own[rider.name], seen)
            scalars |= own_scalars
    return after, scalars


def refuse_left_behind(riders: Sequence[Rider], before: Any, after: Any) -> None:
    """Raise `InvalidError` if a traced step hands a rider on as it was, though it has an update."""
    for rider in riders:
        pairs = list(zip(jax.tree.leaves(before[rider.name]), jax.tree.leaves(after.get(rider.name)), strict=False))
        if rider.update is not None and pairs and all(old is new for old, new in pairs):
            raise InvalidError(
                f"train_step of the job leaves riders.{rider.name} as it is; call that of BaseTrainer, or `ride` of "
                "runner.train.rider after the optimizer"
            )
