"""Averages of the parameters that ride along in a state: what the leaves of a checkpoint call them."""

from collections.abc import Collection, Iterable

from runner.errors import InvalidError
from runner.record import PARAMS

_BEGIN = "riders.ema."  # of their names: then the decay, and what `params` has
_PARAMS = f"{PARAMS}."


def averages(leaves: Collection[str]) -> list[str]:
    """Those that are there whole, as `ema_<decay>`."""
    params = [name.removeprefix(PARAMS) for name in leaves if name.startswith(_PARAMS)]
    begins = {name.removesuffix(param) for name in leaves for param in params[:1] if name.endswith(param)}
    found = [begin for begin in begins if begin.startswith(_BEGIN)]
    whole = [begin for begin in found if all(f"{begin}{param}" in leaves for param in params)]
    return sorted(f"ema_{begin.removeprefix(_BEGIN)}" for begin in whole)


def refuse_unknown(leaves: Collection[str], weights: str) -> None:
    """Raise `InvalidError`, saying which there are, if `weights` are neither those that are trained nor an average."""
    known = [PARAMS, *averages(leaves)]
    if weights not in known:
        raise InvalidError(f"got weights {weights!r}, has {', '.join(known)}; needs one of them")


def names_of(weights: str, names: Iterable[str]) -> dict[str, str]:
    """By the names of leaves: what the leaf is called that takes its place in these weights."""
    prefix = _BEGIN + weights.removeprefix("ema_")
    return {
        name: f"{prefix}.{name.removeprefix(_PARAMS)}" if weights != PARAMS and name.startswith(_PARAMS) else name
        for name in names
    }
