"""Mixture of experts: router, load balancing and the layer that replaces an MLP.

Everything that could depend on the split of a step into micro-batches, devices and hosts is computed for each sequence
by itself (capacity, auxiliary loss) or is a sum over tokens (counts). Padding is neither routed nor counted. Where
sequences or experts are sharded each device routes its own tokens, and `expert_parallel` sends them to their experts.

Sources: Shazeer et al. 2017 and Fedus et al. 2021 (top-k, auxiliary loss, capacity), Zoph et al. 2022 (router z-loss),
Dai et al. 2024 (fine-grained and shared experts), DeepSeek-V3 2024 (biases instead of a loss, groups of experts).

Shape legend: B batch, T sequence, D width, E experts, K experts of a token, G groups of experts, I experts of a group,
F width of an expert's hidden layer, L layers, M tokens at hand, P slots.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from experiments.model.expert_parallel import (
    Axes,
    ExpertLayer,
    compute_sharded_experts,
    get_token_axes,
    join_matrices,
    make_expert,
)
from experiments.model.grouped_matmul import Multiply, apply_grouped
from experiments.model.layers import (
    INIT_STDDEV,
    Activation,
    GatedMLP,
    activate,
    constrain,
    constrain_stream,
    num_sequence_shards,
    num_shards,
    with_axes,
)
from experiments.model.platform import platform
from experiments.model.quantised import get_matmul_type
from runner.errors import InvalidError
from runner.parallel.mesh import list_axes
from runner.spec import Auto, FrozenModel

BALANCE = "balance"  # the variable collection of the router's biases
Statistics = dict[str, jax.Array]  # of one layer: loss_B, load_E, dropped and entropy; see `MixtureOfExperts`


class MoeConfig(FrozenModel):
    """Experts of a layer, and how tokens are routed to them."""

    experts: PositiveInt = Field(description="Routed experts of a layer.")
    experts_per_token: PositiveInt = Field(description="Routed experts that process a token (top-k).")
    expert_width: PositiveInt | Auto = Field(default="auto", description="Hidden width of one expert; auto: mlp_width.")
    shared_experts: NonNegativeInt = Field(default=0, description="Additional experts that process every token.")
    shared_width: PositiveInt | Auto = Field(
        default="auto", description="Hidden width of one shared expert; auto: expert_width."
    )
    shared_gate: bool = Field(
        default=False, description="Multiply the shared experts' result by the sigmoid of a projection of the token."
    )
    dense_layers: NonNegativeInt = Field(default=0, description="Number of first layers with an MLP instead.")
    beside_mlp: bool = Field(
        default=False,
        description="Layers have an MLP too. Each of the two has norms of its own, and their results are added "
        "(Gemma 4).",
    )
    scaled_router: bool = Field(
        default=False,
        description="The router reads the stream through a norm of its own, divided by the square root of its width, "
        "and a learned number for each expert multiplies its gate after all else (Gemma 4).",
    )
    gate: Literal["softmax", "sigmoid"] = Field(
        default="softmax", description="Function that turns the router's scores into gates."
    )
    bias: bool = Field(default=False, description="Biases of the router's scores and of the routed experts' matmuls.")
    normalise_gates: bool = Field(default=True, description="Divide the gates of a token's experts by their sum.")
    routed_scale: PositiveFloat = Field(default=1.0, description="Factor on the gates after that.")
    groups: PositiveInt = Field(default=1, description="Groups of experts, of equal size.")
    groups_per_token: PositiveInt = Field(
        default=1, description="Number of groups that the experts of a token are chosen from."
    )
    group_score: Literal["top_2", "max"] = Field(
        default="top_2", description="Score of a group: the sum of its two best experts, or its best expert."
    )
    capacity_factor: PositiveFloat | None = Field(
        default=None,
        description="Tokens of one sequence that an expert takes, relative to the mean; later tokens are dropped. "
        "null: no limit.",
    )
    auxiliary_loss: NonNegativeFloat = Field(
        default=0.001, description="Weight of the load-balancing loss of each layer, which is 1 for an even load."
    )
    bias_rate: NonNegativeFloat | None = Field(
        default=None,
        description="Update per step of the biases that steer the choice of experts towards an even load; "
        "null: no biases.",
    )
    router_z_loss: NonNegativeFloat = Field(
        default=0.0, description="Weight of the squared log-denominator of the router's softmax, in each layer."
    )

    @model_validator(mode="after")
    def _validate_experts(self) -> "MoeConfig":
        if not self.shared_experts and (self.shared_gate or self.shared_width != "auto"):
            key = "shared_gate" if self.shared_gate else "shared_width"
            raise ValueError(f"{key} is set, and there are no shared experts; leave it out, or set shared_experts")
        if self.experts % self.groups:
            raise ValueError(f"experts={self.experts} does not divide over groups={self.groups}; use a divisor")
        if self.groups_per_token > self.groups:
            raise ValueError(f"groups_per_token={self.groups_per_token} is more than groups={self.groups}; use fewer")
        most = self.experts // self.groups * self.groups_per_token
        if self.experts_per_token > most:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} is more than the {most} to choose from; use at most {most}"
            )
        if self.group_score == "top_2" and 1 < self.groups == self.experts:
            raise ValueError(
                f"groups={self.groups} leaves one expert to a group, and group_score top_2 needs two; use max"
            )
        return self

    def compute_shared_width(self, expert_width: int) -> int:
        """Return the hidden width of all shared experts together; `expert_width` is that of a routed one."""
        return self.shared_experts * (expert_width if self.shared_width == "auto" else self.shared_width)

    def capacity(self, length: int) -> int:
        """Return the most tokens that an expert takes of a sequence of `length`."""
        if self.capacity_factor is None:
            return length
        return min(length, math.ceil(self.capacity_factor * length * self.experts_per_token / self.experts))


# Routing.


class Routing(NamedTuple):
    """Destination and weights of each token."""

    experts: jax.Array  # (B, T, K)
    weights: jax.Array  # (B, T, K), float32
    is_kept: jax.Array  # (B, T, K), bool: not padding, and within the expert's capacity
    is_chosen: jax.Array  # (B, T, E), bool: chosen by a token that is not padding, dropped or not
    gates: jax.Array  # (B, T, E), float32; the gates of a token add up to 1


def route(
    logits_BxTxE: jax.Array, bias_E: jax.Array | None, real_BxT: jax.Array, config: MoeConfig, axes: Axes = ()
) -> Routing:
    """Choose each token's experts from float32 logits.

    `bias_E` is added to the gates where experts are chosen, and nowhere else. Inside a `shard_map`, `axes` are the mesh
    axes over which sequences are sharded, and the tokens are one shard's.
    """
    if config.gate == "softmax":
        gates_BxTxE = normalised_BxTxE = jax.nn.softmax(logits_BxTxE, axis=-1)
    else:
        gates_BxTxE = jax.nn.sigmoid(logits_BxTxE)
        normalised_BxTxE = gates_BxTxE / (jnp.sum(gates_BxTxE, axis=-1, keepdims=True) + 1e-20)
    # The choice of experts has no gradient; the router learns by the weights of the chosen ones.
    scores_BxTxE = jax.lax.stop_gradient(gates_BxTxE if bias_E is None else gates_BxTxE + bias_E)
    if config.groups_per_token < config.groups:
        # Experts outside a token's best groups cannot be chosen.
        scores_BxTxGxI = scores_BxTxE.reshape(*scores_BxTxE.shape[:2], config.groups, -1)
        best, _ = jax.lax.top_k(scores_BxTxGxI, 2 if config.group_score == "top_2" else 1)
        _, groups = jax.lax.top_k(jnp.sum(best, axis=-1), config.groups_per_token)
        is_best_BxTxG = jnp.any(groups[..., None] == jnp.arange(config.groups), axis=2)
        scores_BxTxE = jnp.where(is_best_BxTxG[..., None], scores_BxTxGxI, -jnp.inf).reshape(scores_BxTxE.shape)
    _, experts_BxTxK = jax.lax.top_k(scores_BxTxE, config.experts_per_token)
    is_expert_BxTxKxE = experts_BxTxK[..., None] == jnp.arange(config.experts)
    # A masked sum in the place of a gather, whose gradient would be a scatter.
    weights_BxTxK = jnp.sum(jnp.where(is_expert_BxTxKxE, gates_BxTxE[:, :, None], 0.0), axis=-1)
    if config.normalise_gates:
        weights_BxTxK /= jnp.sum(weights_BxTxK, axis=-1, keepdims=True) + 1e-20
    is_chosen_BxTxE = jnp.any(is_expert_BxTxKxE, axis=2) & real_BxT[..., None]
    is_kept_BxTxK = jnp.broadcast_to(real_BxT[..., None], experts_BxTxK.shape)
    # Capacity is a number of tokens of the whole sequence, however it is sharded.
    length = logits_BxTxE.shape[1] * (jax.lax.axis_size(axes) if axes else 1)
    if config.capacity(length) < length:
        # In order of position, so that no token is dropped for the sake of a later one.
        place_BxTxE = _count_up_to(is_chosen_BxTxE, axes)
        has_room_BxTxE = place_BxTxE <= config.capacity(length)
        is_kept_BxTxK &= jnp.any(is_expert_BxTxKxE & has_room_BxTxE[:, :, None], axis=-1)
    weights_BxTxK = weights_BxTxK * config.routed_scale
    return Routing(experts_BxTxK, weights_BxTxK, is_kept_BxTxK, is_chosen_BxTxE, normalised_BxTxE)


def _route_per_device(
    logits_BxTxE: jax.Array, bias_E: jax.Array | None, real_BxT: jax.Array, config: MoeConfig
) -> Routing:
    """`route` inside a `shard_map`, where sequences or experts are sharded.

    Each device routes its own tokens and receives only counts from others. The partitioner would all-gather the scores
    of all tokens for the top-k.
    """
    batch, positions = get_token_axes(*real_BxT.shape)
    tokens = PartitionSpec(batch, positions)
    biases = () if bias_E is None else (bias_E,)

    def route_own(logits_BxTxE: jax.Array, real_BxT: jax.Array, *biases: jax.Array) -> Routing:
        return route(logits_BxTxE, biases[0] if biases else None, real_BxT, config, positions)

    in_specs = (tokens, tokens, *[PartitionSpec()] * len(biases))
    routed = jax.shard_map(route_own, in_specs=in_specs, out_specs=tokens, check_vma=False)
    return routed(logits_BxTxE, real_BxT, *biases)


def _count_up_to(is_chosen_BxTxE: jax.Array, axes: Axes) -> jax.Array:
    """Return how many tokens of the whole sequence have chosen each expert, up to and with each position."""
    place_BxTxE = jnp.cumsum(is_chosen_BxTxE, axis=1, dtype=jnp.int32)
    if not axes:
        return place_BxTxE
    totals_SxBxE = jax.lax.all_gather(place_BxTxE[:, -1], axes)  # S shards of the sequence
    is_before_S = jnp.arange(totals_SxBxE.shape[0]) < jax.lax.axis_index(axes)
    return place_BxTxE + jnp.sum(jnp.where(is_before_S[:, None, None], totals_SxBxE, 0), axis=0)[:, None]


# The layer.


class MixtureOfExperts(nn.Module):
    """Routed and shared experts in the place of an MLP. Matrices of experts are stacked, with experts first.

    With `bias_rate` the variable `bias` (E) of the collection `balance` is added to the gates where experts are chosen,
    and nowhere else. It gets no gradient; `update_biases` computes its next value after a step.
    """

    config: MoeConfig
    expert_width: int
    activation: Activation = "swiglu"
    out_stddev: float = INIT_STDDEV
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, real_BxT: jax.Array, router_input_BxTxD: jax.Array | None = None
    ) -> tuple[jax.Array, Statistics]:
        """Return the output (B, T, D) and statistics of the tokens that are `real`.

        Args:
            x_BxTxD: input.
            real_BxT: True for tokens that are not padding.
            router_input_BxTxD: input of the router; None: the same.

        Returns:
            The output, and a dictionary. `loss_B`: for each sequence the weighted auxiliary loss plus the weighted
            router z-loss, means over its tokens. `load_E`: assignments to each expert, int32. `dropped`: assignments
            beyond an expert's capacity, int32. `entropy`: of the gates in nats, summed over tokens.
        """
        config, D = self.config, x_BxTxD.shape[-1]
        validate_expert_sharding(config.experts)
        router_DxE = self._param("router", INIT_STDDEV, (D, config.experts), ("embed", "expert"))
        router_DxE = _replicate(router_DxE)
        # In float32: rounding could change which expert is chosen.
        routed_BxTxD = (x_BxTxD if router_input_BxTxD is None else router_input_BxTxD).astype(jnp.float32)
        logits_BxTxE = jnp.einsum("btd,de->bte", routed_BxTxD, router_DxE.astype(jnp.float32))
        if config.bias:
            router_bias_E = _replicate(self._param("router_bias", 0.0, (config.experts,), ("expert",)))
            logits_BxTxE += router_bias_E.astype(jnp.float32)
        if _is_sharded():
            logits_BxTxE = constrain(logits_BxTxE, "batch", "stream", "experts_act")
        bias_E = None
        if config.bias_rate is not None:
            init = with_axes(nn.initializers.zeros, "expert")
            bias_E = self.variable(BALANCE, "bias", init, None, (config.experts,), jnp.float32).value
            bias_E = _replicate(bias_E)
        routing = (_route_per_device if _is_sharded() else route)(logits_BxTxE, bias_E, real_BxT, config)
        if config.scaled_router:
            init = with_axes(nn.initializers.ones, "expert")
            scale_E = _replicate(self.param("expert_scale", init, (config.experts,), self.param_dtype))
            # A sum over experts: a gather would have a scatter as its gradient.
            is_expert_BxTxKxE = routing.experts[..., None] == jnp.arange(config.experts)
            scales_BxTxK = jnp.sum(jnp.where(is_expert_BxTxKxE, scale_E.astype(jnp.float32), 0.0), axis=-1)
            routing = routing._replace(weights=routing.weights * scales_BxTxK)

        # The matrices into the hidden layer, (E, D, F), and at the end the one out of it, (E, F, D).
        shape = (config.experts, D, self.expert_width)
        names = ("up",) if self.activation == "squared_relu" else ("gate", "up")
        weights = [self._param(name, INIT_STDDEV, shape, ("expert", "embed", "mlp")) for name in names]
        shape = (config.experts, self.expert_width, D)
        weights.append(self._param("down", self.out_stddev, shape, ("expert", "mlp", "embed")))
        weights = [weight.astype(self.compute_dtype) for weight in weights]
        biases = []
        if config.bias:
            hidden = (config.experts, self.expert_width)
            biases = [self._param(f"{name}_bias", 0.0, hidden, ("expert", "mlp")) for name in names]
            biases = [bias.astype(self.compute_dtype)[:, None] for bias in biases]

        y_BxTxD = compute_experts(x_BxTxD, routing, weights, biases, config, self.activation)
        if config.bias:
            # The bias of an expert's output, times the gate, as one small matmul: a gather would have a scatter as its
            # gradient, and the sum over sharded columns of experts would add the bias once for each shard.
            down_bias_ExD = self._param("down_bias", 0.0, (config.experts, D), ("expert", "embed"))
            is_expert_BxTxKxE = routing.experts[..., None] == jnp.arange(config.experts)
            is_expert_BxTxKxE &= routing.is_kept[..., None]
            gates_BxTxE = jnp.sum(jnp.where(is_expert_BxTxKxE, routing.weights[..., None], 0.0), axis=2)
            down_bias_ExD = _replicate(down_bias_ExD).astype(self.compute_dtype)
            y_BxTxD += constrain_stream(gates_BxTxE.astype(self.compute_dtype) @ down_bias_ExD)
        if config.shared_experts:
            width = config.compute_shared_width(self.expert_width)
            types = self.param_dtype, self.compute_dtype
            shared = GatedMLP(width, self.activation, self.out_stddev, False, *types, name="shared")
            shared_BxTxD = shared(x_BxTxD)
            if config.shared_gate:
                gate_Dx1 = self._param("shared_gate", INIT_STDDEV, (D, 1), ("embed", "gate")).astype(self.compute_dtype)
                shared_BxTxD *= jax.nn.sigmoid(x_BxTxD @ gate_Dx1)
            y_BxTxD += shared_BxTxD
        return y_BxTxD, _compute_statistics(logits_BxTxE, routing, real_BxT, config)

    def _param(self, name: str, stddev: float, shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
        init = nn.initializers.normal(stddev) if stddev else nn.initializers.zeros
        return self.param(name, with_axes(init, *axes), shape, self.param_dtype)


def compute_experts(
    x_BxTxD: jax.Array,
    routing: Routing,
    weights: list[jax.Array],
    biases: list[jax.Array],
    config: MoeConfig,
    activation: Activation,
) -> jax.Array:
    """Return the weighted sum of the outputs of each token's experts, (B, T, D).

    `weights` are the matrices into the hidden layer and the one out of it, and `biases` those of the hidden layer,
    (E, 1, F), if there are any.

    If neither experts, their width nor sequences are sharded, each device groups the tokens of its own sequences and
    multiplies them by its own columns of every expert. Otherwise `expert_parallel` does the work, even where every
    device has all experts for itself: it all-gathers them and reduce-scatters their gradients, which the partitioner
    would all-reduce.
    """
    mesh, target, matmul = jax.sharding.get_abstract_mesh(), platform() or jax.default_backend(), get_matmul_type()
    expert = functools.partial(_expert_mlp, activation)
    arrays = x_BxTxD, routing.experts, routing.weights, routing.is_kept
    if _is_sharded() or num_shards("embed") > 1:
        length = x_BxTxD.shape[1]
        capacity = None if config.capacity_factor is None else config.capacity(length)
        layer = ExpertLayer(expert, config.experts, capacity, length, target, matmul)
        return constrain_stream(compute_sharded_experts(*arrays, weights, biases, layer))

    def compute(
        x_BxTxD: jax.Array, experts: jax.Array, gates: jax.Array, kept: jax.Array, weights: Any, biases: Any
    ) -> jax.Array:
        B, T, D = x_BxTxD.shape
        experts_MxK, gates_MxK, is_kept_MxK = (leaf.reshape(B * T, -1) for leaf in (experts, gates, kept))
        y_MxD = apply_grouped(
            x_BxTxD.reshape(B * T, D),
            experts_MxK,
            gates_MxK,
            is_kept_MxK,
            make_expert(expert, matmul, (), list_axes(tensor), join_matrices(weights, biases)),
            num_experts=config.experts,
            most_tokens=None if config.capacity_factor is None else B * config.capacity(T),
            platform=target,
            matmul_type=matmul,
        )
        y_BxTxD = y_MxD.reshape(B, T, D)
        return jax.lax.psum(y_BxTxD, tensor) if tensor else y_BxTxD

    tensor = _get_mesh_axes("mlp", weights[0].shape[2])
    if mesh.empty or mesh.size == 1:
        return compute(*arrays, weights, biases)
    batch = PartitionSpec(_get_mesh_axes("batch", x_BxTxD.shape[0]))
    into, out = PartitionSpec(None, None, tensor), PartitionSpec(None, tensor)
    in_specs = (batch, batch, batch, batch, [*[into] * (len(weights) - 1), out], [into] * len(biases))
    y_BxTxD = jax.shard_map(compute, in_specs=in_specs, out_specs=batch, check_vma=False)(*arrays, weights, biases)
    return constrain_stream(y_BxTxD)


def _expert_mlp(
    activation: Activation, weights: Sequence[Any], x_PxD: jax.Array, gates_P: jax.Array, multiply: Multiply
) -> jax.Array:
    """Apply one expert per slot; `weights` are joined by `join_matrices`."""
    into, out, *biases = weights
    both_PxF = multiply(x_PxD, into)
    for bias in biases:  # the bias of the expert of each slot, as a product that is grouped like the others
        both_PxF += multiply(jnp.ones((x_PxD.shape[0], 1), x_PxD.dtype), bias)
    return multiply(_compute_hidden(activation, both_PxF, gates_P), out)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(0,))
def _compute_hidden(activation: Activation, both_PxF: jax.Array, gates_P: jax.Array) -> jax.Array:
    """Return the hidden layer of an expert times the gates, which are multiplied in float32."""
    hidden_PxF = activate(activation, *([both_PxF] if activation == "squared_relu" else _split_halves(both_PxF)))
    return (hidden_PxF.astype(jnp.float32) * gates_P[:, None]).astype(hidden_PxF.dtype)


@jax.custom_vjp
def _split_halves(both_PxF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split the columns in two; each gradient is written directly into its half, which saves a copy."""
    first_PxF, second_PxF = jnp.split(both_PxF, 2, axis=1)
    return first_PxF, second_PxF


