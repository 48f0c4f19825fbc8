"""Mapping between the leaves of a job's weights and the tensors of Hugging Face's files.

A `Family` describes the mapping as a table of `TensorPiece`, which serves export and import. `match_tensors` finds the
tensors of published weights for each leaf, and reports what is missing, left over or of another shape.
"""

import fnmatch
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np

from runner.errors import InvalidError
from runner.huggingface.safetensors import (
    CONFIG_FILE,
    DTYPES,
    PublishedTensor,
    PublishedWeights,
    QuantisedTensor,
    drop_config_keys,
)
from runner.spec import InitFromConfig
from runner.storage import JsonObject

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorPiece:
    """A tensor of the files or a part of one, and the leaf, or slice of a stacked leaf, that holds its elements.

    Attributes:
        tensor: name in the files, such as `model.layers.3.mlp.up_proj.weight`. Empty if the family's files have no such
            tensor: an export leaves the leaf out, and an import leaves its initial values.
        leaf: dotted name of the leaf below `params`, such as `blocks.mlp_up.kernel`. A name that begins with
            `variables.` is a leaf of the state's other variables.
        index: index into the leading axes of the leaf: the layer, or the layer and the expert.
        transpose: True if the file has the last two axes in the other order: (out, in) for a leaf (in, out).
        part: (axis, start, stop) of the file's tensor, if several leaves share it.
        step: distance of the part's elements on that axis, if the elements of several leaves are interleaved.
    """

    tensor: str
    leaf: str
    index: tuple[int, ...] = ()
    transpose: bool = False
    part: tuple[int, int, int] | None = None
    step: int = 1

    @property
    def leaf_name(self) -> str:
        """Dotted name of the leaf in the train state."""
        return self.leaf if self.leaf.startswith("variables.") else f"params.{self.leaf}"


class Family(Protocol):
    """Family of models in Hugging Face's layout. Subclass it, and return an instance from `BaseTrainer.family`."""

    def pieces(self) -> Sequence[TensorPiece]:
        """Return a table with every leaf exactly once, and every tensor completely."""

    def config(self) -> JsonObject:
        """Return the content of `config.json`, with `model_type` and `architectures`."""

    def differences(self, config: Mapping[str, Any]) -> list[str]:
        """Return the differences between this model and a `config.json`, one line each.

        A line is `key: got ..., the model needs ...`. Only settings that cannot be inferred from shapes of tensors are
        compared, `model_type` first; vocabulary and context length are therefore not compared.
        """

    def copies(self) -> Mapping[str, str]:
        """Return the tensors that files contain twice: from the name of each copy to that of the tensor in `pieces`.

        Called after `pieces`. An export writes them, an import skips them. By default there are none.
        """
        return {}

    def known_as(self, tensor: str) -> str | None:
        """Return the name in `pieces` of a tensor of published files; None if no model reads it, such as a mask.

        By default it is the same name.
        """
        return tensor


def _compute_piece_shape(piece: TensorPiece, leaf: Shape) -> Shape:
    """Return the shape of a piece in the files, for a leaf of this shape."""
    own = leaf[len(piece.index) :]
    return (*own[:-2], own[-1], own[-2]) if piece.transpose else own


