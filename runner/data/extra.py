"""Packages that are an extra of this one: imported when a spec asks for what they do."""

import importlib
from types import ModuleType

from runner.errors import InvalidError


def import_extra(module: str, extra: str) -> ModuleType:
    """Import `module`, which `runner[extra]` brings. Raises `InvalidError` saying how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InvalidError(f"needs the package {error.name}: pip install 'runner[{extra}]'") from error
