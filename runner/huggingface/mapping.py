"""What the weights of a job are called in Hugging Face's files: a table of pieces, which serves both ways.

Which tensor of what was found goes into which leaf, and what is missing, left over or of another shape.
"""

import fnmatch
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

from runner.errors import InvalidError
from runner.huggingface.safetensors import CONFIG_FILE, DTYPES, PublishedWeights, TensorLocation
from runner.spec import InitFromConfig
from runner.storage import JsonObject

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorPiece:
    """A tensor of the files, or a part of one, and the leaf, or the slice of a stacked leaf, that holds its elements.

    Attributes:
        tensor: its name in the files, `model.layers.3.mlp.up_proj.weight`.
        leaf: the dotted name of the leaf below `params`, `blocks.mlp_up.kernel`; one that begins with `variables.` is
            a leaf of the state's other variables.
        index: the place in the leaf's leading axes: the layer, or the layer and the expert.
        transpose: the file has the last two axes the other way round: (out, in) where the leaf has (in, out).
        part: (axis, start, stop) of the file's tensor, where several leaves share one.
    """

    tensor: str
    leaf: str
    index: tuple[int, ...] = ()
    transpose: bool = False
    part: tuple[int, int, int] | None = None

    @property
    def leaf_name(self) -> str:
        """The dotted name of the leaf in the state."""
        return self.leaf if self.leaf.startswith("variables.") else f"params.{self.leaf}"


class Family(Protocol):
    """The form in which a family of models is published. To be subclassed: what `BaseTrainer.family` returns."""

    def pieces(self) -> Sequence[TensorPiece]:
        """Every leaf exactly once, every tensor whole."""

    def config(self) -> JsonObject:
        """The content of `config.json`, with `model_type` and `architectures`."""

    def differences(self, config: Mapping[str, Any]) -> list[str]:
        """What of a `config.json` that was found is not this model, a line each: `key: got ..., the model needs ...`.

        Of what no tensor's shape shows: the first is `model_type`, and neither the vocabulary nor the context is one.
        """

    def known_as(self, tensor: str) -> str | None:
        """The name in `pieces` of a tensor that published files call `tensor`; None: no model reads it, as a mask.

        By default the same name.
        """
        return tensor


def compute_piece_shape(piece: TensorPiece, leaf: Shape) -> Shape:
    """The shape of a piece as it lies in the files, where its leaf has this shape."""
    own = leaf[len(piece.index) :]
    return (*own[:-2], own[-1], own[-2]) if piece.transpose else own


