"""Policies of keys, which say beside each key what depends on it during a run: `Annotated[int, Policy.FREE]`.

A policy of a section holds for all keys in it. The reference in specs/README.md shows them.
"""

import enum
import functools
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel


class Policy(enum.Enum):
    """Statement about a key of `config`. A key without any never changes during a run, and no array depends on it."""

    FREE = enum.auto()  # a resumed run may have another value, which changes its results by rounding at most
    STAGE = enum.auto()  # a stage of the run may set it (`config.stages`)
    STATE = enum.auto()  # shapes and types of the arrays of the state depend on it
    NO_STATE = enum.auto()  # shapes and types do not depend on it, although its section is marked `STATE`
    # The program of a step depends on it only by other facts of the program, such as the shapes of a batch
    # (`runner.train.program_history`).
    NO_PROGRAM = enum.auto()


@functools.cache
def list_keys(model: type[BaseModel], policy: Policy) -> tuple[str, ...]:
    """Return the dotted keys of a model that are marked with a policy, without those inside a marked section.

    Indices of lists are left out: `data.mixture.max_epochs` is the key of every source of the mixture. Sections by
    name, such as validation sets, are not searched.
    """
    found: list[str] = []
    for name, field in model.model_fields.items():
        if policy in field.metadata:
            found.append(name)
        else:
            for inner in iterate_models(field.annotation):
                found += [f"{name}.{key}" for key in list_keys(inner, policy)]
    return tuple(dict.fromkeys(found))


def iterate_models(annotation: Any, everywhere: bool = False) -> Iterator[type[BaseModel]]:
    """Yield the models of the values of a key: one, alternatives, or those in a list; `everywhere`: in mappings too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif everywhere or get_origin(annotation) in (Union, types.UnionType, list):
        for argument in get_args(annotation):
            yield from iterate_models(argument, everywhere)
