"""The part of the train state that belongs to hooks: their counters, and which of their calls are behind it.

It is replicated, read and replaced between steps by the training thread, and passes through a step as it is. A state
that is saved in the middle of a step's calls (a stop came during its evaluation) says so itself: `FiredCalls`.
"""

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from runner.errors import InvalidError
from runner.train.state import TrainState

FIRED = "fired"
MOST_BYTES = 64 * 1024  # of one hook: what host 0 has counted goes to every host through the coordinator
_TYPES = "biuf"  # bool, int, unsigned, float
_WIDEST_BYTES = 4  # of a number in the state


@dataclass(frozen=True)
class FiredCalls:
    """Which calls are behind the state, and what they have asked for. All are steps but the last; 0: none yet.

    Attributes:
        row: the last one whose row the hooks have seen.
        evaluation: the last one whose evaluation they have seen.
        asked: the last one that a hook wanted to be evaluated.
        stopped: the `rule` of the hook that has ended the run; 0: none has.
    """

    row: int = 0
    evaluation: int = 0
    asked: int = 0
    stopped: int = 0


@dataclass(frozen=True)
class HookState:
    """The hooks' part of a state, on the host. `counters` are by the names of the hooks that steer."""

    fired: FiredCalls
    counters: Mapping[str, Any]

    @classmethod
    def first(cls, counters: Mapping[str, Any]) -> "HookState":
        """Before the first step."""
        return cls(FiredCalls(), counters)

    @classmethod
    def read(cls, arrays: Any) -> "HookState":
        """From the state; copies, since the next step overwrites its memory. Waits for the device."""
        found = jax.tree.map(np.array, jax.device_get(arrays))
        fired = FiredCalls(**{name: int(value) for name, value in found.pop(FIRED).items()})
        return cls(fired, found)

    def arrays(self) -> Mapping[str, Any]:
        """As the state holds it, numpy."""
        types = {"stopped": np.uint32}
        fired = {name: np.array(value, types.get(name, np.int32)) for name, value in asdict(self.fired).items()}
        return {FIRED: fired, **self.counters}

    def placed(self, state: TrainState, rider: str) -> TrainState:
        """`state` with this branch in the place of its own, on the same devices."""
        riders = state.riders | {rider: jax.tree.map(_place, self.arrays(), state.riders[rider])}
        return state.replace(riders=riders)


def _place(value: np.ndarray, old: jax.Array) -> jax.Array:
    return jax.make_array_from_callback(value.shape, old.sharding, lambda index: value[index])


def first_counters(counters: Any) -> Any:
    """What a hook begins with, as arrays. Raises `InvalidError` if the state cannot hold it."""
    made = jax.tree.map(np.asarray, counters)
    for leaf in jax.tree.leaves(made):
        if leaf.dtype.kind not in _TYPES or leaf.dtype.itemsize > _WIDEST_BYTES:
            raise InvalidError(
                f"init returns an array of {leaf.dtype}; counters are numpy arrays of at most 32 bits a number, such "
                "as np.int32(0)"
            )
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(made))
    if num_bytes > MOST_BYTES:
        raise InvalidError(f"init returns {num_bytes:,} bytes of counters; a hook may have {MOST_BYTES:,}")
    return made


def encode(counters: Any, like: Any) -> list[str]:
    """New counters as JSON holds them. Raises `ValueError` if they have another form than `like`, the first ones."""
    found, needed = str(jax.tree.structure(counters)), str(jax.tree.structure(like))
    if found != needed:
        raise ValueError(f"returned counters of {found}, init of {needed}")
    encoded = []
    for leaf, first in zip(jax.tree.leaves(counters), jax.tree.leaves(like), strict=True):
        value = np.asarray(leaf)
        if value.shape != first.shape or not np.can_cast(value.dtype, first.dtype, "same_kind"):
            raise ValueError(
                f"returned counters with {value.dtype} of shape {value.shape}, where init has {first.dtype} of shape "
                f"{first.shape}"
            )
        encoded.append(base64.b64encode(value.astype(first.dtype).tobytes()).decode())
    return encoded


def decode(encoded: list[str], like: Any) -> Any:
    """The counters of `encode`, in memory of their own."""
    leaves = [
        np.frombuffer(base64.b64decode(text), first.dtype).reshape(first.shape).copy()
        for text, first in zip(encoded, jax.tree.leaves(like), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
