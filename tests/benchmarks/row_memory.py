"""What libtpu says that a device needs for rows that are cut over devices, without a TPU.

    python -m tests.benchmarks.row_memory [--tokens 8192 32768 131072] [--parts 1 2 4 8]

A decoder of two layers with heads as wide as those of large models, one row on each device or group of devices that
share it; the others of eight cut the state as `fsdp`, so that it is the same everywhere. Printed is, in Markdown, what
a step needs beside the state, in MiB: `layers` keeps each layer's input, and of the loss 512 positions at a time.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from experiments.model.decoder import PretrainDecoder
from runner.accelerator import parse_accelerator
from runner.parallel.mesh import AXES
from runner.plan.program import open_machine
from runner.train.compile import ProgramMemory, list_batch_layouts
from tests.support.tiny_jobs import make_gpt

DEVICES = 8
MODEL = {
    "layers": 2,
    "width": 1024,
    "heads": 8,
    "key_value_heads": 2,
    "head_dim": 128,
    "mlp_width": 4096,
    "vocabulary_size": 8192,
}


def memory_of(tokens: int, parts: int, devices: Sequence[jax.Device], directory: Path) -> ProgramMemory:
    """Of a step over rows of so many tokens, each cut into so many parts."""
    groups = DEVICES // parts
    changes = {
        "config.model": MODEL,
        "config.data.sequence_length": tokens,
        "config.train.global_batch_examples": groups,
        "config.memory": {"remat": "layers", "loss_chunk_positions": 512},
        "config.precision.compute": "bfloat16",
        "topology.mesh": dict.fromkeys(AXES, 1) | {"fsdp": groups, "sequence": parts},
    }
    job = make_gpt(directory / "run", PretrainDecoder, **changes)
    train_setup = job.setup_builder.build_on_mesh(
        job.setup_builder.make_mesh(devices), jax.random.key(0), example_length=8
    )
    return train_setup.compile_train(job.train_step, list_batch_layouts(job.config, train_setup.mesh)[0]).memory


def main(lengths: Sequence[int], all_parts: Sequence[int]) -> None:
    machine = open_machine(parse_accelerator(f"v5p-{DEVICES}"))
    heads = [f"`sequence` {parts}" for parts in all_parts]
    print(f"| tokens a row | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    with tempfile.TemporaryDirectory() as directory:
        for tokens in lengths:
            print(f"| {tokens:,} |", end="", flush=True)
            for parts in all_parts:
                found = memory_of(tokens, parts, machine.devices, Path(directory))
                print(f" {found.temporaries / 2**20:,.0f} |", end="", flush=True)
            print(flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32_768, 131_072])
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2, 4, 8])
    given = parser.parse_args()
    main(given.tokens, given.parts)
