"""What a token costs besides FLOPs, for a plan that cannot compile every way to run a job. Pure; imports no jax."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.config import MemoryConfig


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


def transformer_sizing(
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


def memory_choices(sequence_length: int) -> dict[str, tuple[Any, ...]]:
    """What a search may vary of a decoder's memory: what is kept, and whether the loss is computed in chunks."""
    chunk = max(size for size in range(1, 513) if sequence_length % size == 0)
    return {
        "config.memory.remat": ("none", "dots", "layers"),
        "config.memory.loss_chunk_positions": (None, chunk),
    }
