"""FLOPs, memory and communication of a train step, by formula or counted in a traced program. Pure.

Only matmuls and convolutions count; a multiply and an add are two FLOPs. The FLOPs of a model are those of one forward
pass and of a backward pass of twice as many. Recomputation (activation checkpointing) is stated separately. `Sizing`
has the memory and communication per token, for plans, which cannot compile every candidate.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from runner.accelerator import PeakRates, find_chip
from runner.config import MatmulType, MemoryConfig
from runner.data import Fields
from runner.train.setup import TrainSetup
from runner.train.state import bind_variables, get_variables
from runner.train.weights import get_model_state

CALLS = (  # primitives that run the program inside them once
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
_KERNEL_PREFIXES = ("pallas_call", "ffi_call", "dot_product_attention_", "ragged_dot")


@dataclass(frozen=True)
class Flops:
    """FLOPs of a train step for one token, or for one example where the data are arrays."""

    per_token: float  # FLOPs of the forward and backward pass, each operation once
    recomputed_per_token: float  # FLOPs of operations that are repeated because their results were not kept
    formula: str  # derivation of `per_token`, with the terms and their values
    quantised_per_token: float = 0.0  # part of `per_token` whose operands have 8 bits
    quantised_recomputed_per_token: float = 0.0  # such a part of `recomputed_per_token`
    matmul: MatmulType = "compute"  # type of these operands, as `precision.matmul` names it

    def convert_to_bfloat16(self, speeds: PeakRates) -> "Flops":
        """Return the FLOPs in bfloat16 that take the same time on a chip with these peak rates."""
        saved = 1 - speeds.flops_per_second / (speeds.get_matmul_rate(self.matmul) or speeds.flops_per_second)
        return Flops(
            self.per_token - saved * self.quantised_per_token,
            self.recomputed_per_token - saved * self.quantised_recomputed_per_token,
            self.formula,
        )


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
    is_attention_saved: bool = False,
    state_flops: float = 0,
    matmul: MatmulType = "compute",
    quantised_parameters: float = 0,
) -> Flops:
    """Compute the FLOPs of a decoder: 6 per matmul parameter, 12 per attended key and unit of attention width.

    A parameter costs one multiply and one add in each of three passes (Kaplan et al., 2020); a key costs as much for
    its score and for its value. Embedding lookups are not counted. `remat` determines what a layer recomputes; the last
    matmul of the layer is not repeated, since no gradient needs its result.

    Args:
        layers: number of transformer layers.
        layer_parameters: parameters of one layer's dense matmuls, or the mean if layers differ.
        output_parameters: parameters of the matmul that makes logits, tied or not.
        attention_width: query heads times their width, however many heads of keys and values they share.
        value_width: query heads times the width of values; None: the same.
        attended_keys: keys that a query attends to on average; half of the sequence if it is causal, which for several
            documents per sequence is an upper bound.
        remat: activations that are kept of a layer: all, the results of its dense matmuls, or its input.
        last_parameters: parameters of the last matmul of a layer.
        is_attention_recomputed: True if attention itself computes its scores again in the backward pass.
        is_attention_saved: True if `remat: dots` keeps the results of attention too.
        state_flops: FLOPs of a token for the state of linear attention, in one forward pass; the mean over layers. It
            is recomputed in the backward pass.
        matmul: type of the operands of quantised matmuls.
        quantised_parameters: part of `layer_parameters` whose matmuls are quantised unless `matmul` is `compute`: in
            the forward pass and for the gradient of their input.
    """
    score = 2 * attention_width  # FLOPs of one key's scores over all heads
    value = score if value_width is None else 2 * value_width  # of its weighted values
    matmuls = 6 * (layers * layer_parameters + output_parameters)
    per_token = matmuls + 3 * layers * ((score + value) * attended_keys + state_flops)
    is_repeated = remat == "layers" or (remat == "dots" and not is_attention_saved)
    attention = (score + value) * is_repeated + score * is_attention_recomputed
    again = 2 * (layer_parameters - last_parameters) if remat == "layers" else 0
    states = state_flops * (1 if remat == "none" else 2)
    recomputed = layers * (again + attention * attended_keys + states)
    formula = (
        f"6 x ({layers} layers x {layer_parameters:,.0f} matmul parameters + {output_parameters:,} of the output "
        f"matmul) + 12 x {layers} layers x {(score + value) / 4:,.0f} wide x {attended_keys:,g} keys a query "
        f"{f'+ 3 x {layers} layers x {state_flops:,.0f} of linear attention ' if state_flops else ''}"
        f"= {per_token:,.0f}, lookups not counted"
    )
    if matmul == "compute":
        return Flops(per_token, recomputed, formula)
    # Attention and a layer's last matmul are not repeated in 8 bits.
    quantised_again = max(again - 2 * (layer_parameters - quantised_parameters), 0)
    return Flops(
        per_token, recomputed, formula, 4 * layers * quantised_parameters, layers * quantised_again, matmul=matmul
    )


def count_train_flops(loss: Callable[..., jax.Array], params: Any, *args: Any, num_tokens: int, platform: str) -> Flops:
    """Count the FLOPs of a train step with the forward pass `loss(params, *args)`, in its traced program.

    Arguments may be abstract. The model's FLOPs are three times those of the forward pass; any further FLOPs of the
    gradient's program are recomputation.
    """
    # The backward pass costs twice the forward pass: a matmul for each of the two operands' gradients.
    forward = count_matmul_flops(jax.make_jaxpr(loss)(params, *args), platform=platform)
    executed = count_matmul_flops(jax.make_jaxpr(jax.value_and_grad(loss))(params, *args), platform=platform)
    formula = (
        f"3 x {forward / num_tokens:,.0f} of the forward pass's matmuls, counted in the program traced for {platform}"
    )
    return Flops(3 * forward / num_tokens, max(executed - 3 * forward, 0) / num_tokens, formula)


def count_matmul_flops(jaxpr: Jaxpr | ClosedJaxpr, *, platform: str) -> int:
    """Count the FLOPs of every matmul and convolution in a (closed) jaxpr, over all devices.

    The body of a loop counts once per iteration. Of several branches, the most expensive one counts; of variants for
    several platforms (`lax.platform_dependent`), that of `platform`. Raises `ValueError` for what cannot be counted:
    matmuls in a loop of unknown length, and kernels without a cost estimate.
    """
    return sum(_count_equation_flops(equation, platform) for equation in jaxpr.eqns)


def _count_equation_flops(equation: Any, platform: str) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval
        features = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        return 2 * equation.outvars[0].aval.size * (kernel.size // features)
    if name.startswith(_KERNEL_PREFIXES):
        estimate = params.get("cost_estimate")
        if estimate is None:
            raise ValueError(f"the kernel {name} does not say how many FLOPs it takes; use a formula")
        return int(estimate.flops)
    # Only one branch runs, and which one is unknown, so the most expensive one counts.
    if name == "cond":
        branches, platforms = params["branches"], params.get("branches_platforms")
        if platforms is not None:
            chosen = [index for index, names in enumerate(platforms) if names is None or platform in names]
            branches = [branches[chosen[0]]]
        return max(count_matmul_flops(branch, platform=platform) for branch in branches)
    values = [item for value in params.values() for item in (value if isinstance(value, tuple | list) else [value])]
    programs = [item for item in values if isinstance(item, Jaxpr | ClosedJaxpr)]
    flops = sum(count_matmul_flops(program, platform=platform) for program in programs)
    return flops * _count_runs(name, params) if flops else 0


def _count_runs(name: str, params: dict[str, Any]) -> int:
    """Return how often an operation runs the program inside it, over all devices."""
    if name == "scan":
        return int(params["length"])
    if name == "shard_map":
        axes = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
        return math.prod(params["mesh"].shape[axis] for axis in axes)
    if name in CALLS:
        return 1
    raise ValueError(f"cannot tell how often {name} runs the matmuls inside it; use a formula")


def count_forward_flops(
    forward: Callable[..., Any], train_setup: TrainSetup, fields: Fields, units_per_example: int
) -> Flops:
    """Count the FLOPs of a train step in the traced `forward`, for one token, or one example if that is the unit.

    `fields` are the arrays of a batch by name. Raises `ValueError` for kernels that cannot be counted.
    """
    abstract = train_setup.abstract_state
    # Shapes without shardings, since the count is of the global program.
    state = get_model_state(abstract).params, get_variables(abstract)
    params, variables = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    batch = {name: jax.ShapeDtypeStruct((1, *field.shape), field.dtype) for name, field in fields.items()}
    batch["example"] = jax.ShapeDtypeStruct((1,), jnp.int32)

    def loss(params: Any, variables: Any, batch: Any) -> jax.Array:
        return forward(bind_variables(abstract.apply_fn, variables), params, batch, None)[0]

    return count_train_flops(loss, params, variables, batch, num_tokens=units_per_example, platform="cpu")


def compute_mfu_per_token_rate(flops_per_token: Callable[[TrainSetup], Flops], train_setup: TrainSetup) -> float:
    """Return the MFU (model FLOPs over the devices' peak) of one token per second; 0 if the peak is unknown.

    FLOPs in 8 bits are related to the peak in 8 bits. Where the data are arrays, return the MFU of one example per
    second.
    """
    mesh = train_setup.mesh
    chip = find_chip(mesh.devices.flat[0].device_kind)
    if chip is None or chip.speeds is None:
        return 0.0
    num_chips = mesh.size / chip.devices_per_chip
    try:
        flops = flops_per_token(train_setup).convert_to_bfloat16(chip.speeds)
        return flops.per_token / (num_chips * chip.speeds.flops_per_second)
    except ValueError:  # a kernel without a cost estimate
        return 0.0


@dataclass(frozen=True)
class Sizing:
    """Memory and communication of a device, per token of its own part of a sequence, in every micro-batch."""

    activation_bytes_per_token: float = 0.0  # activations kept for the backward pass
    # All-gathered output head (the matrix that makes logits) and its gradient on a device; not per token.
    head_bytes: float = 0.0
    # Arrays that are all-gathered before and reduce-scattered after tensor-parallel matmuls, forward and backward;
    # an array that is both counts once.
    tensor_bytes_per_token: float = 0.0
    # Keys and values that go to the devices which share a sequence (context parallelism), and their gradients.
    sequence_bytes_per_token: float = 0.0
    expert_bytes_per_token: float = 0.0  # tokens on their way to experts and back (all-to-all), forward and backward
    num_experts: int = 1  # experts of a layer, over which `expert` can shard; 1 without experts
    expert_parameters: int = 0  # of all experts
    can_shard_sequences: bool = True

    def get_shardable_length(self, sequence_length: int) -> int:
        """Return the positions of a sequence that `sequence` can shard: 1 if it cannot shard them."""
        return sequence_length if self.can_shard_sequences else 1


@dataclass(frozen=True)
class ExpertSizing:
    """Experts of a decoder."""

    num_experts: int  # of a layer
    experts_per_token: int
    layers: int  # those with experts
    parameters: int  # of one expert
    journeys: float  # transfers of a token to one of its experts or back, forward and backward


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
    working_bytes: float = 0,
    predictions: int = 1,
    can_shard_sequences: bool = True,
) -> Sizing:
    """Compute the sizes of a decoder: activations kept by layers, logits that exist at the same time, and traffic.

    Args:
        layers: number of transformer layers.
        width: width of the residual stream, which is the input of a layer.
        output_width: vocabulary size.
        sequence_length: tokens of a sequence.
        itemsize: bytes of an activation.
        memory: memory section of the config.
        sizes: devices by axis of the mesh.
        kept: activations of a token that a layer keeps if it keeps all, and needs while it is recomputed.
        kept_of_dots: activations that it keeps with `remat: dots`.
        keys_and_values: width of all heads of keys and of values together.
        experts: experts of the decoder.
        working_bytes: further bytes of a token that exist while one layer is computed.
        predictions: positions that each token predicts, whose logits exist together unless the loss is chunked.
        can_shard_sequences: True if `sequence` can shard the positions of a sequence.
    """
    tensor, own_positions = sizes["tensor"], sequence_length / sizes["sequence"]
    kept_of_layer = {"none": kept, "dots": kept_of_dots, "layers": width / tensor}[memory.remat]
    at_once = min(memory.loss_chunk_positions or own_positions, own_positions)
    is_chunked = memory.loss_chunk_positions is not None  # then the gradient is accumulated in float32
    sets = 1 if is_chunked else predictions
    logits = sets * output_width * (itemsize + 4) * at_once / own_positions / tensor
    is_recomputed = memory.remat != "none"
    reductions = 6 if memory.remat == "layers" else 4  # one for attention and one for the MLP, in each pass
    rounds = 3 + is_recomputed  # keys and values forward and backward, and their gradients
    journeys = experts.journeys + 2 * is_recomputed  # a recomputed layer sends tokens there and back once more
    return Sizing(
        activation_bytes_per_token=itemsize * (layers * kept_of_layer + kept) + working_bytes + logits,
        head_bytes=output_width * width * (itemsize + (4 if is_chunked else itemsize)) / tensor,
        tensor_bytes_per_token=reductions * layers * width * itemsize,
        sequence_bytes_per_token=rounds * layers * keys_and_values * itemsize / tensor,
        expert_bytes_per_token=journeys * experts.layers * experts.experts_per_token * width * itemsize,
        num_experts=experts.num_experts,
        expert_parameters=experts.layers * experts.num_experts * experts.parameters,
        can_shard_sequences=can_shard_sequences,
    )


def list_memory_choices(sequence_length: int) -> dict[str, tuple[Any, ...]]:
    """Return the values by dotted key of a decoder's memory options: activation checkpointing and chunked loss."""
    chunk = max(size for size in range(1, 513) if sequence_length % size == 0)
    return {
        "config.memory.remat": ("none", "dots", "layers"),
        "config.memory.loss_chunk_positions": (None, chunk),
    }
