"""How many floating-point operations a train step takes: by formula, and counted in a traced program. Pure.

Only matmuls and convolutions count; a multiply and an add are two. The FLOPs of the model are those of one forward pass
and of a backward pass of twice as many. What is computed again because it was not kept is stated beside them.

What a token costs besides FLOPs, for a plan that cannot compile every way to run a job. Pure; imports no jax.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from runner.accelerator import find_chip
from runner.config import MemoryConfig
from runner.train.lora import merge_adapter
from runner.train.setup import TrainSetup
from runner.train.state import bind_variables, get_variables

CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "checkpoint",
    "remat",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
)
OPAQUE = ("pallas_call", "ffi_call", "dot_product_attention_", "ragged_dot")  # how names of kernels begin


@dataclass(frozen=True)
class Flops:
    """FLOPs that a train step takes for one token."""

    per_token: float  # forward and backward, each operation once
    recomputed_per_token: float  # done once more, because their results were not kept
    formula: str  # how `per_token` comes about, with its terms and their values


def compute_transformer_flops(
    *,
    layers: int,
    layer_parameters: float,
    output_parameters: int,
    attention_width: int,
    value_width: int | None = None,
    attended_keys: float,
    remat: Literal["none", "dots", "layers"] = "none",
    last_parameters: float = 0,
    is_attention_recomputed: bool = True,
) -> Flops:
    """Return the FLOPs of a decoder by formula: 6 a matmul parameter, 12 an attended key and unit of attention's width.

    A parameter takes one multiply and one add in each of three passes (Kaplan et al., 2020); a key as many for its
    score and for its value. Lookups are no matmuls. Of what is computed again, `remat` says what a layer does, and
    `last_parameters` of its last matmul are spared, whose result no gradient needs.

    Args:
        layers: transformer layers.
        layer_parameters: parameters of one layer's dense matmuls, or the mean where layers differ.
        output_parameters: parameters of the matmul that makes logits, tied or not.
        attention_width: query heads times their width, however many heads of keys and values they share.
        value_width: query heads times the width of values; None: the same.
        attended_keys: keys that a query sees on average; half of the row where it is causal, which for rows of several
            documents is an upper bound.
        remat: what is kept of a layer: everything, the results of its dense matmuls, or its input.
        last_parameters: parameters of the matmul at the end of a layer.
        is_attention_recomputed: whether attention itself computes its scores again in the backward pass.
    """
    score = 2 * attention_width  # FLOPs of one key's scores over all heads
    value = score if value_width is None else 2 * value_width  # of its weighted values
    matmuls = 6 * (layers * layer_parameters + output_parameters)
    per_token = matmuls + 3 * layers * (score + value) * attended_keys
    attention = (0 if remat == "none" else score + value) + (score if is_attention_recomputed else 0)
    again = 2 * (layer_parameters - last_parameters) if remat == "layers" else 0
    recomputed = layers * (again + attention * attended_keys)
    formula = (
        f"6 x ({layers} layers x {layer_parameters:,.0f} matmul parameters + {output_parameters:,} of the output "
        f"matmul) + 12 x {layers} layers x {(score + value) / 4:,.0f} wide x {attended_keys:,g} keys a query "
        f"= {per_token:,.0f}, lookups not counted"
    )
    return Flops(per_token, recomputed, formula)


def count_train_flops(loss: Callable[..., jax.Array], params: Any, *args: Any, num_tokens: int, platform: str) -> Flops:
    """Return the FLOPs of a train step whose forward pass is `loss(params, *args)`, by counting in its traced program.

    Arguments may be abstract. The model's FLOPs are three times the forward pass's; what the gradient's program does
    beyond that is computed again.
    """
    forward = count_matmul_flops(jax.make_jaxpr(loss)(params, *args), platform=platform)
    executed = count_matmul_flops(jax.make_jaxpr(jax.value_and_grad(loss))(params, *args), platform=platform)
    formula = (
        f"3 x {forward / num_tokens:,.0f} of the forward pass's matmuls, counted in the program traced for {platform}"
    )
    return Flops(3 * forward / num_tokens, max(executed - 3 * forward, 0) / num_tokens, formula)


def count_matmul_flops(jaxpr: Jaxpr | ClosedJaxpr, *, platform: str) -> int:
    """Count the FLOPs of every matmul and convolution in a (closed) jaxpr, over all devices.

    Loops count as often as they run, of branches the most expensive, and of the forms that a program has for several
    platforms (`lax.platform_dependent`) that of `platform`. Raises `ValueError` for what cannot be counted: matmuls in
    a loop without a known number of rounds, and kernels that give no estimate of their own.
    """
    return sum(_flops_of(equation, platform) for equation in jaxpr.eqns)


def _flops_of(equation: Any, platform: str) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval
        features = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        return 2 * equation.outvars[0].aval.size * (kernel.size // features)
    if name.startswith(OPAQUE):
        estimate = params.get("cost_estimate")
        if estimate is None:
            raise ValueError(f"the kernel {name} does not say how many FLOPs it takes; use a formula")
        return int(estimate.flops)
    if name == "cond":
        return _flops_of_branches(params, platform)
    flops = sum(count_matmul_flops(inner, platform=platform) for inner in _programs_in(params))
    return flops * _rounds(name, params) if flops else 0


def _flops_of_branches(params: dict[str, Any], platform: str) -> int:
    branches, platforms = params["branches"], params.get("branches_platforms")
    if platforms is not None:
        chosen = [index for index, names in enumerate(platforms) if names is None or platform in names]
        branches = [branches[chosen[0]]]
    return max(count_matmul_flops(branch, platform=platform) for branch in branches)


def _programs_in(params: dict[str, Any]) -> Iterator[Jaxpr | ClosedJaxpr]:
    for value in params.values():
        inner = value if isinstance(value, (tuple, list)) else [value]
        yield from (item for item in inner if isinstance(item, (Jaxpr, ClosedJaxpr)))


def _rounds(name: str, params: dict[str, Any]) -> int:
    """How often an operation runs the program inside it."""
    if name == "scan":
        return int(params["length"])
    if name == "shard_map":
        axes = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
        return math.prod(params["mesh"].shape[axis] for axis in axes)
    if name in CALLS:
        return 1
    raise ValueError(f"cannot tell how often {name} runs the matmuls inside it; use a formula")


def count_forward_flops(
    forward: Callable[..., Any], train_setup: TrainSetup, fields: Mapping[str, Any], length: int
) -> Flops:
    """FLOPs of a train step for one token of rows of `length` tokens, counted in the traced `forward`.

    `fields` are the arrays of a batch with their dtypes. Raises `ValueError` for kernels that cannot be counted.
    """
    abstract = train_setup.abstract_state
    state = merge_adapter(abstract).params, get_variables(abstract)
    params, variables = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    batch = {name: jax.ShapeDtypeStruct((1, length), dtype) for name, dtype in fields.items()}
    batch["example"] = jax.ShapeDtypeStruct((1,), jnp.int32)

    def loss(params: Any, variables: Any, batch: Any) -> jax.Array:
        return forward(bind_variables(abstract.apply_fn, variables), params, batch, None)[0]

    return count_train_flops(loss, params, variables, batch, num_tokens=length, platform="cpu")


def compute_mfu_per_token_rate(flops_per_token: Callable[[TrainSetup], Flops], train_setup: TrainSetup) -> float:
    """What each token a second adds to MFU, the model's FLOPs over the devices' peak; 0 if that is not known."""
    mesh = train_setup.mesh
    chip = find_chip(mesh.devices.flat[0].device_kind)
    if chip is None or chip.speeds is None:
        return 0.0
    num_chips = mesh.size / chip.devices_per_chip
    try:
        return flops_per_token(train_setup).per_token / (num_chips * chip.speeds.flops_per_second)
    except ValueError:  # a kernel that does not say what it computes
        return 0.0


@dataclass(frozen=True)
class Sizing:
    """What a device keeps and sends for each token of its own part of a row, in every micro-batch.

    Attributes:
        activation_bytes_per_token: kept for the backward pass.
        head_bytes: of the matrix that makes logits, whole as a device gathers it, and of its gradient; not of a token.
        tensor_bytes_per_token: of the arrays that are gathered before the matmuls that `tensor` cuts, and scattered
            behind them, forward and backward: once where it is both.
        sequence_bytes_per_token: of keys and values that go to the devices which share the row, and of their gradients.
        expert_bytes_per_token: of tokens on their way to experts and back, forward and backward.
        num_experts: of a layer, over which `expert` can cut; 1 where there are none.
        expert_parameters: of all experts that `expert` cuts.
    """

    activation_bytes_per_token: float = 0.0
    head_bytes: float = 0.0
    tensor_bytes_per_token: float = 0.0
    sequence_bytes_per_token: float = 0.0
    expert_bytes_per_token: float = 0.0
    num_experts: int = 1
    expert_parameters: int = 0


@dataclass(frozen=True)
class ExpertSizing:
    """Experts of a decoder: how many a layer has, how many compute a token, in how many layers, and their size.

    Attributes:
        parameters: of one.
        journeys: of a token to one of its experts or back, forward and backward.
    """

    num_experts: int
    experts_per_token: int
    layers: int
    parameters: int
    journeys: float


NO_EXPERTS = ExpertSizing(1, 0, 0, 0, 0)


def compute_transformer_sizing(
    *,
    layers: int,
    width: int,
    output_width: int,
    sequence_length: int,
    itemsize: int,
    memory: MemoryConfig,
    sizes: Mapping[str, int],
    kept: float,
    kept_of_dots: float,
    keys_and_values: int,
    experts: ExpertSizing = NO_EXPERTS,
) -> Sizing:
    """Return the sizes of a decoder by formula: what its layers keep, the logits that exist at once, what is sent.

    Args:
        width: of the residual stream, and of a layer's input.
        output_width: the vocabulary's size.
        itemsize: bytes of an activation.
        sizes: devices by axis of the mesh.
        kept: activations of a token that a layer keeps, and needs while it is computed again, where it keeps all.
        kept_of_dots: those that it keeps with `remat: dots`.
        keys_and_values: width of all heads of keys and of values together.
    """
    tensor, own_positions = sizes["tensor"], sequence_length / sizes["sequence"]
    kept_of_layer = {"none": kept, "dots": kept_of_dots, "layers": width / tensor}[memory.remat]
    at_once = min(memory.loss_chunk_positions or own_positions, own_positions)
    logits = output_width * (itemsize + 4) * at_once / own_positions / tensor
    is_in_chunks = memory.loss_chunk_positions is not None  # then the gradient is added up, in float32
    is_again = memory.remat != "none"
    reductions = 6 if memory.remat == "layers" else 4  # of each layer's attention and MLP, in each pass
    rounds = 3 + is_again  # keys and values forward and backward, and their gradients
    journeys = experts.journeys + 2 * is_again  # computed again there and back once more
    return Sizing(
        activation_bytes_per_token=itemsize * (layers * kept_of_layer + kept) + logits,
        head_bytes=output_width * width * (itemsize + (4 if is_in_chunks else itemsize)) / tensor,
        tensor_bytes_per_token=reductions * layers * width * itemsize,
        sequence_bytes_per_token=rounds * layers * keys_and_values * itemsize / tensor,
        expert_bytes_per_token=journeys * experts.layers * experts.experts_per_token * width * itemsize,
        num_experts=experts.num_experts,
        expert_parameters=experts.layers * experts.num_experts * experts.parameters,
    )


def list_memory_choices(sequence_length: int) -> dict[str, tuple[Any, ...]]:
    """What a search may vary of a decoder's memory: what is kept, and whether the loss is computed in chunks."""
    chunk = max(size for size in range(1, 513) if sequence_length % size == 0)
    return {
        "config.memory.remat": ("none", "dots", "layers"),
        "config.memory.loss_chunk_positions": (None, chunk),
    }