def _split_halves_backward(_: None, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array]:
    first_PxF, second_PxF = gradients
    P, F = first_PxF.shape
    both_PxF = jax.lax.dynamic_update_slice(jax.lax.empty((P, 2 * F), first_PxF.dtype), first_PxF, (0, 0))
    return (jax.lax.dynamic_update_slice(both_PxF, second_PxF, (0, F)),)


_split_halves.defvjp(lambda both_PxF: (_split_halves(both_PxF), None), _split_halves_backward)


def _is_sharded() -> bool:
    return num_sequence_shards() > 1 or num_shards("expert") > 1


def _replicate(leaf: jax.Array) -> jax.Array:
    """Return `leaf`, replicated if sequences or experts are sharded: each device routes its tokens to all experts."""
    return jax.lax.with_sharding_constraint(leaf, PartitionSpec()) if _is_sharded() else leaf


def _get_mesh_axes(name: str, size: int) -> Any:
    """Return the mesh axes that shard a logical axis of this size; None if they do not divide it."""
    (axes,) = nn.logical_to_mesh_axes((name,)) or (None,)
    number = num_shards(name)
    return axes if number > 1 and size % number == 0 else None


def validate_expert_sharding(num_experts: int) -> None:
    """Raise `InvalidError` if the number of experts does not divide over the expert axis of the caller's mesh."""
    number = num_shards("expert")
    share = num_experts // number
    if share * number != num_experts:
        near = " or ".join(str(part * number) for part in (share, share + 1) if part)
        raise InvalidError(
            f"config.model.moe.experts={num_experts} does not divide over topology.mesh.expert={number}; use {near} "
            f"experts, or an expert axis of {math.gcd(num_experts, number)}"
        )


