"""Gradient of a token lookup: summed over sorted tokens, as on GPUs, relative to a scatter.

Both forms alternate on the current platform, on tokens that are equally frequent and on tokens with the frequencies of
text. The script prints seconds, the median ratio, and the largest error of each form relative to float64.

    XLA_FLAGS=--xla_gpu_deterministic_ops=true python -m tests.benchmarks.embedding_gradient [--tokens 16384]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.model.embedding import take_rows_sorted

Gradient = Callable[[jax.Array, jax.Array], jax.Array]


def make_forms(vocabulary: int, width: int) -> dict[str, Gradient]:
    """Return the compiled gradient of both forms, as functions of tokens (N,) and gradients (N, D) in bfloat16."""
    table = jnp.zeros((vocabulary, width), jnp.bfloat16)

    def make(take: Callable[[jax.Array, jax.Array], jax.Array]) -> Gradient:
        return jax.jit(lambda tokens, gradient: jax.vjp(lambda rows: take(rows, tokens), table)[1](gradient)[0])

    return {"sorted": make(take_rows_sorted), "scatter": make(lambda rows, tokens: rows[tokens])}


def measure(forms: dict[str, Gradient], num_rounds: int, tokens: jax.Array, gradient: jax.Array) -> None:
    """Print the figures of both forms for these tokens."""
    expected = np.zeros(forms["sorted"](tokens, gradient).shape)
    np.add.at(expected, np.asarray(tokens), np.asarray(gradient, np.float64))
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(num_rounds + 1):
        for name, form in forms.items():
            started = time.perf_counter()
            jax.block_until_ready([form(tokens, gradient) for _ in range(10)])
            seconds[name].append((time.perf_counter() - started) / 10)
    for name, form in forms.items():
        error = np.max(np.abs(np.asarray(form(tokens, gradient), np.float64) - expected))
        print(f"  {name}: {statistics.median(seconds[name][1:]) * 1e3:.3f} ms, largest error {error:.3g}")
    ratios = [mine / other for mine, other in zip(seconds["sorted"][1:], seconds["scatter"][1:], strict=True)]
    print(f"  sorted / scatter: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def main() -> None:
    """Measure with both kinds of tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--vocabulary", type=int, default=50_304)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    parsed = parser.parse_args()
    random = np.random.default_rng(0)
    kinds = {
        "equally frequent tokens": random.integers(parsed.vocabulary, size=parsed.tokens),
        "tokens with the frequencies of text": random.zipf(1.2, parsed.tokens) % parsed.vocabulary,
    }
    forms = make_forms(parsed.vocabulary, parsed.width)
    gradient = jax.random.normal(jax.random.key(0), (parsed.tokens, parsed.width), jnp.bfloat16)
    for name, tokens in kinds.items():
        print(f"{jax.devices()[0].device_kind}, {name}:")
        measure(forms, parsed.rounds, jnp.asarray(tokens, jnp.int32), gradient)


if __name__ == "__main__":
    main()
