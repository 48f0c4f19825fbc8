"""Jobs of the model sizes that the benchmarks measure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.gpt import PretrainGPT
from runner import ExecutionSpec, Topology
from runner.spec import CheckpointConfig, LoggingConfig

SIZES = {
    "nano": {"layers": 2, "heads": 4, "width": 64, "vocabulary_size": 256},  # as in specs/gpt_nano.yaml
    "small": {"layers": 4, "heads": 4, "width": 128, "vocabulary_size": 256},  # as in specs/gpt_small.yaml
    "10m": {"layers": 6, "heads": 6, "width": 384, "vocabulary_size": 256},
    "124m": {"layers": 12, "heads": 12, "width": 768, "vocabulary_size": 50304},
}
BATCHES = {"nano": (32, 64), "small": (32, 64), "10m": (8, 256), "124m": (2, 512)}  # examples, sequence length


def make_job(
    size: str,
    directory: Path,
    total_steps: int,
    *,
    layer_loop: str = "unroll",
    every_steps: int | None = None,
    job_class: type[PretrainGPT] = PretrainGPT,
    batch: tuple[int, int] | None = None,
    url: str | None = None,
    train: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> PretrainGPT:
    """Make a GPT job of `size` in `directory` or at `url`.

    Args:
        every_steps: interval of saves; None is the default.
        train: further keys of `config.train`.
        config: further sections of `config`.
    """
    examples, sequence_length = batch or BATCHES[size]
    spec = ExecutionSpec(
        name=f"bench_{size}",
        job="experiments.gpt:PretrainGPT",
        directory=url or str(directory),
        topology=Topology(),
        checkpoint=CheckpointConfig() if every_steps is None else CheckpointConfig(every_steps=every_steps),
        logging=LoggingConfig(every_steps=10),
        config={
            "model": SIZES[size] | {"layer_loop": layer_loop},
            "data": {"sequence_length": sequence_length},
            "optimizer": {"learning_rate": 1e-3},
            "schedule": {"name": "constant"},
            "train": {"total_steps": total_steps, "global_batch_examples": examples, **(train or {})},
            **(config or {}),
        },
    )
    return job_class(spec)
