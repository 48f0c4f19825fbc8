"""Signs of how the code is built, measured: `python -m tests.repository.signs [ROOT]` prints them.

Not limits of taste but of drift: `test_signs.py` holds each at the value that was reached, so that it can only get
better. Measured are the packages `runner`, `experiments` and `launch`.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("runner", "experiments", "launch")


@dataclass(frozen=True)
class Signs:
    """What was counted in one tree.

    Attributes:
        lines_of_largest_class: with its name.
        methods_of_largest_class: with its name, properties counted too.
        late_attributes: `Class.name` of each attribute that a method other than `__init__` is the first to set; what
            the `__init__` of a base class sets is not late.
        imports_by_string: `file:line` of each module that is imported by its name in a string.
        long_functions: `file:function` of each function over 50 lines.
        any_dictionaries: how often `dict[str, Any]` stands in annotations and code.
    """

    lines_of_largest_class: tuple[int, str]
    methods_of_largest_class: tuple[int, str]
    late_attributes: list[str]
    imports_by_string: list[str]
    long_functions: list[str]
    any_dictionaries: int


def measure(root: Path) -> Signs:
    """Count the signs of the tree below `root`."""
    files = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    trees = {path: ast.parse(path.read_text()) for path in files}
    nodes = {path: list(ast.walk(tree)) for path, tree in trees.items()}
    classes = [node for found in nodes.values() for node in found if isinstance(node, ast.ClassDef)]
    by_name = {node.name: node for node in classes}
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return Signs(
        max((_num_lines(node), node.name) for node in classes),
        max((sum(isinstance(part, functions) for part in node.body), node.name) for node in classes),
        sorted(name for node in classes for name in _late_attributes(node, by_name)),
        [f"{path.relative_to(root)}:{line}" for path, found in nodes.items() for line in _imports_by_string(found)],
        [
            f"{path.relative_to(root)}:{node.name}"
            for path, found in nodes.items()
            for node in found
            if isinstance(node, functions) and _num_lines(node) > 50
        ],
        sum(ast.unparse(tree).count("dict[str, Any]") for tree in trees.values()),
    )


def _num_lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _late_attributes(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    late = {name for method in methods if method.name != "__init__" for name in _attributes_set(method)}
    return {f"{node.name}.{name}" for name in late - _early_attributes(node, classes)}


def _early_attributes(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Attributes that exist once the object is made: of the class body, of `__init__`, and of base classes."""
    early: set[str] = set()
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.value is not None:
            early.add(part.target.id)
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            early |= set(_attributes_set(part))
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            early |= _early_attributes(classes[base.id], classes)
    return early


def _attributes_set(method: ast.FunctionDef) -> Iterator[str]:
    for part in ast.walk(method):
        is_set = isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
        if is_set and isinstance(part.value, ast.Name) and part.value.id == "self":
            yield part.attr


def _imports_by_string(nodes: list[ast.AST]) -> Iterator[int]:
    for part in nodes:
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute | ast.Name):
            name = part.func.attr if isinstance(part.func, ast.Attribute) else part.func.id
            if name.endswith("import_module"):
                yield part.lineno


def lines(signs: Signs) -> list[str]:
    """For a person."""
    size, largest = signs.lines_of_largest_class
    number, fullest = signs.methods_of_largest_class
    return [
        f"largest class: {largest}, {size} lines; most methods: {fullest}, {number}",
        f"attributes first set outside __init__: {len(signs.late_attributes)}: {', '.join(signs.late_attributes)}",
        f"imports by string: {len(signs.imports_by_string)}: {', '.join(signs.imports_by_string)}",
        f"functions over 50 lines: {len(signs.long_functions)}: {', '.join(signs.long_functions)}",
        f"dict[str, Any]: {signs.any_dictionaries}",
    ]


if __name__ == "__main__":
    print("\n".join(lines(measure(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT))))
