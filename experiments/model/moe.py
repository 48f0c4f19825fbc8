"""Mixture of experts: a router that chooses a few of many MLPs for each token, how they are kept in balance, counts.

Whatever could depend on how a step is split into micro-batches, devices and hosts is computed row by row (capacity, the
auxiliary loss) or is a sum over tokens (the counts). A token of padding is neither routed nor counted. Where rows or
experts are cut, each device routes the tokens that it has, and `exchange` takes them to their experts.

Sources: Shazeer et al. 2017 and Fedus et al. 2021 (top-k, auxiliary loss, capacity), Zoph et al. 2022 (router z-loss),
Dai et al. 2024 (fine-grained and shared experts), DeepSeek-V3 2024 (biases instead of a loss, groups of experts).

Shape legend: B batch, T sequence, D width, E experts, K experts of a token, G groups of experts, F width of an expert's
hidden layer, L layers.
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

from experiments.model.expert_parallel import Axes, ExchangeForm, compute_cut, joined, token_axes
from experiments.model.grouped_matmul import Multiply, grouped
from experiments.model.layers import (
    INIT_STDDEV,
    Activation,
    GatedMLP,
    activate,
    cut,
    in_stream,
    num_shards,
    row_parts,
    with_axes,
)
from experiments.model.platform import platform
from runner.errors import InvalidError
from runner.spec import Auto, FrozenModel

BALANCE = "balance"  # the collection of the biases
Statistics = dict[str, jax.Array]  # of one layer: loss_B, load_E, dropped and entropy; see `MixtureOfExperts`


class MoeConfig(FrozenModel):
    """The experts of a layer, and how tokens come to them."""

    experts: PositiveInt = Field(description="Routed experts of a layer.")
    experts_per_token: PositiveInt = Field(description="Routed experts that compute a token.")
    expert_width: PositiveInt | Auto = Field(default="auto", description="Hidden width of one expert; auto: mlp_width.")
    shared_experts: NonNegativeInt = Field(default=0, description="Further experts, which compute every token.")
    dense_layers: NonNegativeInt = Field(default=0, description="First layers that have an MLP, and no experts.")
    gate: Literal["softmax", "sigmoid"] = Field(default="softmax", description="What scores become, over all experts.")
    normalise_gates: bool = Field(default=True, description="Divide the gates of a token's experts by their sum.")
    routed_scale: PositiveFloat = Field(default=1.0, description="What the gates are multiplied by in the end.")
    groups: PositiveInt = Field(default=1, description="Groups of experts of equal size.")
    groups_per_token: PositiveInt = Field(default=1, description="Groups that a token's experts are chosen from.")
    group_score: Literal["top_2", "max"] = Field(
        default="top_2", description="What a group is chosen by: the sum of its two best experts, or its best."
    )
    capacity_factor: PositiveFloat | None = Field(
        default=None,
        description="Tokens of one row that an expert takes, over the mean; what comes later in the row goes without. "
        "null: all.",
    )
    auxiliary_loss: NonNegativeFloat = Field(
        default=0.001, description="Weight of the loss that balances the experts' load; of each layer, 1 if even."
    )
    bias_rate: NonNegativeFloat | None = Field(
        default=None,
        description="What a step adds to, or takes from, the bias by which an expert is chosen; null: no biases.",
    )
    router_z_loss: NonNegativeFloat = Field(
        default=0.0, description="Weight of the squared log of the router's softmax denominator, of each layer."
    )

    @model_validator(mode="after")
    def _experts_fit(self) -> "MoeConfig":
        if self.experts % self.groups:
            raise ValueError(f"experts={self.experts} does not divide over groups={self.groups}")
        if self.groups_per_token > self.groups:
            raise ValueError(f"groups_per_token={self.groups_per_token} is more than groups={self.groups}")
        most = self.experts // self.groups * self.groups_per_token
        if self.experts_per_token > most:
            raise ValueError(f"experts_per_token={self.experts_per_token} is more than the {most} to choose from")
        if self.group_score == "top_2" and 1 < self.groups == self.experts:
            raise ValueError(f"groups={self.groups} leaves one expert to a group; group_score top_2 needs two")
        return self

    def capacity(self, length: int) -> int:
        """Most tokens that an expert takes of a row of `length`."""
        if self.capacity_factor is None:
            return length
        return min(length, math.ceil(self.capacity_factor * length * self.experts_per_token / self.experts))


class Routing(NamedTuple):
    """Where each token goes."""

    experts: jax.Array  # (B, T, K)
    weights: jax.Array  # (B, T, K), float32
    kept: jax.Array  # (B, T, K), bool: not of padding, and not beyond an expert's capacity
    chosen: jax.Array  # (B, T, E), bool: what padding aside was chosen, kept or not
    gates: jax.Array  # (B, T, E), float32; each token's add up to 1


def route(
    logits_BxTxE: jax.Array, bias_E: jax.Array | None, real_BxT: jax.Array, config: MoeConfig, parts: Axes = ()
) -> Routing:
    """Choose each token's experts by its gates, or by gates and biases, from float32 logits.

    Within a `shard_map` that cuts rows over the mesh axes `parts` the tokens are those of one part.
    """
    if config.gate == "softmax":
        gates_BxTxE = normalised_BxTxE = jax.nn.softmax(logits_BxTxE, axis=-1)
    else:
        gates_BxTxE = jax.nn.sigmoid(logits_BxTxE)
        normalised_BxTxE = gates_BxTxE / (jnp.sum(gates_BxTxE, axis=-1, keepdims=True) + 1e-20)
    scores_BxTxE = jax.lax.stop_gradient(gates_BxTxE if bias_E is None else gates_BxTxE + bias_E)
    _, experts_BxTxK = jax.lax.top_k(_of_best_groups(scores_BxTxE, config), config.experts_per_token)
    is_expert_BxTxKxE = experts_BxTxK[..., None] == jnp.arange(config.experts)
    weights_BxTxK = jnp.sum(jnp.where(is_expert_BxTxKxE, gates_BxTxE[:, :, None], 0.0), axis=-1)
    if config.normalise_gates:
        weights_BxTxK /= jnp.sum(weights_BxTxK, axis=-1, keepdims=True) + 1e-20
    chosen_BxTxE = jnp.any(is_expert_BxTxKxE, axis=2) & real_BxT[..., None]
    kept_BxTxK = jnp.broadcast_to(real_BxT[..., None], experts_BxTxK.shape)
    length = logits_BxTxE.shape[1] * (jax.lax.axis_size(parts) if parts else 1)
    if config.capacity(length) < length:
        # In the order of the row, so that no token goes without for the sake of a later one.
        place_BxTxE = _running_count(chosen_BxTxE, parts)
        has_room_BxTxE = place_BxTxE <= config.capacity(length)
        kept_BxTxK &= jnp.any(is_expert_BxTxKxE & has_room_BxTxE[:, :, None], axis=-1)
    return Routing(experts_BxTxK, weights_BxTxK * config.routed_scale, kept_BxTxK, chosen_BxTxE, normalised_BxTxE)


def _route_apart(logits_BxTxE: jax.Array, bias_E: jax.Array | None, real_BxT: jax.Array, config: MoeConfig) -> Routing:
    """`route`, where rows or experts are cut, of each device for its own tokens: of others it is told counts alone.

    Left to the partitioner, the choice of the best would gather the scores of all tokens first.
    """
    rows, parts = token_axes(*real_BxT.shape)
    tokens = PartitionSpec(rows, parts)
    biases = () if bias_E is None else (bias_E,)

    def route_own(logits_BxTxE: jax.Array, real_BxT: jax.Array, *biases: jax.Array) -> Routing:
        return route(logits_BxTxE, biases[0] if biases else None, real_BxT, config, parts)

    in_specs = (tokens, tokens, *[PartitionSpec()] * len(biases))
    routed = jax.shard_map(route_own, in_specs=in_specs, out_specs=tokens, check_vma=False)
    return routed(logits_BxTxE, real_BxT, *biases)


def _running_count(chosen_BxTxE: jax.Array, parts: Axes) -> jax.Array:
    """How many of each whole row are chosen up to each place."""
    place_BxTxE = jnp.cumsum(chosen_BxTxE, axis=1, dtype=jnp.int32)
    if not parts:
        return place_BxTxE
    totals_PxBxE = jax.lax.all_gather(place_BxTxE[:, -1], parts)
    is_before_P = jnp.arange(totals_PxBxE.shape[0]) < jax.lax.axis_index(parts)
    return place_BxTxE + jnp.sum(jnp.where(is_before_P[:, None, None], totals_PxBxE, 0), axis=0)[:, None]


def _of_best_groups(scores_BxTxE: jax.Array, config: MoeConfig) -> jax.Array:
    """The scores, and minus infinity for experts outside of a token's best groups."""
    if config.groups_per_token == config.groups:
        return scores_BxTxE
    scores_BxTxGxI = scores_BxTxE.reshape(*scores_BxTxE.shape[:2], config.groups, -1)
    best, _ = jax.lax.top_k(scores_BxTxGxI, 2 if config.group_score == "top_2" else 1)
    _, groups = jax.lax.top_k(jnp.sum(best, axis=-1), config.groups_per_token)
    is_best_BxTxG = jnp.any(groups[..., None] == jnp.arange(config.groups), axis=2)
    return jnp.where(is_best_BxTxG[..., None], scores_BxTxGxI, -jnp.inf).reshape(scores_BxTxE.shape)


