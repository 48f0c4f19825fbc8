"""The state's memory held twice, on CPUs only, so that training goes on while a save reads.

On a CPU a save reads from the very memory of the arrays, and the step to which they are donated next would have to copy
them into fresh memory, on one thread. So training goes on with a copy in the memory that the save before has read (in
fresh memory while it still reads), and leaves that of this save for the next. Elsewhere a save copies out of the device
first, and none of this is needed.
"""

import functools
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp

from runner.checkpoint.chunk import chunks


@functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
def _copy(leaves: list[jax.Array], spare: list[jax.Array] | None) -> list[jax.Array]:
    """A copy of `leaves` by all threads of the device, in the memory of `spare`, or in fresh memory if that is None."""
    return [jnp.copy(leaf) for leaf in leaves]


class DoubleBuffer:
    """The memory of one state, and that of the state that was saved before."""

    def __init__(self) -> None:
        self.is_needed = jax.default_backend() == "cpu"
        self._spare: list[jax.Array] | None = None
        self._reader: Future[Any] | None = None  # the save that may still read the spare memory

    def swap(self, state: Any, reader: Future[Any] | None) -> Any:
        """The state to go on with: the same bits as `state`, in memory that `reader`, the save of it, does not read."""
        if not self.is_needed:
            return state
        spare = self._spare if self._reader is None or self._reader.done() else None
        leaves, structure = jax.tree.flatten(state)
        copies = list(leaves)
        for places in chunks(leaves):
            memory = None if spare is None else [spare[place] for place in places]
            for place, leaf in zip(places, _copy([leaves[place] for place in places], memory), strict=True):
                copies[place] = leaf
        self._spare, self._reader = leaves, reader
        return jax.tree.unflatten(structure, copies)
