"""Program that compiles attention with its gradients for one kind of TPU and prints the outcome as JSON.

    python -m tests.experiments.model.tpu_kernel v5e-4

It maps each case to the selected implementation, and to the message of the compiler if it refused. It runs in a
separate process, because libtpu stays with the process that loads it.
"""

import functools
import itertools
import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from experiments.model import attention
from experiments.model.context_layout import AttentionInputs, AttentionOptions
from experiments.model.rotary import Rope, rotation_at
from runner.accelerator import parse_accelerator
from runner.parallel.mesh import make_mesh, use_sharding_rules
from runner.plan.program import open_machine

HEADS = [
    *((4, 2, *widths) for widths in [(8, 8), (32, 32), (64, 64), (64, 32), (80, 80), (96, 96)]),
    *((4, 2, *widths) for widths in [(128, 128), (192, 128), (256, 256)]),
    # Packed heads, and no sinks.
    (4, 4, 64, 64),
    (8, 2, 64, 64),
    (16, 4, 32, 32),
]
LENGTHS = [128, 1000, 4096, "the tightest"]
DTYPES = [jnp.bfloat16, jnp.float32]
PLAIN, ALL = "plain", "segments, window, soft-cap"


def find_tightest_length(N: int, H: int, W: int, dtype: DTypeLike) -> int:
    """Return the sequence length that leaves our kernels the least VMEM."""
    left = {}
    for T in range(128, 20_000, 128):
        q, v = (jax.ShapeDtypeStruct((1, T, N, width), dtype) for width in (H, W))
        if block := attention._fused_block_tokens(q, v):
            left[T] = attention._fused_bytes_left(block, q, v)
    return min(left, key=left.__getitem__)


def main() -> None:
    """Compile all cases and print the result."""
    machine = open_machine(parse_accelerator(sys.argv[1]))
    mesh = make_mesh({"data": 1}, machine.devices[:1])
    result = {}
    array = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    for (N, K, H, W), length, dtype, options in itertools.product(HEADS, LENGTHS, DTYPES, (PLAIN, ALL)):
        with use_sharding_rules(mesh):
            T = length if isinstance(length, int) else find_tightest_length(N, H, W, dtype)
        q, k, v, g = (array((1, T, n, width), dtype) for n, width in ((N, H), (K, H), (K, W), (N, W)))
        ids = [array((1, T), jnp.int32)] if options == ALL else []
        sinks = [array((N,), dtype)] if options == ALL and (N, K) == (4, 2) else []
        chosen = {"window": T // 3, "softcap": 30.0} if options == ALL else {}

        def step(q, k, v, g, sinks, *ids, T=T, H=H, chosen=chosen):
            rotation = rotation_at(jnp.arange(T)[None], Rope(), H)
            attend = functools.partial(attention.causal_attention, **chosen)

            def run(q, k, v, *sinks):
                return attend(q, k, v, *(ids or [None]), rotation, sinks_N=sinks[0] if sinks else None)

            out, pullback = jax.vjp(run, q, k, v, *sinks)
            return out, *pullback(g)

        with use_sharding_rules(mesh):
            form = attention.select_implementation(
                "tpu", AttentionInputs(q, k, v, *ids), AttentionOptions(softcap=chosen.get("softcap"))
            )
            try:
                jax.jit(step).trace(q, k, v, g, sinks, *ids).lower(lowering_platforms=("tpu",)).compile()
                said = ""
            except jax.errors.JaxRuntimeError as error:
                said = str(error)[:500]
        name = f"{N} and {K} heads, {H} and {W} wide, {T} long, {jnp.dtype(dtype).name}, {options}"
        result[name] = (form.attend.__name__, said)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