# Load balancing and metrics.


def _compute_statistics(
    logits_BxTxE: jax.Array, routing: Routing, real_BxT: jax.Array, config: MoeConfig
) -> Statistics:
    load_BxE = jnp.sum(routing.is_chosen, axis=1, dtype=jnp.int32)
    num_tokens_B = jnp.maximum(jnp.sum(real_BxT, axis=1, dtype=jnp.float32), 1.0)

    def average(values_BxT: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(real_BxT, values_BxT, 0.0), axis=1) / num_tokens_B

    # Not a division: XLA turns one by a broadcast value into such a product only if nothing else uses the value, as
    # other layers do, and programs for one device and for several would differ.
    share_BxE = load_BxE * (1.0 / (config.experts_per_token * num_tokens_B))[:, None]
    balance_BxT = config.experts * jnp.sum(routing.gates * share_BxE[:, None], axis=-1)
    z_BxT = jnp.square(jax.nn.logsumexp(logits_BxTxE, axis=-1))
    entropy_BxT = -jnp.sum(jax.scipy.special.xlogy(routing.gates, routing.gates), axis=-1)
    num_kept = jnp.sum(routing.is_kept, dtype=jnp.int32)
    return {
        "loss_B": config.auxiliary_loss * average(balance_BxT) + config.router_z_loss * average(z_BxT),
        # Replicated, so that everything computed from it has the same bits on every device.
        "load_E": _replicate(jnp.sum(load_BxE, axis=0)),
        "dropped": jnp.sum(load_BxE) - num_kept,
        "entropy": jax.lax.stop_gradient(jnp.sum(jnp.where(real_BxT, entropy_BxT, 0.0))),
    }


