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

from runner.errors import InvalidError
from runner.train.variables import Meta


@dataclass(frozen=True)
class Observation:
    """What a step shows its riders. All of it is traced.

    Attributes:
        step: completed steps, with this one; int32.
        params: those of the next step, in the type in which they are stored.
        grads: of the mean loss over the whole batch, float32, before any clipping.
    """

    step: jax.Array
    params: Any
    grads: Any


@dataclass(frozen=True)
class Rider:
    """One pytree that rides along, and how it changes. Its functions are pure: nothing else of it is kept.

    Attributes:
        name: its branch below `riders` of the state.
        init: what it is before the first step, from the parameters; arrays of its own, as a step donates them. Also
            where the parameters of another run are begun with.
        update: (what it is, what the step shows) -> (what it is then, scalars for the step's row), of the same shapes
            and types; None: steps leave it alone.
    """

    name: str
    init: Callable[[Any], Any]
    update: Callable[[Any, Observation], tuple[Any, Meta]] | None = None


def init_riders(riders: Sequence[Rider], params: Any) -> dict[str, Any]:
    """All of `riders` by name, as they are before the first step. Raises `InvalidError` if two have one name."""
    for name, count in Counter(rider.name for rider in riders).items():
        if count > 1:
            raise InvalidError(f"{count} riders of the job are called {name!r}; give each a name of its own")
    return {rider.name: rider.init(params) for rider in riders}


def ride(riders: Sequence[Rider], own: dict[str, Any], seen: Observation) -> tuple[dict[str, Any], Meta]:
    """(all that rides along after a step, scalars for its row), from what it was before. To be traced."""
    after, scalars = dict(own), Meta()
    for rider in riders:
        if rider.update is not None:
            after[rider.name], own_scalars = rider.update(own[rider.name], seen)
            scalars |= own_scalars
    return after, scalars
