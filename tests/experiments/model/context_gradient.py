"""Program that prints the collectives that reduce the gradients of gathered keys on a TPU, as JSON.

It runs in a separate process, because libtpu stays with the process that loads it.

python -m tests.experiments.model.context_gradient     prints the kinds of collectives
"""

import functools
import json

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from experiments.model.context_layout import AttentionOptions, SequenceLayout
from experiments.model.ring_attention import scatter_gradients
from runner.accelerator import parse_accelerator
from runner.parallel.mesh import make_mesh
from runner.plan.forecast.collectives import find_collectives
from runner.plan.program import open_machine

SIZES = {"data": 8, "fsdp": 2, "sequence": 16}
B, T, K, H = 2, 131_072, 8, 128


def main() -> None:
    rows = SequenceLayout(
        T, SIZES["sequence"], "sequence", PartitionSpec(), "gather", AttentionOptions(), 1.0, 512, True
    )
    mesh = make_mesh(SIZES, open_machine(parse_accelerator("v5p-256")).devices)
    whole = jax.ShapeDtypeStruct((B, K, T, H), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))

    def on_device(g_BxKxTxH: jax.Array) -> jax.Array:  # as the kernel computes them
        return scatter_gradients(rows, jnp.sin(g_BxKxTxH).transpose(0, 2, 1, 3)) + 1

    run = functools.partial(jax.shard_map, in_specs=PartitionSpec(), out_specs=PartitionSpec(None, "sequence"))
    with jax.set_mesh(mesh):
        text = jax.jit(run(on_device, check_vma=False)).lower(whole).compile().as_text() or ""
    found = find_collectives(text, {axis: int(size) for axis, size in mesh.shape.items()})
    print(json.dumps([one.kind for one in found]))


if __name__ == "__main__":
    main()