def compute_tensor_shapes(pieces: Iterable[TensorPiece], leaves: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shape of every tensor, from the shapes of the leaves by their names in the state."""
    shapes: dict[str, Shape] = {}
    for piece in pieces:
        shape = list(compute_piece_shape(piece, leaves[piece.leaf_name]))
        if piece.part is not None:
            axis, _, stop = piece.part
            shape[axis] = max(stop, shapes.get(piece.tensor, shape)[axis])
        shapes[piece.tensor] = tuple(shape)
    return shapes


def find_table_problems(pieces: Sequence[TensorPiece], leaves: Mapping[str, Shape]) -> list[str]:
    """What is wrong with a table, a line each; none: every leaf stands in it exactly once, and every tensor is whole.

    `leaves` has the shape of every leaf of the weights by its name in the state.
    """
    found = []
    by_leaf: dict[str, list[TensorPiece]] = defaultdict(list)
    by_tensor: dict[str, list[TensorPiece]] = defaultdict(list)
    for piece in pieces:
        by_leaf[piece.leaf_name].append(piece)
        by_tensor[piece.tensor].append(piece)
    found += [f"{name}: no piece has this leaf" for name in leaves.keys() - by_leaf.keys()]
    found += [f"{name}: the weights have no such leaf" for name in by_leaf.keys() - leaves.keys()]
    wrong = {name: _leaf_problems(by_leaf[name], leaves[name]) for name in by_leaf.keys() & leaves.keys()}
    found += [f"{name}: {problem}" for name, problems in wrong.items() for problem in problems]
    for name, parts in by_tensor.items():
        if all(wrong.get(part.leaf_name) == [] for part in parts):
            found += [f"{name}: {problem}" for problem in _tensor_problems(parts, leaves)]
    return sorted(found)


def _leaf_problems(pieces: list[TensorPiece], shape: Shape) -> list[str]:
    depths = {len(piece.index) for piece in pieces}
    if len(depths) > 1 or max(depths) > len(shape):
        return [f"its pieces have indexes of {sorted(depths)} axes, it has the shape {list(shape)}"]
    if any(piece.transpose for piece in pieces) and len(shape) - max(depths) < 2:
        return [f"it is to be transposed, and has the shape {list(shape)}"]
    needed = set(product(*map(range, shape[: max(depths)])))
    given = Counter(piece.index for piece in pieces)
    problems = [f"no piece has its index {list(index)}" for index in sorted(needed - given.keys())[:1]]
    problems += [f"it has no index {list(index)}" for index in sorted(given.keys() - needed)[:1]]
    return problems + [f"{count} pieces have its index {list(index)}" for index, count in given.items() if count > 1]


def _tensor_problems(pieces: list[TensorPiece], leaves: Mapping[str, Shape]) -> list[str]:
    shapes = [compute_piece_shape(piece, leaves[piece.leaf_name]) for piece in pieces]
    parts = [piece.part for piece in pieces]
    if parts == [None]:
        return []
    if None in parts:
        return ["several pieces are the whole of it"]
    known = [part for part in parts if part is not None]
    if len({axis for axis, _, _ in known}) > 1:
        return ["its parts lie on several axes"]
    axis, place = known[0][0], 0
    for shape, (_, start, stop) in sorted(zip(shapes, known, strict=True), key=lambda pair: pair[1]):
        if start != place or axis >= len(shape) or stop - start != shape[axis]:
            return [f"its part {start}..{stop} of axis {axis} is the piece {list(shape)}, and begins after {place}"]
        place = stop
    others = {math.prod(shape[:axis]) * math.prod(shape[axis + 1 :]) for shape in shapes}
    return ["its parts have other sizes on their other axes"] if len(others) > 1 else []


@dataclass(frozen=True)
class TensorMatch:
    """What a leaf is read from.

    Attributes:
        pieces: by leaf, with the tensor that each is read from. A tensor may be shorter in its first axis than the
            piece: then it is its beginning. None: the piece stays as it is.
        notes: what was allowed, a line each.
    """

    pieces: Mapping[str, list[tuple[TensorPiece, TensorLocation | None]]]
    notes: tuple[str, ...]


def match_tensors(
    published: PublishedWeights, family: Family, shapes: Mapping[str, Shape], rule: InitFromConfig
) -> TensorMatch:
    """Find the tensors of each leaf; `shapes` are the leaves' by their names in the state.

    Raises `InvalidError` with a line for all that does not fit and is not allowed.
    """
    pieces = family.pieces()
    wrong = find_table_problems(pieces, shapes)
    if wrong:
        raise InvalidError("\n".join(f"the job's table of tensors: {line}" for line in wrong))
    found, problems = _by_our_names(published, family, rule)
    needed = compute_tensor_shapes(pieces, shapes)
    shared = {piece.tensor for piece in pieces if piece.part is not None}
    told: list[str] = []
    for line in family.differences(published.config):
        key = f"config.{line.partition(':')[0]}"
        (told if _is_allowed(key, rule) else problems).append(f"{CONFIG_FILE}: {line}")
    sources: dict[str, TensorLocation | None] = {}
    for name, shape in needed.items():
        sources[name], problem, begins = _source(found.get(name), shape, name not in shared)
        if problem is not None and _is_allowed(name, rule):
            told.append(f"{name}: {problem}; {begins}")
        elif problem is not None:
            problems.append(f"{name}: {problem}")
    problems += [f"{name}: is left over, the model has no such tensor" for name in found.keys() - needed.keys()]
    another = [line for line in problems if line.startswith(f"{CONFIG_FILE}: model_type:")]
    problems = another or problems  # of another family nothing else fits either
    if problems:
        raise InvalidError("\n".join(f"{published.store.url}: {line}" for line in sorted(problems)))
    by_leaf: dict[str, list[tuple[TensorPiece, TensorLocation | None]]] = defaultdict(list)
    for piece in pieces:
        by_leaf[piece.leaf_name].append((piece, sources[piece.tensor]))
    return TensorMatch(by_leaf, tuple(sorted(told)))


def _source(
    tensor: TensorLocation | None, needed: Shape, may_be_shorter: bool
) -> tuple[TensorLocation | None, str | None, str]:
    """What is read of a tensor that should have this shape; how it is not as it should be, and what becomes of it."""
    fresh = "it begins as at the job's init"
    if tensor is None:
        return None, f"is missing, the model needs {list(needed)}", fresh
    if tensor.dtype not in DTYPES:
        return None, f"is of type {tensor.dtype}, needs one of {', '.join(DTYPES)}", fresh
    if tensor.shape == needed:
        return tensor, None, ""
    other = f"has the shape {list(tensor.shape)}, the model needs {list(needed)}"
    if may_be_shorter and needed and tensor.shape[1:] == needed[1:] and tensor.shape[:1] < needed[:1]:
        return tensor, other, f"what is behind its first {tensor.shape[0]} begins as at the job's init"
    return None, other, fresh


def _is_allowed(name: str, rule: InitFromConfig) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in rule.allow_missing)


def _by_our_names(
    published: PublishedWeights, family: Family, rule: InitFromConfig
) -> tuple[dict[str, TensorLocation], list[str]]:
    """The tensors by the names of the table, and those of which two would have one name."""
    found: dict[str, TensorLocation] = {}
    called: dict[str, str] = {}
    names = published.tensors
    problems = [
        f"rename: no tensor begins with {begin}" for begin in rule.rename if not any(map(_begins(begin), names))
    ]
    for name, tensor in names.items():
        renamed = _renamed(name, rule.rename)
        known = None if renamed is None else family.known_as(renamed)
        if known is None:
            continue
        if known in found:
            problems.append(f"{known}: both {called[known]} and {name} would be it")
        found[known], called[known] = tensor, name
    return found, problems


def _renamed(name: str, rename: Mapping[str, str | None]) -> str | None:
    """A name by the longest of the given beginnings of it, whole parts of dotted names."""
    fitting = [begin for begin in rename if _begins(begin)(name)]
    if not fitting:
        return name
    longest = max(fitting, key=len)
    target = rename[longest]
    return None if target is None else (target + name[len(longest) :]).lstrip(".")


def _begins(begin: str) -> Callable[[str], bool]:
    return lambda name: f"{name}.".startswith(f"{begin}.")
