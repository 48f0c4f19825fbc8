"""What libtpu makes of the fused TPU kernel of attention, and of JAX's older one, on a machine without a TPU.

Printed, of attention with its gradients: the instruction bundles of its kernels (a cycle each, if nothing waits), which
are counted in libtpu's own listing; the cycles that libtpu estimates for the operations around them; temporary bytes.
The block sizes of `experiments/model/attention.py` rest on this. libtpu serves one process at a time.

    python -m tests.benchmarks.tpu_attention [--chips v5e v5p] [--shapes 4x1024x12x12x64] [--kernels flash:512 512:512]

A shape is B x T x N x K x H. A kernel is `flash:BLOCK`, or `COMPUTED:BLOCK` of the one that is used.
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

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1"}
LINE = re.compile(r"^ *(0x[0-9a-f]+) *(\w\w)?:")
BRANCH = re.compile(r"sbr\.rel \(!?%p\w+\) target = \$region(\d+)")


def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array, block: int) -> jax.Array:
    """JAX's older kernel: as many heads of keys as of queries."""
    module = importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")
    names = [name for name in module.BlockSizes.__dataclass_fields__ if name != "block_b"]
    sizes = module.BlockSizes(block_b=1, **dict.fromkeys(names, block))
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    out = module.flash_attention(q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5, block_sizes=sizes)
    return out.transpose(0, 2, 1, 3)


def attend(kernel: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attend by the kernel that an option names."""
    kind, _, block = kernel.partition(":")
    if kind == "flash":
        return flash_attention(q, k, v, int(block))
    attention._tpu_block_tokens = lambda *_: attention.Blocks(int(kind), int(block))
    return attention.splash_attention(q, k, v)


def bundles_of(listing: str, num_rows: int, num_blocks: int) -> int:
    """Bundles that a kernel takes on one core over all of its grid.

    A pass of its loop is a step of the grid. Of its conditional parts the largest is the attention of one block, which
    the lower half of the square takes; the others stand at the start and the end of a row of blocks.
    """
    lines = [(int(found[1], 16), found[2], line) for line in listing.splitlines() if (found := LINE.match(line))]
    start = next(index for index, (_, kind, _) in enumerate(lines) if kind == "LB")
    spans = []
    for index, (address, _, line) in enumerate(lines[start:], start):
        if branch := BRANCH.search(line):
            end = re.compile(rf"empty region {branch[1]}\b")
            spans += [(address, to) for to, _, text in lines[index:] if end.search(text)][:1]
    inner = [(a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
    block, *ends = sorted((b - a for a, b in inner), reverse=True)
    fixed = lines[-1][0] - lines[start][0] - block - sum(ends)
    passes = num_blocks**2 * fixed + num_blocks * (num_blocks + 1) // 2 * block + num_blocks * sum(ends)
    return num_rows * passes


def measure(chip: str, shape: str, kernel: str, dump: Path) -> None:
    """Compile one kernel for one chip, and print what libtpu says."""
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
    kernels = sum(
        bundles_of(path.read_text(), B * N, blocks) for path in listings if "_mqa_" in path.name or "flash" in path.name
    )
    mib = compiled.memory_analysis().temp_size_in_bytes / 2**20
    print(f"{chip} {shape} {kernel}: kernels {kernels:,} + around {around:,} cycles, {mib:.1f} MiB", flush=True)
    for path in dump.iterdir():
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chips", nargs="+", choices=list(TOPOLOGIES), default=["v5e"])
    parser.add_argument("--shapes", nargs="+", default=["4x1024x12x12x64"])
    parser.add_argument("--kernels", nargs="+", default=["flash:512", "512:512"])
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={name} --xla_jf_dump_llo_text=true"
        for chip in parsed.chips:
            for shape in parsed.shapes:
                for kernel in parsed.kernels:
                    measure(chip, shape, kernel, Path(name))


if __name__ == "__main__":
    main()