class MixtureOfExperts(nn.Module):
    """Routed experts and shared ones, in the place of an MLP. Experts' matrices are stacked, experts first.

    With `bias_rate` the variable `bias` (E) of the collection `balance` is added to the gates where experts are chosen,
    and nowhere else; no gradient moves it. `next_biases` says what a step makes of it.
    """

    config: MoeConfig
    expert_width: int
    activation: Activation = "swiglu"
    out_stddev: float = INIT_STDDEV
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, real_BxT: jax.Array) -> tuple[jax.Array, Statistics]:
        """Return what is added for each token, (B, T, D), and statistics of the tokens that are `real`.

        `loss_B`: for each row the auxiliary loss and the router's z-loss, by their weights, means over its tokens.
        `load_E`: assignments to each expert, and `dropped`: those of them beyond its capacity, int32. `entropy`: of the
        gates in nats, summed over tokens.
        """
        config, D = self.config, x_BxTxD.shape[-1]
        validate_expert_sharding(config.experts)
        router_DxE = self._param("router", INIT_STDDEV, (D, config.experts), ("embed", "expert"))
        router_DxE = _whole(router_DxE)
        logits_BxTxE = jnp.einsum("btd,de->bte", x_BxTxD.astype(jnp.float32), router_DxE.astype(jnp.float32))
        logits_BxTxE = _in_stream(logits_BxTxE)
        bias_E = None
        if config.bias_rate is not None:
            init = with_axes(nn.initializers.zeros, "expert")
            bias_E = self.variable(BALANCE, "bias", init, None, (config.experts,), jnp.float32).value
            bias_E = _whole(bias_E)
        routing = (_route_apart if _is_cut() else route)(logits_BxTxE, bias_E, real_BxT, config)
        y_BxTxD = compute_experts(x_BxTxD, routing, self._weights(D), config, self.activation)
        if config.shared_experts:
            width = config.shared_experts * self.expert_width
            types = self.param_dtype, self.compute_dtype
            y_BxTxD += GatedMLP(width, self.activation, self.out_stddev, False, *types, name="shared")(x_BxTxD)
        return y_BxTxD, _statistics(logits_BxTxE, routing, real_BxT, config)

    def _weights(self, width: int) -> list[jax.Array]:
        """The matrices into the hidden layer, (E, D, F), and at the end the one out of it, (E, F, D)."""
        into = (self.config.experts, width, self.expert_width)
        names = ("up",) if self.activation == "squared_relu" else ("gate", "up")
        found = [self._param(name, INIT_STDDEV, into, ("expert", "embed", "mlp")) for name in names]
        out = (into[0], into[2], into[1])
        found.append(self._param("down", self.out_stddev, out, ("expert", "mlp", "embed")))
        return [weight.astype(self.compute_dtype) for weight in found]

    def _param(self, name: str, stddev: float, shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
        return self.param(name, with_axes(nn.initializers.normal(stddev), *axes), shape, self.param_dtype)


def compute_experts(
    x_BxTxD: jax.Array, routing: Routing, weights: list[jax.Array], config: MoeConfig, activation: Activation
) -> jax.Array:
    """Return the weighted sum of what each token's experts make of it, (B, T, D).

    Where experts, their width and rows are whole each device groups the tokens of its own rows, and multiplies by its
    own columns of every expert. Else see `exchange`, also where every device has all experts for itself: it gathers
    them, and scatters their gradients, which the partitioner would sum up whole on every device.
    """
    mesh, here = jax.sharding.get_abstract_mesh(), platform() or jax.default_backend()
    expert = functools.partial(_mlp, activation)
    arrays = x_BxTxD, routing.experts, routing.weights, routing.kept
    if _is_cut() or num_shards("embed") > 1:
        length = x_BxTxD.shape[1]
        capacity = None if config.capacity_factor is None else config.capacity(length)
        form = ExchangeForm(expert, config.experts, capacity, length, here)
        return in_stream(compute_cut(*arrays, weights, form))

    def compute(x_BxTxD: jax.Array, experts: jax.Array, gates: jax.Array, kept: jax.Array, *weights: Any) -> jax.Array:
        B, T, D = x_BxTxD.shape
        experts_MxK, gates_MxK, kept_MxK = (leaf.reshape(B * T, -1) for leaf in (experts, gates, kept))
        y_MxD = grouped(
            x_BxTxD.reshape(B * T, D),
            experts_MxK,
            gates_MxK,
            kept_MxK,
            functools.partial(expert, joined(weights)),
            num_experts=config.experts,
            most_rows=None if config.capacity_factor is None else B * config.capacity(T),
            platform=here,
        )
        y_BxTxD = y_MxD.reshape(B, T, D)
        return jax.lax.psum(y_BxTxD, tensor) if tensor else y_BxTxD

    tensor = _axes("mlp", weights[0].shape[2])
    if mesh.empty or mesh.size == 1:
        return compute(*arrays, *weights)
    rows = PartitionSpec(_axes("batch", x_BxTxD.shape[0]))
    into, out = PartitionSpec(None, None, tensor), PartitionSpec(None, tensor)
    in_specs = (rows, rows, rows, rows, *[into] * (len(weights) - 1), out)
    y_BxTxD = jax.shard_map(compute, in_specs=in_specs, out_specs=rows, check_vma=False)(*arrays, *weights)
    return in_stream(y_BxTxD)


def _mlp(
    activation: Activation, weights: Sequence[Any], x_PxD: jax.Array, gates_P: jax.Array, multiply: Multiply
) -> jax.Array:
    """The function of an expert, of joined matrices."""
    into, out = weights
    return multiply(_hidden(activation, multiply(x_PxD, into), gates_P), out)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(0,))
