"""Values of a forward pass that are computed only for a tool which inspects it, such as the entropy of attention.

A model calls `observe` where it has what such a value follows from. Without a tool the call does nothing, so the
programs of a step do not depend on it.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import jax

Observer = Callable[[str, jax.Array], None]

_current: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("observer", default=None)


def observe(name: str, compute: Callable[[], jax.Array]) -> None:
    """Hand the value of `compute` to the tool that traces this program, if there is one."""
    if (observer := _current.get()) is not None:
        observer(name, compute())


@contextlib.contextmanager
def use_observer(observer: Observer) -> Iterator[None]:
    """Call `observer` with each observed value of the programs that are traced in the context."""
    token = _current.set(observer)
    try:
        yield
    finally:
        _current.reset(token)
