"""Program that compiles single ops with libtpu and prints their forecast as JSON.

    python -m tests.plan.forecast.tpu_op

Name -> estimate over roofline, and FLOPs of its matmuls.
"""

import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from runner.accelerator import parse_accelerator
from runner.plan.forecast import compute_forecast
from runner.plan.profile import get_device_rates
from runner.plan.program import open_machine

Shape = tuple[int, ...]
BF16, F32 = jnp.bfloat16, jnp.float32


def _layer_norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


# Function, shapes and type of the arguments of each op.
OPS: dict[str, tuple[Callable[..., jax.Array], tuple[Shape, ...], jnp.dtype]] = {
    "matmul 4096": (lambda a, b: a @ b, ((4096, 4096), (4096, 4096)), BF16),
    "matmul 8192 x 4096 x 16384": (lambda a, b: a @ b, ((8192, 4096), (4096, 16384)), BF16),
    "matmul 16384 x 768 x 3072": (lambda a, b: a @ b, ((16384, 768), (768, 3072)), BF16),
    "heads": (lambda x, w: jnp.einsum("btd,dnh->bnth", x, w), ((16, 1024, 768), (768, 12, 64)), BF16),
    "scores": (lambda q, k: jnp.einsum("bnth,bnsh->bnts", q, k), ((4, 12, 1024, 64), (4, 12, 1024, 64)), BF16),
    "add float32": (lambda a, b: a + b, ((8192, 8192), (8192, 8192)), F32),
    "add": (lambda a, b: a + b, ((16384, 4096), (16384, 4096)), BF16),
    "gelu": (jax.nn.gelu, ((16384, 3072),), BF16),
    "layer norm": (_layer_norm, ((16384, 768),), BF16),
    "transpose": (lambda x: x.swapaxes(1, 2) + 0, ((16, 1024, 12, 128),), BF16),
}


def main() -> None:
    """Compile all ops and print the result."""
    machine = open_machine(parse_accelerator("v5e-4"))
    rates = get_device_rates(machine, {"data": 1})
    assert rates is not None
    result = {}
    for name, (do, shapes, dtype) in OPS.items():
        sharding = SingleDeviceSharding(machine.devices[0])
        arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes]
        text = jax.jit(do).trace(*arrays).lower(lowering_platforms=("tpu",)).compile().as_text()
        assert text is not None
        found = compute_forecast(text, {"data": 1}, rates)
        result[name] = {"ratio": found.high / found.low, "flops": found.flops, "low": found.low}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
