"""Which tensor of what was found goes into which leaf, and what is missing, left over or of another shape."""

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runner.errors import InvalidError
from runner.spec import InitFrom
from runner.weights.directory import CONFIG, Published
from runner.weights.family import Family, Piece, Shape, table_problems, tensor_shapes
from runner.weights.header import DTYPES, Tensor


@dataclass(frozen=True)
class Match:
    """What a leaf is read from.

    Attributes:
        pieces: by leaf, with the tensor that each is read from. A tensor may be shorter in its first axis than the
            piece: then it is its beginning. None: the piece stays as it is.
        told: what was allowed, a line each.
    """

    pieces: Mapping[str, list[tuple[Piece, Tensor | None]]]
    told: tuple[str, ...]


def match(published: Published, family: Family, shapes: Mapping[str, Shape], rule: InitFrom) -> Match:
    """Find the tensors of each leaf; `shapes` are the leaves' by their names in the state.

    Raises `InvalidError` with a line for all that does not fit and is not allowed.
    """
    pieces = family.pieces()
    wrong = table_problems(pieces, shapes)
    if wrong:
        raise InvalidError("\n".join(f"the job's table of tensors: {line}" for line in wrong))
    found, problems = _by_our_names(published, family, rule)
    needed = tensor_shapes(pieces, shapes)
    shared = {piece.tensor for piece in pieces if piece.part is not None}
    told: list[str] = []
    for line in family.differences(published.config):
        key = f"config.{line.partition(':')[0]}"
        (told if _is_allowed(key, rule) else problems).append(f"{CONFIG}: {line}")
    sources: dict[str, Tensor | None] = {}
    for name, shape in needed.items():
        sources[name], problem, begins = _source(found.get(name), shape, name not in shared)
        if problem is not None and _is_allowed(name, rule):
            told.append(f"{name}: {problem}; {begins}")
        elif problem is not None:
            problems.append(f"{name}: {problem}")
    problems += [f"{name}: is left over, the model has no such tensor" for name in found.keys() - needed.keys()]
    another = [line for line in problems if line.startswith(f"{CONFIG}: model_type:")]
    problems = another or problems  # of another family nothing else fits either
    if problems:
        raise InvalidError("\n".join(f"{published.store.url}: {line}" for line in sorted(problems)))
    by_leaf: dict[str, list[tuple[Piece, Tensor | None]]] = defaultdict(list)
    for piece in pieces:
        by_leaf[piece.leaf_name].append((piece, sources[piece.tensor]))
    return Match(by_leaf, tuple(sorted(told)))


def _source(tensor: Tensor | None, needed: Shape, may_be_shorter: bool) -> tuple[Tensor | None, str | None, str]:
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


def _is_allowed(name: str, rule: InitFrom) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in rule.allow_missing)


def _by_our_names(published: Published, family: Family, rule: InitFrom) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors by the names of the table, and those of which two would have one name."""
    found: dict[str, Tensor] = {}
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
