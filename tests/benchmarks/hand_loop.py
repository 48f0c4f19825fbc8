"""Baseline: GPT-2 train steps hand-written in plain JAX, optimised for CPUs.

Float32; forward, backward, global-norm clipping at 1.0, AdamW with decoupled weight decay on matrices; donated state.
Tokens are random, since only time is measured. Other benchmarks use `make_hand_step`; as a program, the module prints
the median and minimum seconds of a step for each size and layer loop:

    python -m tests.benchmarks.hand_loop [--sizes 10M 124M] [--layer-loops scan unroll] [--steps 10]

The optimisations, each measured against its alternatives:

1. batch and sequence are flattened before every matmul, so that each is two-dimensional;
2. attention processes blocks of queries, each with only the keys that it may attend to;
3. layer norm, GELU and attention save only their inputs for the backward pass and recompute the rest. With scanned
   layers, this avoids writing and reading stacks of intermediates, a sixth of the step; for unrolled layers the
   compiler does it automatically.

Shape legend: B batch, T sequence, V vocabulary, D width, N heads, H width of a head, Q queries and S keys
of a block.
"""

import argparse
import functools
import math
import statistics
import time
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Params = Any
LayerLoop = Literal["scan", "unroll"]

LEARNING_RATE, B1, B2, EPSILON, WEIGHT_DECAY, CLIP_NORM = 1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0
MIN_BLOCK_TOKENS, MAX_BLOCKS = 64, 8


class Size(NamedTuple):
    """Sizes of a model and its batch."""

    layers: int
    heads: int
    width: int
    sequence_length: int
    batch_examples: int
    vocabulary_size: int


class State(NamedTuple):
    """Train state."""

    params: Params
    first_moment: Params
    second_moment: Params
    step: jax.Array


SIZES = {
    "SMALL": Size(layers=4, heads=4, width=128, sequence_length=64, batch_examples=32, vocabulary_size=256),
    "10M": Size(layers=6, heads=6, width=384, sequence_length=256, batch_examples=8, vocabulary_size=256),
    "124M": Size(layers=12, heads=12, width=768, sequence_length=512, batch_examples=2, vocabulary_size=50304),
}

recompute = functools.partial(jax.checkpoint, prevent_cse=False)


def make_hand_step(size: Size, layer_loop: LayerLoop) -> tuple[jax.stages.Wrapped, State, jax.Array, jax.Array]:
    """Return a jitted `step(state, x, y) -> (state, loss)`, a first state (which the step consumes), x and y."""
    tokens_BxT1 = jax.random.randint(
        jax.random.key(1), (size.batch_examples, size.sequence_length + 1), 0, size.vocabulary_size
    )
    step = jax.jit(functools.partial(train_step, heads=size.heads), donate_argnums=0)
    return step, init_state(size, layer_loop), tokens_BxT1[:, :-1], tokens_BxT1[:, 1:]


def init_state(size: Size, layer_loop: LayerLoop) -> State:
    """Return GPT-2's initialisation: one tree of stacked layers to scan, or a list of trees to unroll."""
    D = size.width
    keys = iter(jax.random.split(jax.random.key(0), 2 + 6 * size.layers))
    normal = lambda shape, scale=1.0: 0.02 * scale * jax.random.normal(next(keys), shape)  # noqa: E731
    norm = lambda: {"scale": jnp.ones(D), "bias": jnp.zeros(D)}  # noqa: E731

    def dense(inputs: int, outputs: int, scale: float = 1.0) -> Params:
        return {"kernel": normal((inputs, outputs), scale), "bias": jnp.zeros(outputs)}

    residual_scale = 1 / math.sqrt(2 * size.layers)
    layers: Any = [
        {
            "attention_norm": norm(),
            "query": dense(D, D),
            "key": dense(D, D),
            "value": dense(D, D),
            "attention_out": dense(D, D, residual_scale),
            "mlp_norm": norm(),
            "mlp_in": dense(D, 4 * D),
            "mlp_out": dense(4 * D, D, residual_scale),
        }
        for _ in range(size.layers)
    ]
    if layer_loop == "scan":
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    params = {
        "embedding": normal((size.vocabulary_size, D)),
        "positions": normal((size.sequence_length, D)),
        "layers": layers,
        "final_norm": norm(),
    }
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    return State(params, zeros(params), zeros(params), jnp.zeros((), jnp.int32))


