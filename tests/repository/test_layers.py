"""The layers in runner/__init__.py and in each package's `__init__`: a module imports only from modules above it."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import runner

ROOT = Path(runner.__file__).parents[1]
ORDER = re.findall(r"^(\w+) {2,}\S", runner.__doc__, re.MULTILINE)
FILES = sorted((ROOT / "runner").rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES}
ALL_FILES = sorted(path for package in ("runner", "experiments", "launch") for path in (ROOT / package).rglob("*.py"))
LAUNCH = [path for path in ALL_FILES if path.is_relative_to(ROOT / "launch")]
PACKAGES = sorted(
    path.parent for path in [*FILES, *LAUNCH] if path.name == "__init__.py" and path.parent != ROOT / "runner"
)


def get_layer(path: Path) -> str:
    """Return the layer of a file, such as `data` for runner/data/corpus.py and `spec` for runner/spec.py."""
    return path.relative_to(ROOT / "runner").with_suffix("").parts[0]


@functools.cache
def list_imports(path: Path) -> frozenset[str]:
    """Return the dotted names that a file imports anywhere, by a statement or by a module's name in a string."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
        elif isinstance(node, ast.Constant) and node.value in MODULES:
            found.add(node.value)
    return frozenset(found)


def list_imported_layers(path: Path) -> set[str]:
    public = {name: home.split(".")[1] for name, home in runner._HOMES.items()}
    names = [name.split(".") for name in list_imports(path) if name.split(".")[0] == "runner"]
    return {public.get(parts[1], parts[1]) for parts in names if len(parts) > 1} - {"TYPE_CHECKING"}


def test_the_package_map_lists_exactly_the_existing_modules():
    modules = {get_layer(path) for path in FILES} - {"__init__"}
    assert sorted(ORDER) == sorted(modules)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_from_modules_above_it(path):
    layer = get_layer(path)
    if layer == "__init__":
        return
    own_package = {layer} if (ROOT / "runner" / layer).is_dir() else set()
    assert list_imported_layers(path) <= set(ORDER[: ORDER.index(layer)]) | own_package


@pytest.mark.parametrize("directory", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_of_a_package_import_only_from_modules_above_them(directory):
    text = ast.get_docstring(ast.parse((directory / "__init__.py").read_text()))
    order = re.findall(r"^- `(\w+)`", text, re.MULTILINE)
    present = {path.stem for path in directory.glob("*.py")} | {path.parent.name for path in directory.glob("*/*.py")}
    assert sorted([*order, "__init__"]) == sorted(present)
    prefix = list(directory.relative_to(ROOT).parts)
    for module in order:
        files = [
            path for path in ALL_FILES if path.is_relative_to(directory / module) or path == directory / f"{module}.py"
        ]
        names = [name.split(".") for path in files for name in list_imports(path)]
        inner = {parts[len(prefix)] for parts in names if parts[: len(prefix)] == prefix and len(parts) > len(prefix)}
        assert inner <= set(order[: order.index(module) + 1]), module


def test_a_module_named_in_a_string_counts_as_imported():
    drivers = {f"runner.storage.{name}" for name in ("gcs", "s3", "azure")}
    assert drivers <= list_imports(ROOT / "runner" / "storage" / "url.py")


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_uses_pickle_and_the_runner_never_imports_its_users(path):
    roots = {name.split(".")[0] for name in list_imports(path)}
    assert not roots & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    if path in FILES:
        assert not roots & {"experiments", "launch", "tests"}


@pytest.mark.parametrize("path", LAUNCH, ids=lambda path: str(path.relative_to(ROOT)))
def test_launch_imports_only_light_layers_of_the_runner(path):
    roots = {name.split(".")[0] for name in list_imports(path)}
    assert not roots & {"jax", "flax", "optax", "orbax", "experiments"}
    assert list_imported_layers(path) <= {
        "errors",
        "command_line",
        "console",
        "process",
        "spec",
        "config",
        "accelerator",
        "storage",
        "attempts",
        "history",
    }


@pytest.mark.parametrize(
    "module", ["runner", "runner.spec", "runner.config", "runner.errors", "runner.history.reader", "launch.app"]
)
def test_validating_a_spec_does_not_import_jax(module):
    heavy = "{'jax', 'flax', 'optax', 'orbax', 'numpy', 'wandb', 'grain'}"
    program = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