def compute_tensor_shapes(pieces: Iterable[TensorPiece], leaves: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shape of every tensor, from the shapes of the leaves by their names in the state."""
    shapes: dict[str, Shape] = {}
    for piece in pieces:
        if not piece.tensor:
            continue
        shape = list(_compute_piece_shape(piece, leaves[piece.leaf_name]))
        if piece.part is not None:
            axis, _, stop = piece.part
            # The parts of a tensor have no gaps, so the largest end is its size.
            shape[axis] = max(stop, shapes.get(piece.tensor, shape)[axis])
        shapes[piece.tensor] = tuple(shape)
    return shapes


def find_table_problems(pieces: Sequence[TensorPiece], leaves: Mapping[str, Shape]) -> list[str]:
    """Return the problems of a table, one line each. A valid table has every leaf once, and every tensor completely.

    `leaves` are the shapes of the leaves by their names in the state.
    """
    problems = []
    by_leaf: dict[str, list[TensorPiece]] = defaultdict(list)
    by_tensor: dict[str, list[TensorPiece]] = defaultdict(list)
    for piece in pieces:
        by_leaf[piece.leaf_name].append(piece)
        if piece.tensor:
            by_tensor[piece.tensor].append(piece)
    problems += [f"{name}: no piece has this leaf" for name in leaves.keys() - by_leaf.keys()]
    problems += [f"{name}: the weights have no such leaf" for name in by_leaf.keys() - leaves.keys()]
    of_leaves = {name: _find_leaf_problems(by_leaf[name], leaves[name]) for name in by_leaf.keys() & leaves.keys()}
    problems += [f"{name}: {problem}" for name, found in of_leaves.items() for problem in found]
    for name, parts in by_tensor.items():
        # The shapes of parts are known only for leaves without problems.
        if all(of_leaves.get(part.leaf_name) == [] for part in parts):
            problems += [f"{name}: {problem}" for problem in _find_tensor_problems(parts, leaves)]
    return sorted(problems)


def _find_leaf_problems(pieces: list[TensorPiece], shape: Shape) -> list[str]:
    depths = {len(piece.index) for piece in pieces}
    if len(depths) > 1 or max(depths) > len(shape):
        return [f"its pieces have indexes of {sorted(depths)} axes, and its shape is {list(shape)}"]
    if any(piece.transpose for piece in pieces) and len(shape) - max(depths) < 2:
        return [f"it cannot be transposed, since its shape is {list(shape)}"]
    # One missing and one excess index are enough for the reader of the error.
    needed = set(product(*map(range, shape[: max(depths)])))
    given = Counter(piece.index for piece in pieces)
    problems = [f"no piece has its index {list(index)}" for index in sorted(needed - given.keys())[:1]]
    problems += [f"it has no index {list(index)}" for index in sorted(given.keys() - needed)[:1]]
    return problems + [f"{count} pieces have its index {list(index)}" for index, count in given.items() if count > 1]


def _find_tensor_problems(pieces: list[TensorPiece], leaves: Mapping[str, Shape]) -> list[str]:
    shapes = [_compute_piece_shape(piece, leaves[piece.leaf_name]) for piece in pieces]
    parts = [piece.part for piece in pieces]
    if parts == [None]:
        return []
    if None in parts:
        return ["several pieces are the whole tensor"]
    known = [part for part in parts if part is not None]
    if len({axis for axis, _, _ in known}) > 1:
        return ["its parts are of several axes"]
    axis, is_covered = known[0][0], np.zeros(max(stop for _, _, stop in known), bool)
    for shape, (_, start, stop), piece in sorted(zip(shapes, known, pieces, strict=True), key=lambda each: each[1]):
        first, own = int(np.argmin(is_covered)), is_covered[start : stop : piece.step]
        if start != first or own.any() or axis >= len(shape) or len(own) != shape[axis]:
            return [
                f"its part {start}..{stop} of axis {axis} must begin at {first} and have the size of its piece, "
                f"{list(shape)}"
            ]
        own[:] = True
    if not is_covered.all():
        return [f"no part has the element {int(np.argmin(is_covered))} of its axis {axis}"]
    others = {math.prod(shape[:axis]) * math.prod(shape[axis + 1 :]) for shape in shapes}
    return ["its parts differ in size on their other axes"] if len(others) > 1 else []


@dataclass(frozen=True)
class TensorMatch:
    """Tensors from which each leaf is read.

    Attributes:
        pieces: for each leaf its pieces with their tensors. A tensor may be shorter in its first axis than the piece;
            it then fills the beginning of the piece. A piece without a tensor keeps its initial values.
        notes: deviations that the spec allows, one line each.
    """

    pieces: Mapping[str, list[tuple[TensorPiece, PublishedTensor | None]]]
    notes: tuple[str, ...]


def match_tensors(
    published: PublishedWeights, family: Family, shapes: Mapping[str, Shape], rule: InitFromConfig
) -> TensorMatch:
    """Find the tensors of each leaf.

    `shapes` are those of the leaves by their names in the state. `rule`, which is `checkpoint.init_from`, allows
    deviations and renames tensors.

    Raises:
        InvalidError: Something does not match and is not allowed; one line for each problem.
    """
    pieces = family.pieces()
    table_problems = find_table_problems(pieces, shapes)
    if table_problems:
        raise InvalidError("\n".join(f"the job's table of tensors: {line}" for line in table_problems))

    def is_allowed(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in rule.allow_missing)

    found, skipped, problems = _rename_tensors(published, family, rule)
    needed = compute_tensor_shapes(pieces, shapes)
    # The parts of a shared tensor cannot be located in a shorter one.
    shared = {piece.tensor for piece in pieces if piece.part is not None}
    notes = _describe_skipped_parts(published, skipped)
    notes += [f"{CONFIG_FILE}: its key {key} is ignored" for key in dict.fromkeys(rule.ignored_config_keys)]
    for line in family.differences(drop_config_keys(published.config, rule.ignored_config_keys)):
        key = f"config.{line.partition(':')[0]}"
        (notes if is_allowed(key) else problems).append(f"{CONFIG_FILE}: {line}")
    sources: dict[str, PublishedTensor | None] = {}
    for name, shape in needed.items():
        choice = _choose_tensor(found.get(name), shape, name not in shared)
        sources[name] = choice.tensor
        if choice.problem is not None and is_allowed(name):
            notes.append(f"{name}: {choice.problem}; {choice.consequence}")
        elif choice.problem is not None:
            problems.append(f"{name}: {choice.problem}")
    problems += [f"{name}: is left over, the model has no such tensor" for name in found.keys() - needed.keys()]
    # If the family differs, nothing else matches, so only the family is reported.
    problems = [line for line in problems if line.startswith(f"{CONFIG_FILE}: model_type:")] or problems
    if problems:
        raise InvalidError("\n".join(f"{published.store.url}: {line}" for line in sorted(problems)))
    by_leaf: dict[str, list[tuple[TensorPiece, PublishedTensor | None]]] = defaultdict(list)
    for piece in pieces:
        by_leaf[piece.leaf_name].append((piece, sources.get(piece.tensor)))
    return TensorMatch(by_leaf, tuple(sorted(notes)))


class _Choice(NamedTuple):
    """Tensor to read, its deviation from the needed one, and the consequence if the spec allows that."""

    tensor: PublishedTensor | None
    problem: str | None = None
    consequence: str = ""


def _choose_tensor(tensor: PublishedTensor | None, needed: Shape, may_be_shorter: bool) -> _Choice:
    fresh = "it keeps its initial values"
    if tensor is None:
        return _Choice(None, f"is missing, the model needs {list(needed)}", fresh)
    if tensor.dtype not in DTYPES and not isinstance(tensor, QuantisedTensor):
        return _Choice(None, f"is of type {tensor.dtype}, needs one of {', '.join(DTYPES)}", fresh)
    if tensor.shape == needed:
        return _Choice(tensor)
    problem = f"has the shape {list(tensor.shape)}, the model needs {list(needed)}"
    if may_be_shorter and needed and tensor.shape[1:] == needed[1:] and tensor.shape[:1] < needed[:1]:
        return _Choice(tensor, problem, f"all but its first {tensor.shape[0]} keep their initial values")
    return _Choice(None, problem, fresh)


def _rename_tensors(
    published: PublishedWeights, family: Family, rule: InitFromConfig
) -> tuple[dict[str, PublishedTensor], list[str], list[str]]:
    """Return the tensors by their names in the table, the names of skipped ones, and the problems of `rename`."""

    def has_beginning(name: str, beginning: str) -> bool:
        return f"{name}.".startswith(f"{beginning}.")  # whole parts of dotted names

    problems = [
        f"rename: no tensor begins with {beginning}"
        for beginning in rule.rename
        if not any(has_beginning(name, beginning) for name in published.tensors)
    ]
    found: dict[str, PublishedTensor] = {}
    originals: dict[str, str] = {}
    skipped: list[str] = []
    for name, tensor in published.tensors.items():
        renamed: str | None = name
        fitting = [beginning for beginning in rule.rename if has_beginning(name, beginning)]
        if fitting:
            # The longest beginning is the most specific rule.
            longest = max(fitting, key=len)
            target = rule.rename[longest]
            renamed = None if target is None else (target + name[len(longest) :]).lstrip(".")
        known = None if renamed is None else family.known_as(renamed)
        if known is None:
            skipped.append(name)
            continue
        if known in found:
            problems.append(f"{known}: both {originals[known]} and {name} have this name after renaming")
        found[known], originals[known] = tensor, name
    return found, skipped, problems


def _describe_skipped_parts(published: PublishedWeights, skipped: list[str]) -> list[str]:
    """Return a line for each part of the published model, such as a vision tower, of which no tensor is read."""

    def get_part(name: str) -> str:
        first, _, rest = name.partition(".")
        return f"{first}.{rest.partition('.')[0]}" if first == "model" else first

    sizes = Counter(map(get_part, published.tensors))
    counts = Counter(map(get_part, skipped))
    # Single tensors that every model of a family skips, such as a repeated head, are not worth a line.
    return [
        f"{part}: its {count} tensors are left out, the model has no such part"
        for part, count in sorted(counts.items())
        if count == sizes[part] > 1
    ]
