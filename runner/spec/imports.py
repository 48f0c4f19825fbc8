"""Imports by name: the user's classes (`module:Class`), and packages that are extras of this one."""

import importlib
import importlib.util
import os
import pkgutil
import re
import shlex
import sys
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType

import runner
from runner.errors import (
    InvalidError,
    describe_hidden_folder,
    describe_hiding_modules,
    suggest_choices,
    suggest_nearest,
)
from runner.spec.document import Document
from runner.spec.model import CLASS_PATH, JOB_PATTERN

_MAX_PLACES = 3  # of a search for a module, in a message
# Extras for users, each with packages that tell whether it is installed.
EXTRA_PACKAGES = {
    "gcs": ("google",),
    "s3": ("boto3", "botocore"),
    "azure": ("azure",),
    "tpu": ("libtpu",),
    "tpu-plan": ("libtpu",),
    "cuda": ("jax_cuda12_plugin", "pynvml"),
    "gpu-plan": ("jax_cuda12_plugin",),
    "parquet": ("pyarrow",),
    "sentencepiece": ("sentencepiece",),
    "tiktoken": ("tiktoken",),
    "lm-eval": ("lm_eval",),
    "hub": ("huggingface_hub",),
    "chat": ("jinja2",),
    "search": ("optuna",),
}


def format_install(extra: str | None, package: str = "") -> str:
    """Return the command that installs an extra, or a package of the base install, into this installation.

    A checkout is installed again, with the extra. Without one the command names the packages themselves, because
    `runner` on PyPI is another project.
    """
    assert extra is None or extra in EXTRA_PACKAGES
    checkout = Path(runner.__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        place = "." if Path.cwd() == checkout else str(checkout)
        return f"pip install -e {shlex.quote(place if extra is None else f'{place}[{extra}]')}"
    if extra is None:
        return shlex.join(["pip", "install", package])
    try:
        requirements = metadata.requires("runner") or []
    except metadata.PackageNotFoundError:
        requirements = []
    marked = re.compile(rf"""(.*?)\s*;.*\bextra == ["']{re.escape(extra)}["']""")
    packages = [match[1] for match in map(marked.match, requirements) if match is not None]
    return shlex.join(["pip", "install", *(packages or EXTRA_PACKAGES[extra])])


def is_extra_installed(extra: str) -> bool:
    """Return True if the packages of an extra can be imported. Imports none of them."""
    # A directory without a module, as another package may leave behind, has no loader.
    found = [importlib.util.find_spec(package) for package in EXTRA_PACKAGES[extra]]
    return all(spec is not None and spec.loader is not None for spec in found)


def import_extra(module: str) -> ModuleType:
    """Import a module of a package that an extra installs, or a module of ours that imports such a package.

    Raises `InvalidError` with the command that installs a missing package.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        extra = next((extra for extra, packages in EXTRA_PACKAGES.items() if package in packages), None)
        command = format_install(extra, package)
        raise InvalidError(f"needs the package {error.name}; install it with {command}") from error


def load_job_class(document: Document, base: type) -> type:
    """Import the class that `job` of a valid document names.

    Raises `SpecError` if it is not a subclass of `base`, or the document may not name its module.
    """
    with document.errors_at("job"):
        document.validate_trust(document.data["job"])
        return load_class(document.data["job"], base)


def is_class_path(name: str) -> bool:
    """Return True if `name` is `module:Class`, the name of a class or function, and no file has this name."""
    return CLASS_PATH.fullmatch(name) is not None and not os.path.exists(name)


def load_class(text: str, base: type) -> type:
    """Import `module:Class`, a subclass of `base`.

    Raises `InvalidError` if there is no such class, or importing the module failed.
    """
    found = load_attribute(text, lambda value: isinstance(value, type) and issubclass(value, base))
    if not (isinstance(found, type) and issubclass(found, base)):
        others = [
            name
            for name, value in vars(sys.modules[text.partition(":")[0]]).items()
            if isinstance(value, type) and issubclass(value, base) and name != base.__name__
        ]
        hint = suggest_choices(text.partition(":")[2], others)
        raise InvalidError(f"{text} is not a subclass of {base.__name__}{hint}")
    return found


def load_attribute(text: str, fits: Callable[[object], bool]) -> object:
    """Import `module:Name` and return the attribute. Only names whose value `fits` are suggested for a wrong one.

    Raises `InvalidError` if there is no such name, or importing the module failed.
    """
    module_name, _, class_name = text.partition(":")
    # A console script does not have the working directory on its path, and the user's module is there.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything, and it ends here
        reason = _describe_import_error(module_name, error)
        hiding = describe_hiding_modules(error) or describe_hidden_folder(module_name)
        raise InvalidError("; ".join(filter(None, (reason, hiding)))) from None
    found: object = getattr(module, class_name, None)
    if found is None:
        fitting = [name for name, value in vars(module).items() if fits(value)]
        hint = suggest_choices(class_name, fitting)
        hidden = describe_hidden_folder(module_name)
        raise InvalidError(f"module {module_name} has no {class_name}{hint}{hidden and f'; {hidden}'}")
    return found


def list_former_paths(found: type) -> tuple[str, ...]:
    """Return the `module:Class` paths that a class had earlier, by its own attribute `former_paths`.

    A subclass does not inherit them: a run of the class is no run of the subclass. Raises `InvalidError` if the
    attribute is not a sequence of such paths.
    """
    paths = vars(found).get("former_paths", ())
    if not isinstance(paths, tuple | list) or not all(re.fullmatch(JOB_PATTERN, str(path)) for path in paths):
        raise InvalidError(f"{found.__name__}.former_paths is {paths!r}, needs paths, as ('old_module:Class',)")
    return tuple(paths)


def _describe_import_error(module_name: str, error: BaseException) -> str:
    """Return the reason why an import failed: no such module, or the error in the user's code, and its location."""
    # Only a part of the requested name means a wrong name; any other missing module is a bug inside the user's module.
    if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
        package, _, missing = str(error.name).rpartition(".")
        search = getattr(sys.modules.get(package), "__path__", []) if package else [os.getcwd()]
        modules = [module.name for module in pkgutil.iter_modules(search)]
        prefix = f"{package}." if package else ""
        if package:
            return f"no module {error.name}{suggest_nearest(missing, modules, prefix)}"
        # The user's module is in the working directory or on PYTHONPATH; modules of Python itself are not.
        own = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]
        places = [
            place
            for place in sys.path
            if place and "__path_hook__" not in place and not any(map(Path(place).resolve().is_relative_to, own))
        ]
        looked = ", ".join([*dict.fromkeys([os.getcwd(), *places])][:_MAX_PLACES])
        advice = (
            suggest_nearest(missing, [*modules, "experiments"], prefix)
            or "; start where it lies, or name its directory in PYTHONPATH"
        )
        return f"no module {error.name} in {looked} or among the installed packages{advice}"
    if isinstance(error, SyntaxError):
        where, reason = f"{error.filename}:{error.lineno}", error.msg
    else:
        # Frames of the import machinery would hide the line of the user's file.
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
        where, reason = f"{frames[-1].filename}:{frames[-1].lineno}", str(error).partition("\n")[0]
    return f"importing {module_name} raised {type(error).__name__}: {reason} (at {where})"
