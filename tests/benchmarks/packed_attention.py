"""Step time with several documents per sequence, relative to one document per sequence.

Slices of the same train step on the same tokens, with and without `segment` and `position`, alternate, so that both see
the same machine load. The script prints the median ratio over slices, for the current platform.

    python -m tests.benchmarks.packed_attention [--sizes small 10m] [--documents 8] [--slices 5] [--steps 5]
"""

import argparse
import functools
import statistics
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from experiments.gpt import GPT, GPTConfig, PretrainGPT
from tests.benchmarks.jobs import BATCHES, SIZES


def make_step(size: str) -> tuple[Any, TrainState]:
    """Return the compiled train step of a GPT, and its state."""
    config = GPTConfig(**SIZES[size])
    model = GPT(config, int(config.vocabulary_size), BATCHES[size][1])
    init = jax.jit(functools.partial(model.init, deterministic=True))
    params = nn.unbox(init(jax.random.key(0), jnp.zeros((1, BATCHES[size][1]), jnp.int32)))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))
    return jax.jit(PretrainGPT.train_step, static_argnums=3, donate_argnums=0), state


def make_batch(size: str) -> dict[str, jax.Array]:
    """Return random tokens of shape (1, B, T)."""
    x = np.random.default_rng(0).integers(0, SIZES[size]["vocabulary_size"], (1, *BATCHES[size]), np.int32)
    return {"x": jnp.asarray(x), "y": jnp.asarray(x), "padding_mask": jnp.ones(x.shape, bool)}


def split_documents(batch: dict[str, jax.Array], num_documents: int) -> dict[str, jax.Array]:
    """Return the same batch with each sequence split into documents of equal length."""
    shape = batch["x"].shape
    length = -(-shape[-1] // num_documents)
    place = np.arange(shape[-1])
    fields = {"segment": 1 + place // length, "position": place % length}
    return batch | {name: jnp.asarray(np.broadcast_to(row, shape), jnp.int32) for name, row in fields.items()}


def measure(size: str, num_documents: int, num_slices: int, num_steps: int) -> list[tuple[float, float]]:
    """Return the seconds per step with and without documents for each slice; the first slices compile."""
    step, state = make_step(size)
    batch, key = make_batch(size), jax.random.key(0)
    seconds = []
    for _ in range(num_slices + 1):
        pair = []
        for one in (split_documents(batch, num_documents), batch):
            started = time.perf_counter()
            for _ in range(num_steps):
                state, loss, _ = step(state, one, key, 1)
            jax.block_until_ready((state, loss))
            pair.append((time.perf_counter() - started) / num_steps)
        seconds.append((pair[0], pair[1]))
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["small", "10m"])
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--slices", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parsed = parser.parse_args()
    for size in parsed.sizes:
        seconds = measure(size, parsed.documents, parsed.slices, parsed.steps)
        ratios = [packed / plain for packed, plain in seconds]
        packed, plain = (statistics.median(column) for column in zip(*seconds, strict=True))
        print(
            f"{size}: {parsed.documents} documents a row {packed:.4f} s, one {plain:.4f} s, ratio median "
            f"{statistics.median(ratios):.3f} (least {min(ratios):.3f}, most {max(ratios):.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
