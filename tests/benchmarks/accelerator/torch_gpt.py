"""Worker that trains a GPT-2 (as nanoGPT does) or a Llama with compiled PyTorch, in a process without JAX.

    python -m tests.benchmarks.accelerator.torch_gpt SHAPE     (a `Shape` as JSON)

On a GPU it computes in bfloat16 by autocast, with TF32 for the remaining float32 matmuls. It uses fused AdamW with
weight decay on matrices, global-norm clipping at 1.0, and PyTorch's own attention, which selects flash kernels on GPUs.
The tokens are random and are stored on the device.

Shape legend: B batch, T sequence, D width, N query heads, K key-value heads, H head width.
"""

import json
import sys
import time

import torch
from torch import nn
from torch.nn import functional

from tests.benchmarks.accelerator.config import Shape
from tests.benchmarks.accelerator.worker import Finished, Ready, SliceDone, WorkerConnection

_NUM_BATCHES = 4  # generated once and reused cyclically
_ROPE_THETA = 500_000.0


class Block(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads, self.kv_heads, self.head_width = shape.heads, shape.key_value_heads, shape.width // shape.heads
        self.is_gpt = shape.family == "gpt"
        self.norm_1, self.norm_2 = make_norm(shape), make_norm(shape)
        qkv_width = (self.heads + 2 * self.kv_heads) * self.head_width
        self.qkv = nn.Linear(shape.width, qkv_width, bias=self.is_gpt)
        self.out = nn.Linear(shape.width, shape.width, bias=self.is_gpt)
        self.up = nn.Linear(shape.width, shape.mlp_width * (1 if self.is_gpt else 2), bias=self.is_gpt)
        self.down = nn.Linear(shape.mlp_width, shape.width, bias=self.is_gpt)

    def forward(self, x_BTD: torch.Tensor, rope_TH: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        x_BTD = x_BTD + self.attend(self.norm_1(x_BTD), rope_TH)
        up = self.up(self.norm_2(x_BTD))
        if self.is_gpt:
            return x_BTD + self.down(functional.gelu(up, approximate="tanh"))
        gate, value = up.chunk(2, dim=-1)
        return x_BTD + self.down(functional.silu(gate) * value)

    def attend(self, x_BTD: torch.Tensor, rope_TH: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        B, T, D = x_BTD.shape
        N, K, H = self.heads, self.kv_heads, self.head_width
        parts = self.qkv(x_BTD).split((N * H, K * H, K * H), dim=-1)
        q_BNTH, k_BKTH, v_BKTH = (part.view(B, T, -1, H).transpose(1, 2) for part in parts)
        if rope_TH is not None:
            q_BNTH, k_BKTH = rotate(q_BNTH, *rope_TH), rotate(k_BKTH, *rope_TH)
        y_BNTH = functional.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=N != K)
        return self.out(y_BNTH.transpose(1, 2).reshape(B, T, D))


class Decoder(nn.Module):
    """Decoder language model that returns the mean cross entropy."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary_size, shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.positions = nn.Embedding(shape.sequence_length, shape.width) if shape.family == "gpt" else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = make_norm(shape)
        head_width = shape.width // shape.heads
        frequencies = _ROPE_THETA ** -(torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(shape.sequence_length), frequencies).repeat(1, 2)
        self.register_buffer("cos_TH", angles.cos(), persistent=False)
        self.register_buffer("sin_TH", angles.sin(), persistent=False)

    def forward(self, x_BT: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
        x_BTD, rope_TH = self.embedding(x_BT), None
        if self.positions is not None:
            x_BTD = x_BTD + self.positions.weight
        else:
            rope_TH = (self.cos_TH, self.sin_TH)
        for block in self.blocks:
            x_BTD = block(x_BTD, rope_TH)
        logits = functional.linear(self.norm(x_BTD), self.embedding.weight)
        return functional.cross_entropy(logits.view(-1, logits.size(-1)), y_BT.reshape(-1))


def make_norm(shape: Shape) -> nn.Module:
    """Return the normalisation layer of the model family."""
    return nn.LayerNorm(shape.width) if shape.family == "gpt" else nn.RMSNorm(shape.width, eps=1e-5)


def rotate(x: torch.Tensor, cos_TH: torch.Tensor, sin_TH: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embeddings to pairs of one element from each half of a head."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos_TH + torch.cat((-second, first), dim=-1) * sin_TH).to(x.dtype)


class Loop:
    """Training loop: a model, its optimizer and its batches."""

    def __init__(self, shape: Shape, device: str):
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        self._device = device
        self.model = Decoder(shape).to(device)
        self._loss = torch.compile(self.model)
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=4e-4, betas=(0.9, 0.95), fused=True)
        size = (_NUM_BATCHES, shape.global_batch_examples, shape.sequence_length + 1)
        self._batches = [
            [
                (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
                for tokens in batch.split(shape.micro_batch_examples)
            ]
            for batch in torch.randint(shape.vocabulary_size, size, device=device)
        ]
        self._step = 0

    def step(self) -> None:
        """Train for one step on a global batch."""
        batch = self._batches[self._step % _NUM_BATCHES]
        for x_BT, y_BT in batch:
            with torch.autocast("cuda", torch.bfloat16, enabled=self._device == "cuda"):
                loss = self._loss(x_BT, y_BT)
            (loss / len(batch)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._step += 1

    def run_slice(self, num_steps: int) -> float:
        """Run `num_steps` steps and wait for the device; return the seconds."""
        started = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


def main() -> None:
    connection = WorkerConnection()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loop = Loop(Shape(**json.loads(sys.argv[1])), device)
    num_parameters = sum(parameter.numel() for parameter in loop.model.parameters())
    connection.send(Ready(num_parameters, version=f"torch {torch.__version__}"))
    while (num_steps := connection.wait_for_slice()) is not None:
        connection.send(SliceDone(loop.run_slice(num_steps)))
    connection.send(Finished(torch.cuda.max_memory_allocated() if device == "cuda" else None))


if __name__ == "__main__":
    main()