def train_step(state: State, x_BxT: jax.Array, y_BxT: jax.Array, *, heads: int) -> tuple[State, jax.Array]:
    """Take one AdamW step on the mean cross entropy."""
    loss, gradient = jax.value_and_grad(mean_loss)(state.params, x_BxT, y_BxT, heads)
    grad_norm = jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(gradient)))
    clip = jnp.minimum(1.0, CLIP_NORM / grad_norm)
    step = state.step + 1
    correction_1, correction_2 = 1 - B1 ** step.astype(jnp.float32), 1 - B2 ** step.astype(jnp.float32)

    def update(path: Any, w: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        m = B1 * m + (1 - B1) * clip * g
        v = B2 * v + (1 - B2) * (clip * g) ** 2
        direction = (m / correction_1) / (jnp.sqrt(v / correction_2) + EPSILON)
        if path[-1].key in ("kernel", "embedding", "positions"):
            direction += WEIGHT_DECAY * w
        return w - LEARNING_RATE * direction, m, v

    updated = jax.tree_util.tree_map_with_path(update, state.params, state.first_moment, state.second_moment, gradient)
    outer, inner = jax.tree.structure(state.params), jax.tree.structure((0, 0, 0))
    params, first_moment, second_moment = jax.tree.transpose(outer, inner, updated)
    return State(params, first_moment, second_moment, step), loss


def mean_loss(params: Params, x_BxT: jax.Array, y_BxT: jax.Array, heads: int) -> jax.Array:
    """Return the mean cross entropy over all tokens, which are on one flat axis throughout."""
    B, T = x_BxT.shape
    x_BTxD = params["embedding"][x_BxT.reshape(B * T)] + jnp.tile(params["positions"], (B, 1))
    apply_layer = functools.partial(layer, batch=B, heads=heads)
    if isinstance(params["layers"], list):
        for weights in params["layers"]:
            x_BTxD = apply_layer(x_BTxD, weights)
    else:
        x_BTxD, _ = jax.lax.scan(lambda x_BTxD, weights: (apply_layer(x_BTxD, weights), None), x_BTxD, params["layers"])
    logits_BTxV = layer_norm(x_BTxD, params["final_norm"]) @ params["embedding"].T
    label_logits_BT = jnp.take_along_axis(logits_BTxV, y_BxT.reshape(B * T, 1), axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits_BTxV, axis=1) - label_logits_BT)


def layer(x_BTxD: jax.Array, weights: Params, *, batch: int, heads: int) -> jax.Array:
    """Apply one pre-LayerNorm block."""
    h_BTxD = layer_norm(x_BTxD, weights["attention_norm"])
    qkv_BTxD = (dense(h_BTxD, weights[name]) for name in ("query", "key", "value"))
    x_BTxD += dense(attention(*qkv_BTxD, batch, heads), weights["attention_out"])
    h_BTxD = layer_norm(x_BTxD, weights["mlp_norm"])
    return x_BTxD + dense(gelu(dense(h_BTxD, weights["mlp_in"])), weights["mlp_out"])


def dense(x_BTxI: jax.Array, weights: Params) -> jax.Array:
    """Apply a linear layer."""
    return x_BTxI @ weights["kernel"] + weights["bias"]


@recompute
def gelu(x: jax.Array) -> jax.Array:
    """Apply GELU in its tanh approximation."""
    return jax.nn.gelu(x, approximate=True)


@recompute
def layer_norm(x_BTxD: jax.Array, weights: Params) -> jax.Array:
    """Apply layer norm in two passes."""
    centred_BTxD = x_BTxD - x_BTxD.mean(axis=1, keepdims=True)
    variance_BTx1 = jnp.mean(centred_BTxD * centred_BTxD, axis=1, keepdims=True)
    return centred_BTxD * jax.lax.rsqrt(variance_BTx1 + 1e-5) * weights["scale"] + weights["bias"]


@functools.partial(recompute, static_argnums=(3, 4))
def attention(q_BTxD: jax.Array, k_BTxD: jax.Array, v_BTxD: jax.Array, batch: int, heads: int) -> jax.Array:
    """Apply causal attention in blocks of queries."""
    (BT, D), B, N = q_BTxD.shape, batch, heads
    T, H = BT // B, D // N
    q_BxNxTxH, k_BxNxTxH, v_BxNxTxH = (
        x_BTxD.reshape(B, T, N, H).transpose(0, 2, 1, 3) for x_BTxD in (q_BTxD, k_BTxD, v_BTxD)
    )
    block_tokens = max(MIN_BLOCK_TOKENS, T // MAX_BLOCKS)
    blocks = []
    for start in range(0, T, block_tokens):
        stop = start + block_tokens
        scores_BxNxQxS = jnp.einsum("bnqh,bnsh->bnqs", q_BxNxTxH[:, :, start:stop], k_BxNxTxH[:, :, :stop])
        visible_QxS = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
        scores_BxNxQxS = jnp.where(visible_QxS, scores_BxNxQxS / math.sqrt(H), -jnp.inf)
        weights_BxNxQxS = jax.nn.softmax(scores_BxNxQxS, axis=-1)
        blocks.append(jnp.einsum("bnqs,bnsh->bnqh", weights_BxNxQxS, v_BxNxTxH[:, :, :stop]))
    return jnp.concatenate(blocks, axis=2).transpose(0, 2, 1, 3).reshape(BT, D)


def main() -> None:
    """Print the seconds per step of every size and layer loop; the steps of the loops are interleaved."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--layer-loops", nargs="+", choices=("scan", "unroll"), default=["scan", "unroll"])
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    for name in arguments.sizes:
        loops = {layer_loop: make_hand_step(SIZES[name], layer_loop) for layer_loop in arguments.layer_loops}
        seconds: dict[str, list[float]] = {layer_loop: [] for layer_loop in loops}
        for timed in [False, False] + [True] * arguments.steps:
            for layer_loop, (step, state, x_BxT, y_BxT) in loops.items():
                start = time.perf_counter()
                state, _ = jax.block_until_ready(step(state, x_BxT, y_BxT))
                if timed:
                    seconds[layer_loop].append(time.perf_counter() - start)
                loops[layer_loop] = step, state, x_BxT, y_BxT
        for layer_loop, times in seconds.items():
            print(
                f"{name:5} {layer_loop:7} median {statistics.median(times):.4f} s  least {min(times):.4f} s", flush=True
            )


if __name__ == "__main__":
    main()
