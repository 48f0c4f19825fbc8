"""Sizes of everything that is measured: each model as a spec of the runner and as a shape for PyTorch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Shape:
    """Shape of a decoder and its batch.

    Attributes:
        family: `gpt` is GPT-2; `llama` has RMS norms, rotary position embeddings and SwiGLU. Both tie the embedding.
        width: width of the residual stream.
        sequence_length: tokens per sequence.
        global_batch_examples: sequences per step.
        micro_batch_examples: sequences per micro-batch.
    """

    family: Literal["gpt", "llama"]
    layers: int
    heads: int
    key_value_heads: int
    width: int
    mlp_width: int
    vocabulary_size: int
    sequence_length: int
    global_batch_examples: int
    micro_batch_examples: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        return self.global_batch_examples * self.sequence_length


@dataclass(frozen=True)
class Model:
    """Model that is measured.

    Attributes:
        spec: spec of the runner, to which `make_arguments` applies the shape.
        rounds: measured slices, after a first one that warms up.
        steps: steps per slice.
        options: further `KEY=VALUE` options of the spec.
    """

    name: str
    spec: str
    shape: Shape
    rounds: int
    steps: int
    options: tuple[str, ...] = ()

    def make_arguments(self, directory: Path, tokens: Path, total_steps: int, *more: str) -> list[str]:
        """Return SPEC and the `--set` options of a run with this shape on the present devices, without saves.

        Args:
            directory: directory of the run.
            tokens: file of training tokens.
            more: further `KEY=VALUE` options.
        """
        shape = self.shape
        sizes: dict[str, Any] = {name: getattr(shape, name) for name in ("layers", "heads", "width", "vocabulary_size")}
        sizes |= {"layer_loop": "unroll"}  # as in the spec and in PyTorch
        if shape.family == "llama":
            sizes |= {"key_value_heads": shape.key_value_heads, "mlp_width": shape.mlp_width}
            sizes |= {"tied_embedding": True, "rope": {"theta": 500000.0}}
        options = [
            f"directory={directory}",
            "topology.accelerator=any",
            "topology.mesh={data: auto, fsdp: 1, tensor: 1}",
            f"checkpoint.every_steps={10**9}",
            f"config.model={json.dumps(sizes)}",
            f"config.data.source={tokens}",
            f"config.data.sequence_length={shape.sequence_length}",
            "config.eval.every_steps=null",
            "config.schedule.warmup_steps=2",
            "config.train.total_tokens=null",
            f"config.train.total_steps={total_steps}",
            f"config.train.global_batch_examples={shape.global_batch_examples}",
            f"config.train.micro_batch_examples={shape.micro_batch_examples}",
            *self.options,
            *more,
        ]
        return [self.spec, *(word for option in options for word in ("--set", option))]


@dataclass(frozen=True)
class ResumeSizes:
    """Lengths of the runs in the section `theorems`.

    Attributes:
        total_steps: steps of the run that is killed once.
        every_steps: steps between its saves.
        verify_steps: steps of `verify-resume`.
        kills: kills of `verify-resume`.
    """

    total_steps: int
    every_steps: int
    verify_steps: int
    kills: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of all sections.

    Attributes:
        models: measured models, by name.
        resume: lengths of the runs that are killed and resumed.
        save: model of the section `save`, a key of `tests.benchmarks.jobs.SIZES`.
        save_batch: its sequences per step and tokens per sequence.
        rounds: number of saves and of restarts.
    """

    models: dict[str, Model]
    resume: ResumeSizes
    save: str
    save_batch: tuple[int, int]
    rounds: int


_GPT2 = Shape("gpt", 12, 12, 12, 768, 3072, 50304, 1024, 32, 16)
_LLAMA = Shape("llama", 16, 32, 8, 2048, 8192, 50304, 2048, 8, 4)
_TINY_GPT = Shape("gpt", 2, 2, 2, 32, 128, 256, 32, 4, 2)
_TINY_LLAMA = Shape("llama", 2, 4, 2, 32, 64, 256, 32, 4, 2)
_FLOAT32, _UNCHUNKED_LOSS = "config.precision.compute=float32", "config.memory.loss_chunk_positions=null"
GPT2, LLAMA = "specs/gpt2_124m.yaml", "specs/llama_1b.yaml"

SIZES = {
    "full": Sizes(
        {
            "gpt2_124m": Model("gpt2_124m", GPT2, _GPT2, rounds=5, steps=20),
            "llama_1b": Model("llama_1b", LLAMA, _LLAMA, rounds=3, steps=5),
        },
        ResumeSizes(total_steps=600, every_steps=50, verify_steps=40, kills=3),
        save="124m",
        save_batch=(2, 128),
        rounds=3,
    ),
    "tiny": Sizes(
        {
            "gpt2_124m": Model("gpt2_124m", GPT2, _TINY_GPT, 2, 5, (_FLOAT32,)),
            "llama_1b": Model("llama_1b", LLAMA, _TINY_LLAMA, 2, 5, (_FLOAT32, _UNCHUNKED_LOSS)),
        },
        ResumeSizes(total_steps=100, every_steps=5, verify_steps=8, kills=2),
        save="small",
        save_batch=(2, 64),
        rounds=1,
    ),
}


@dataclass(frozen=True)
class SectionConfig:
    """Arguments of a section, which the kit passes to its process as JSON.

    Attributes:
        size: key of `SIZES`.
        scratch: empty directory for its files.
        device: device kind, as reported by JAX; empty if JAX did not start.
        torch_python: Python interpreter that may have torch.
    """

    size: str
    scratch: str
    device: str
    torch_python: str

    @property
    def sizes(self) -> Sizes:
        """Sizes of the measurements."""
        return SIZES[self.size]
