"""Modules in the working directory that hide others of the same name. Imports the standard library only.

`python -m runner` looks for every module in the working directory first, so that a user's job is found there. A file
`random.py` or a folder `jax/` then takes the place of the module that a library means.
"""

import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType


def describe_hiding_modules(error: BaseException) -> str:
    """Return the modules of the working directory that may have caused an error, as one clause; empty if none has."""
    text = f"{error} {getattr(error, 'name', '')}"
    files = set()
    trace = error.__traceback__
    while trace is not None:
        files.add(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    found = [
        f"{name} is {file} here, which hides {hidden}"
        for name, file, hidden in _list_hiding_modules()
        if name in text or str(file) in files
    ]
    return "; ".join(found) and f"{'; '.join(found)}; rename it, or run in another directory"


def describe_hidden_folder(module: str) -> str:
    """Return the file or folder of the working directory that a loaded module of its name hides; empty if none."""
    name = module.partition(".")[0]
    place = _find_place(sys.modules.get(name))
    here = next((path for path in (Path(name), Path(f"{name}.py")) if path.exists()), None)
    if place is None or here is None or place.resolve() in (here.resolve(), here.resolve().parent / name):
        return ""
    return f"{name} is the package in {place}, which hides {here.resolve()}; give yours another name"


def _list_hiding_modules() -> Iterator[tuple[str, Path, str]]:
    """Yield name and file of each loaded module of the working directory that hides another, and what that is."""
    try:
        here = Path.cwd().resolve()
    except FileNotFoundError:  # the directory was removed
        return
    elsewhere = [path for path in sys.path if Path(path or os.curdir).resolve() != here]
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if (
            "." in name
            or file is None
            or Path(file).resolve() not in (here / f"{name}.py", here / name / "__init__.py")
        ):
            continue
        spec = PathFinder.find_spec(name, elsewhere)
        if spec is not None and spec.origin is not None:
            is_of_python = name in sys.stdlib_module_names
            yield name, Path(file), "Python's own module" if is_of_python else f"the one in {spec.origin}"


def _find_place(module: ModuleType | None) -> Path | None:
    """Return the directory of a package, or of the file of a module."""
    paths = [*getattr(module, "__path__", []), getattr(module, "__file__", None)]
    return next((Path(path) for path in paths if path is not None), None)
