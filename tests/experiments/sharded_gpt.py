"""Program that prints the difference between a GPT sharded over 8 simulated devices and one device, as JSON.

The argument is the layer loop. The output has one object per mesh: the largest difference over loss, logits and
gradients, and the shapes of all-gathers that hold as many tokens as a batch or a device's share of it.
"""

import functools
import json
import re
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.gpt import GPT, GPTConfig
from runner.train.loss import cross_entropy_sum

MESHES = ((2, 2, 2), (1, 8, 1), (1, 1, 4))
BATCH_SPEC = PartitionSpec(("data", "fsdp"))
RULES = (
    ("batch", ("data", "fsdp")),
    ("embed", "fsdp"),
    ("vocab", "tensor"),
    # A bias has no "embed" axis and may be sharded over fsdp too; a kernel uses fsdp for "embed", which leaves tensor.
    *((name, axes) for name in ("heads", "mlp") for axes in (("tensor", "fsdp"), "tensor")),
)
BATCH, SEQUENCE, VOCABULARY = 8, 144, 96


def main(layer_loop):
    config = GPTConfig(layers=2, heads=4, width=32, layer_loop=layer_loop)
    model = GPT(config, VOCABULARY, SEQUENCE)
    x_BxT = jax.random.randint(jax.random.key(1), (BATCH, SEQUENCE), 0, VOCABULARY)
    boxed = jax.jit(functools.partial(model.init, deterministic=True))(jax.random.key(0), x_BxT)
    params = nn.unbox(boxed)

    def loss(params, x_BxT):
        logits_BxTxV = model.apply(params, x_BxT, deterministic=True)
        return cross_entropy_sum(logits_BxTxV, x_BxT, jnp.ones(x_BxT.shape))[0] / x_BxT.size, logits_BxTxV

    def values(function, params):
        (loss, logits_BxTxV), gradient = function(params, x_BxT)
        return [np.asarray(leaf) for leaf in jax.tree.leaves((loss, logits_BxTxV, gradient))]

    grad = jax.value_and_grad(loss, has_aux=True)
    expected = values(jax.jit(grad), params)
    results = []
    for shape in MESHES:
        devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
        mesh = Mesh(devices, ("data", "fsdp", "tensor"))
        with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
            shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, RULES)
            batch_sharding = NamedSharding(mesh, BATCH_SPEC)
            jitted = jax.jit(grad, in_shardings=(shardings, batch_sharding), out_shardings=(None, shardings))
            compiled = jitted.lower(params, x_BxT).compile()
            actual = values(jitted, params)
        gathers = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", compiled.as_text())
        token_counts = {SEQUENCE * rows for rows in range(1, BATCH + 1)}
        results.append(
            {
                "mesh": shape,
                "difference": max(float(abs(a - b).max()) for a, b in zip(actual, expected, strict=True)),
                "gathers": len(gathers),
                "gathered_activations": [
                    dimensions
                    for dimensions in gathers
                    if token_counts.intersection(map(int, dimensions.split(","))) and dimensions != f"{SEQUENCE},32"
                ],
            }
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