def _hidden(activation: Activation, both_PxF: jax.Array, gates_P: jax.Array) -> jax.Array:
    """The hidden layer of an expert times the gates, which are multiplied in float32."""
    hidden_PxF = activate(activation, *([both_PxF] if activation == "squared_relu" else _halves(both_PxF)))
    return (hidden_PxF.astype(jnp.float32) * gates_P[:, None]).astype(hidden_PxF.dtype)


@jax.custom_vjp
def _halves(both_PxF: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both halves of the columns, whose gradients are each written where they belong: else they would be copied."""
    first_PxF, second_PxF = jnp.split(both_PxF, 2, axis=1)
    return first_PxF, second_PxF


def _halves_backward(_: None, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array]:
    first_PxF, second_PxF = gradients
    P, F = first_PxF.shape
    both_PxF = jax.lax.dynamic_update_slice(jax.lax.empty((P, 2 * F), first_PxF.dtype), first_PxF, (0, 0))
    return (jax.lax.dynamic_update_slice(both_PxF, second_PxF, (0, F)),)


_halves.defvjp(lambda both_PxF: (_halves(both_PxF), None), _halves_backward)


def _is_cut() -> bool:
    """Whether the rules of the caller cut rows or experts."""
    return row_parts() > 1 or num_shards("expert") > 1


def _whole(leaf: jax.Array) -> jax.Array:
    """Every device all of it, where rows or experts are cut: each routes its own tokens to all experts."""
    return jax.lax.with_sharding_constraint(leaf, PartitionSpec()) if _is_cut() else leaf


def _in_stream(logits_BxTxE: jax.Array) -> jax.Array:
    """As the tokens lie, where rows or experts are cut."""
    return cut(logits_BxTxE, "batch", "stream", "experts_act") if _is_cut() else logits_BxTxE


def _axes(name: str, size: int) -> Any:
    """The mesh axes of a logical axis of so many elements; none where they do not divide it."""
    (axes,) = nn.logical_to_mesh_axes((name,)) or (None,)
    number = num_shards(name)
    return axes if number > 1 and size % number == 0 else None


def validate_expert_sharding(num_experts: int) -> None:
    """Raise `InvalidError` if devices would share an expert, by the mesh and the rules of the caller."""
    number = num_shards("expert")
    share = num_experts // number
    if share * number != num_experts:
        near = " or ".join(str(part * number) for part in (share, share + 1) if part)
        raise InvalidError(
            f"config.model.moe.experts={num_experts} does not divide over topology.mesh.expert={number}; use {near} "
            f"experts, or an expert axis of {math.gcd(num_experts, number)}"
        )


def _statistics(logits_BxTxE: jax.Array, routing: Routing, real_BxT: jax.Array, config: MoeConfig) -> Statistics:
    load_BxE = jnp.sum(routing.chosen, axis=1, dtype=jnp.int32)
    num_tokens_B = jnp.maximum(jnp.sum(real_BxT, axis=1, dtype=jnp.float32), 1.0)

    def mean_of_row(values_BxT: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(real_BxT, values_BxT, 0.0), axis=1) / num_tokens_B

    share_BxE = load_BxE / (config.experts_per_token * num_tokens_B[:, None])
    balance_BxT = config.experts * jnp.sum(routing.gates * share_BxE[:, None], axis=-1)
    z_BxT = jnp.square(jax.nn.logsumexp(logits_BxTxE, axis=-1))
    entropy_BxT = -jnp.sum(jax.scipy.special.xlogy(routing.gates, routing.gates), axis=-1)
    num_kept = jnp.sum(routing.kept, dtype=jnp.int32)
    return {
        "loss_B": config.auxiliary_loss * mean_of_row(balance_BxT) + config.router_z_loss * mean_of_row(z_BxT),
        "load_E": _whole(jnp.sum(load_BxE, axis=0)),  # so that whatever is made of it has the same bits everywhere
        "dropped": jnp.sum(load_BxE) - num_kept,
        "entropy": jax.lax.stop_gradient(jnp.sum(jnp.where(real_BxT, entropy_BxT, 0.0))),
    }


def next_biases(biases_LxE: jax.Array, loads_LxE: jax.Array, rate: float) -> jax.Array:
    """The biases after a step with these loads: each by `rate` towards the mean load. Loads are integers, all of it."""
    means_L = jnp.mean(loads_LxE, axis=-1, keepdims=True, dtype=jnp.float32)
    return biases_LxE + jnp.float32(rate) * jnp.sign(means_L - loads_LxE)


def scalars(statistics_by_layer: Mapping[int, Mapping[str, jax.Array]], config: MoeConfig) -> dict[str, jax.Array]:
    """What a row tells of each layer: `load` of the busiest expert over the mean, `entropy` of a token's gates in nats,
    and, where there is a capacity, `dropped`: the share of the assignments that were beyond it.
    """
    found: dict[str, jax.Array] = {}
    for layer, statistics in statistics_by_layer.items():
        total = jnp.maximum(jnp.sum(statistics["load_E"]), 1)
        found[f"moe/{layer}/load"] = config.experts * jnp.max(statistics["load_E"]) / total
        found[f"moe/{layer}/entropy"] = statistics["entropy"] * config.experts_per_token / total
        if config.capacity_factor is not None:
            found[f"moe/{layer}/dropped"] = statistics["dropped"] / total
    return found
