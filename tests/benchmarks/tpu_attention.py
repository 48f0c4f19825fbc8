"""Estimates of libtpu for the fused TPU attention kernels, ours and the two of JAX, without a TPU.

For attention with its gradients, the script prints the instruction bundles of the kernels (one cycle each without
stalls), counted in libtpu's listing; the cycles that libtpu estimates for the other operations; and temporary bytes.
The block sizes in `experiments/model/attention.py` are based on them. Only one process at a time can use libtpu.

    python -m tests.benchmarks.tpu_attention [--chips v5e v5p] [--shapes 4x1024x12x12x64] [--kernels fused:1024 512:512]

A shape is B x T x N x K x H. A kernel is `fused:BLOCK` (ours), `COMPUTED:BLOCK` (JAX's splash attention) or
`flash:BLOCK` (JAX's older flash attention).
"""

import argparse
import importlib
import os
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from experiments.model import attention
from experiments.model.platform import LANES
from tests.experiments.model.attention_forms import fused_attention, splash_attention

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1"}
BUNDLE_PATTERN = re.compile(r"^ *(0x[0-9a-f]+) *(\w\w)?:")
BRANCH_PATTERN = re.compile(r"sbr\.rel \(!?%p\w+\) target = \$region(\d+)")


def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> jax.Array:
    """Apply JAX's older flash attention kernel, which needs as many key heads as query heads."""
    module = importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")
    names = [name for name in module.BlockSizes.__dataclass_fields__ if name != "block_b"]
    sizes = module.BlockSizes(block_b=1, **dict.fromkeys(names, block))
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    out = module.flash_attention(q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5, block_sizes=sizes)
    return out.transpose(0, 2, 1, 3)


def attend(kernel: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Apply attention with the kernel that an option names."""
    kind, _, block = kernel.partition(":")
    if kind == "flash":
        return flash_attention(q, k, v, int(block))
    if kind == "fused":
        attention._fused_block_tokens = lambda *_: int(block)
        return fused_attention(q, k, v)
    attention._splash_block_tokens = lambda *_: attention.BlockSizes(int(kind), int(block))
    return splash_attention(q, k, v)


def parse_bundles(listing: str) -> tuple[int, list[int]]:
    """Return the bundles of a grid step outside its conditional parts, and those of each conditional part."""
    lines = [
        (int(found[1], 16), found[2], line) for line in listing.splitlines() if (found := BUNDLE_PATTERN.match(line))
    ]
    start = next(index for index, (_, kind, _) in enumerate(lines) if kind == "LB")
    spans = []
    for index, (address, _, line) in enumerate(lines[start:], start):
        if branch := BRANCH_PATTERN.search(line):
            end = re.compile(rf"empty region {branch[1]}\b")
            spans += [(address, to) for to, _, text in lines[index:] if end.search(text)][:1]
    inner = [b - a for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
    return lines[-1][0] - lines[start][0] - sum(inner), inner


def count_bundles(listing: str, num_rows: int, num_blocks: int, is_ours: bool) -> int:
    """Return the bundles that a kernel executes on one core over its whole grid.

    The largest conditional parts compute the attention of a block; the others run at the start and end of a row of
    blocks. The grid of JAX's kernel is the whole square, with one part for its lower triangle. Our grid is the lower
    triangle, with one part for blocks on the diagonal and one for those below.
    """
    fixed, parts = parse_bundles(listing)
    below = num_blocks * (num_blocks - 1) // 2
    sizes = sorted(parts)[-2 if is_ours and below else -1 :]
    ends = num_blocks * (sum(parts) - sum(sizes))
    if not is_ours:
        return num_rows * (num_blocks**2 * fixed + (below + num_blocks) * sizes[0] + ends)
    of_diagonal, *of_others = [part for part in parts if part in sizes]
    return num_rows * ((below + num_blocks) * fixed + num_blocks * of_diagonal + below * sum(of_others) + ends)


def measure(chip: str, shape: str, kernel: str, dump: Path) -> None:
    """Compile one kernel for one chip and print libtpu's estimates."""
    B, T, N, K, H = map(int, shape.split("x"))
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    queries, keys = (
        jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16, sharding=SingleDeviceSharding(device)) for heads in (N, K)
    )

    def step(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        out, pullback = jax.vjp(lambda *qkv: attend(kernel, *qkv), q, k, v)
        return out, *pullback(g)

    traced = jax.jit(step).trace(queries, keys, keys, queries)
    compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    around = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', compiled.as_text())))
    blocks = T // int(kernel.rpartition(":")[2])
    listings = [path for path in dump.glob("*-final_bundles.txt") if "schedule" not in path.name]
    # Our kernels take heads of less than a row of lanes together.
    rows = B * N // (LANES // H) if kernel.startswith("fused:") and attention.packs_heads(N, K, H) else B * N
    kernels = sum(
        count_bundles(path.read_text(), rows, blocks, "ward_attention" in path.name)
        for path in listings
        if any(word in path.name for word in ("_mqa_", "flash", "ward_attention"))
    )
    mib = compiled.memory_analysis().temp_size_in_bytes / 2**20
    print(
        f"{chip} {shape} {kernel}: kernels {kernels:,} + other operations {around:,} cycles, {mib:.1f} MiB", flush=True
    )
    for path in dump.iterdir():
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chips", nargs="+", choices=list(TOPOLOGIES), default=["v5e"])
    parser.add_argument("--shapes", nargs="+", default=["4x1024x12x12x64"])
    parser.add_argument("--kernels", nargs="+", default=["flash:512", "512:512", "fused:1024"])
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={name} --xla_jf_dump_llo_text=true"
        for chip in parsed.chips:
            for shape in parsed.shapes:
                for kernel in parsed.kernels:
                    measure(chip, shape, kernel, Path(name))


if __name__ == "__main__":
    main()
