"""Time of attention and its gradients with each option, relative to plain causal attention, on the current platform.

All variants run in turn in every round, so that they see the same machine load. The script prints the median over
rounds of each time and of its ratio to the plain variant.

    python -m tests.benchmarks.attention [--shape 4x1024x8x64] [--window 128] [--documents 8] [--rounds 7]

A shape is B x T x N x H.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.model.attention import causal_attention


def make_arrays(B: int, T: int, N: int, K: int, H: int) -> list[jax.Array]:
    """Return random queries, keys, values and an output gradient."""
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.normal(size=(B, T, heads, H)), jnp.float32) for heads in (N, K, K, N)]


@functools.partial(jax.jit, static_argnames=("window", "softcap"))
def attend(q: Any, k: Any, v: Any, g: Any, segments: Any = None, **options: Any) -> Any:
    """Return the output and the gradients."""
    out, pullback = jax.vjp(lambda q, k, v: causal_attention(q, k, v, segments, **options), q, k, v)
    return out, pullback(g)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="4x1024x8x64")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parsed = parser.parse_args()
    B, T, N, H = map(int, parsed.shape.split("x"))
    plain, shared = make_arrays(B, T, N, N, H), make_arrays(B, T, N, 1, H)
    segments = jnp.asarray(np.broadcast_to(1 + np.arange(T) * parsed.documents // T, (B, T)), jnp.int32)
    runs: dict[str, Callable[[], Any]] = {
        "plain": lambda: attend(*plain),
        f"window of {parsed.window}": lambda: attend(*plain, window=parsed.window),
        "one head of keys": lambda: attend(*shared),
        f"{parsed.documents} documents a row": lambda: attend(*plain, segments),
        "soft-cap": lambda: attend(*plain, softcap=50.0),
        "all of it": lambda: attend(*shared, segments, window=parsed.window, softcap=50.0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(parsed.rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - started)
    for name, column in seconds.items():
        ratios = [one / other for one, other in zip(column[1:], seconds["plain"][1:], strict=True)]
        print(f"{name}: {statistics.median(column[1:]):.4f} s, {statistics.median(ratios):.3f} of plain", flush=True)


if __name__ == "__main__":
    main()
