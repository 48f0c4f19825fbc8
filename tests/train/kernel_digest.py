"""Digests of a TPU kernel at two places of its source file, and of another kernel; run by `test_programs`."""

import json
import os

os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from runner.train.compile import compute_program_digest

SOURCE = """
def kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2.0
"""


def main() -> None:
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=SingleDeviceSharding(device))
    lowered = []
    for source in (SOURCE, f"\n# A comment.\n{SOURCE}", SOURCE.replace("2.0", "3.0")):
        names: dict = {}
        exec(compile(source, "kernel.py", "exec"), names)
        call = pl.pallas_call(names["kernel"], out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
        lowered.append(jax.jit(call).lower(x))
    digests = [compute_program_digest(each) for each in lowered]
    print(json.dumps({"texts": len({each.as_text() for each in lowered}), "digests": digests}))


if __name__ == "__main__":
    main()
