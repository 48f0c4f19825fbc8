"""Device memory for long sequences under context parallelism, as reported by libtpu without a TPU.

    python -m tests.benchmarks.sequence_memory [--tokens 8192 32768 131072] [--parts 1 2 4 8]

The model is a decoder of two layers with the head width of large models. `--parts` devices share one sequence, and the
rest of the eight devices is the `fsdp` axis, so that the state per device is constant. The script prints a Markdown
table of the temporary memory of a step in MiB, with `remat: layers` and a chunked loss of 512 positions.
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
from runner.train.compile import ProgramMemory
from runner.train.layout import list_batch_layouts
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


def measure_memory(tokens: int, parts: int, devices: Sequence[jax.Device], directory: Path) -> ProgramMemory:
    """Return the memory of a step on sequences of `tokens`, each sharded over `parts` devices."""
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
    print(f"| tokens per sequence | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    with tempfile.TemporaryDirectory() as directory:
        for tokens in lengths:
            print(f"| {tokens:,} |", end="", flush=True)
            for parts in all_parts:
                found = measure_memory(tokens, parts, machine.devices, Path(directory))
                print(f" {found.temporaries / 2**20:,.0f} |", end="", flush=True)
            print(flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32_768, 131_072])
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2, 4, 8])
    given = parser.parse_args()
    main(given.tokens, given.parts)
