"""Step time of a Llama relative to a GPT-2 of equal FLOPs: same layers, heads and width, an MLP of 8/3 the width.

Slices of both alternate, so that they see the same machine load. The script prints the median ratio over slices by wall
time and by CPU time; the latter is more reliable on a shared machine.

    python -m tests.benchmarks.decoder [--sizes small 10m] [--layer-loops scan unroll] [--slices 5] [--steps 5]
"""

import argparse
import functools
import statistics
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from experiments.gpt import GPT, GPTConfig, PretrainGPT
from experiments.model.config import DecoderConfig
from experiments.model.decoder import Decoder, PretrainDecoder
from runner import BaseTrainer
from tests.benchmarks.jobs import BATCHES, SIZES
from tests.benchmarks.packed_attention import make_batch

Pair = tuple[float, float]


def make_models(size: str, layer_loop: str) -> list[tuple[nn.Module, type[BaseTrainer]]]:
    """Make a Llama and a GPT with the same FLOPs per token."""
    sizes, length = SIZES[size], BATCHES[size][1]
    vocabulary, width = sizes["vocabulary_size"], sizes["width"]
    llama = sizes | {"mlp_width": 8 * width // 3, "tied_embedding": True, "layer_loop": layer_loop}
    return [
        (Decoder(DecoderConfig(**llama), vocabulary), PretrainDecoder),
        (GPT(GPTConfig(**sizes, layer_loop=layer_loop), vocabulary, length), PretrainGPT),
    ]


def make_state(model: nn.Module, length: int) -> TrainState:
    """Make an initial train state for AdamW."""
    init = jax.jit(functools.partial(model.init, deterministic=True))
    params = nn.unbox(init(jax.random.key(0), jnp.zeros((1, length), jnp.int32)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


def run_steps(step: Any, state: TrainState, batch: Any, num_steps: int) -> tuple[TrainState, Pair]:
    """Run some steps, and return the state and the wall and CPU seconds per step."""
    started = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        state, loss, _ = step(state, batch, jax.random.key(0), 1)
    jax.block_until_ready((state, loss))
    return state, (
        (time.perf_counter() - started[0]) / num_steps,
        (time.process_time() - started[1]) / num_steps,
    )


def measure(size: str, layer_loop: str, num_slices: int, num_steps: int) -> list[tuple[Pair, Pair]]:
    """Return the seconds per step of the Llama and of the GPT for each slice; the first slices compile."""
    batch, length = make_batch(size), BATCHES[size][1]
    runs = [
        (jax.jit(trainer.train_step, static_argnums=3, donate_argnums=0), make_state(model, length))
        for model, trainer in make_models(size, layer_loop)
    ]
    found = []
    for _ in range(num_slices + 1):
        taken = []
        for number, (step, state) in enumerate(runs):
            state, seconds = run_steps(step, state, batch, num_steps)
            runs[number] = step, state
            taken.append(seconds)
        found.append((taken[0], taken[1]))
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["small", "10m"])
    parser.add_argument("--layer-loops", nargs="+", choices=("scan", "unroll"), default=["scan", "unroll"])
    parser.add_argument("--slices", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parsed = parser.parse_args()
    for size in parsed.sizes:
        for layer_loop in parsed.layer_loops:
            found = measure(size, layer_loop, parsed.slices, parsed.steps)
            for number, clock in enumerate(("clock", "processor")):
                ratios = [llama[number] / gpt[number] for llama, gpt in found]
                llama, gpt = (statistics.median(pair[model][number] for pair in found) for model in (0, 1))
                print(
                    f"{size} {layer_loop}, {clock}: Llama {llama:.4f} s, GPT {gpt:.4f} s, ratio median "
                    f"{statistics.median(ratios):.3f} (least {min(ratios):.3f}, most {max(ratios):.3f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
