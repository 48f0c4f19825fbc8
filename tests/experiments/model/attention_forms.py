"""Implementations of attention as functions of arrays and options, as `causal_attention` is one."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from experiments.model import attention
from experiments.model.context_layout import AttentionInputs, AttentionOptions
from experiments.model.rotary import Rotation


def take_arrays(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return an implementation with the arguments of `causal_attention`."""

    @functools.wraps(attend)
    def attend_to(
        q: Any,
        k: Any,
        v: Any,
        segments: Any = None,
        rotation: Rotation | None = None,
        *,
        sinks_N: Any = None,
        **options: Any,
    ) -> jax.Array:
        return attend(AttentionInputs(q, k, v, segments, rotation, sinks_N), AttentionOptions(**options))

    return attend_to


blocked_attention = take_arrays(attention.blocked_attention)
xla_attention = take_arrays(attention.xla_attention)
fused_attention = take_arrays(attention.fused_attention)
splash_attention = take_arrays(attention.splash_attention)