def update_biases(biases_LxE: jax.Array, loads_LxE: jax.Array, rate: float) -> jax.Array:
    """Return the biases after a step: each moves by `rate` towards an even load.

    `loads_LxE` are the assignments to each expert in the whole step, integers.
    """
    means_L = jnp.mean(loads_LxE, axis=-1, keepdims=True, dtype=jnp.float32)
    return biases_LxE + jnp.float32(rate) * jnp.sign(means_L - loads_LxE)


def router_metrics(
    statistics_by_layer: Mapping[int, Mapping[str, jax.Array]], config: MoeConfig
) -> dict[str, jax.Array]:
    """Return the metrics of each layer, by key `moe/<layer>/<name>`.

    `load` is that of the busiest expert over the mean. `entropy` is that of a token's gates, in nats. `dropped`, if
    there is a capacity, is the share of assignments beyond it.
    """
    found: dict[str, jax.Array] = {}
    for layer, statistics in statistics_by_layer.items():
        total = jnp.maximum(jnp.sum(statistics["load_E"]), 1)
        found[f"moe/{layer}/load"] = config.experts * jnp.max(statistics["load_E"]) / total
        found[f"moe/{layer}/entropy"] = statistics["entropy"] * config.experts_per_token / total
        if config.capacity_factor is not None:
            found[f"moe/{layer}/dropped"] = statistics["dropped"] / total
    return found
