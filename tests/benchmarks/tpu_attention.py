"""What libtpu makes of the fused TPU kernels of attention, ours and both of JAX's, on a machine without a TPU.

Printed, of attention with its gradients: the instruction bundles of its kernels (a cycle each, if nothing waits), which
are counted in libtpu's own listing; the cycles that libtpu estimates for the operations around them; temporary bytes.
The block sizes of `experiments/model/attention.py` rest on this. libtpu serves one process at a time.

    python -m tests.benchmarks.tpu_attention [--chips v5e v5p] [--shapes 4x1024x12x12x64] [--kernels fused:1024 512:512]

A shape is B x T x N x K x H. A kernel is `fused:BLOCK`, which is ours, `COMPUTED:BLOCK` of JAX's splash attention, or
`flash:BLOCK` of its older one.
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
    if kind == "fused":
        attention._fused_block_tokens = lambda *_: int(block)
        return attention.fused_attention(q, k, v)
    attention._splash_block_tokens = lambda *_: attention.BlockSizes(int(kind), int(block))
    return attention.splash_attention(q, k, v)


def parts_of(listing: str) -> tuple[int, list[int]]:
    """Bundles of a pass of a kernel's loop, a step of its grid, and of its conditional parts in their order."""
    lines = [(int(found[1], 16), found[2], line) for line in listing.splitlines() if (found := LINE.match(line))]
    start = next(index for index, (_, kind, _) in enumerate(lines) if kind == "LB")
    spans = []
    for index, (address, _, line) in enumerate(lines[start:], start):
        if branch := BRANCH.search(line):
            end = re.compile(rf"empty region {branch[1]}\b")
            spans += [(address, to) for to, _, text in lines[index:] if end.search(text)][:1]
    inner = [b - a for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]
    return lines[-1][0] - lines[start][0] - sum(inner), inner


def bundles_of(listing: str, num_rows: int, num_blocks: int, is_ours: bool) -> int:
    """Bundles that a kernel takes on one core over all of its grid.

    The largest of its conditional parts are the attention of a block, the others stand at the start and the end of a
    row of blocks. JAX's goes over all of the square, and has one part for the lower half of it. Ours goes over that
    half alone, and has one part for the diagonal, and one for what lies below.
    """
    fixed, parts = parts_of(listing)
    below = num_blocks * (num_blocks - 1) // 2
    sizes = sorted(parts)[-2 if is_ours and below else -1 :]
    ends = num_blocks * (sum(parts) - sum(sizes))
    if not is_ours:
        return num_rows * (num_blocks**2 * fixed + (below + num_blocks) * sizes[0] + ends)
    of_diagonal, *of_others = [part for part in parts if part in sizes]
    return num_rows * ((below + num_blocks) * fixed + num_blocks * of_diagonal + below * sum(of_others) + ends)


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
        bundles_of(path.read_text(), B * N, blocks, "ward_attention" in path.name)
        for path in listings
        if any(word in path.name for word in ("_mqa_", "flash", "ward_attention"))
    )
    mib = compiled.memory_analysis().temp_size_in_bytes / 2**20
    print(f"{chip} {shape} {kernel}: kernels {kernels:,} + around {around:,} cycles, {mib:.1f} MiB", flush=True)
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
