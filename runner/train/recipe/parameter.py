"""What a recipe knows of one parameter: its name, its shape, and what its axes are called."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import flax.linen as nn
import jax

from runner.checkpoint.fingerprint import dotted

STACKS = ("layers", "expert")  # axes along which a parameter holds several matrices or vectors
_TABLE = ("vocab", "positions")  # axes of tables, whose rows are looked up one by one
_EMBEDDING = "embedding"  # what flax calls the table of an `nn.Embed`


@dataclass(frozen=True)
class Parameter:
    """One parameter: a leaf of a tree like that of the parameters. `axes` are the logical ones, None without a name.

    `rate` is what its model multiplies its learning rate by, whatever its group does.
    """

    name: str  # dotted
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    rate: float = 1.0

    @property
    def is_matrix(self) -> bool:
        """Whether it has two axes or more, not counting the axis that stacks layers: then it decays."""
        return len(self.shape) - ("layers" in self.axes) >= 2

    @property
    def holds_matrices(self) -> bool:
        """Whether its last two axes are those of a matrix, and those before stack layers or experts."""
        return len(self.shape) >= 2 and all(axis in STACKS for axis in self.axes[:-2])

    @property
    def num_stacked(self) -> int:
        """The axes in front that stack what is a parameter each."""
        return next((n for n, axis in enumerate(self.axes) if axis not in STACKS), len(self.axes))

    @property
    def is_table(self) -> bool:
        """Whether it is an embedding, or what makes logits."""
        return any(axis in _TABLE for axis in self.axes) or self.name.rpartition(".")[2] == _EMBEDDING


def one_rate(parameter: Parameter) -> float:
    """What the learning rate of a parameter is multiplied by, besides what its group says: 1, of every one.

    A trainer whose parameters learn at rates of their own, as by mu-P, replaces it. The library's optimizers read it,
    and divide the decay by it, so that what adamw's takes off stays.
    """
    return 1.0


def nearest_names(text: str, parameters: Iterable[Parameter]) -> list[str]:
    """Their names, the most like a text first."""
    names = [parameter.name for parameter in parameters]
    return sorted(names, key=lambda name: -SequenceMatcher(None, text, name).ratio())


def parameters_of(boxed: Any) -> Any:
    """A `Parameter` for every leaf of abstract parameters, from their boxes with logical axis names (or without)."""
    specs = nn.get_partition_spec(boxed)

    def known(path: Any, leaf: jax.ShapeDtypeStruct, spec: Any) -> Parameter:
        axes = tuple(spec or ())
        return Parameter(dotted(path), leaf.shape, (*axes, *[None] * (len(leaf.shape) - len(axes))))

    return jax.tree_util.tree_map_with_path(
        known, nn.unbox(boxed), specs, is_leaf=lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )
