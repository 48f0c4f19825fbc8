"""Measurements of the structure and documentation of the code.

    python -m tests.repository.structure [ROOT] [--package NAME]

prints them for the packages `runner`, `experiments` and `launch` of a checkout, or for one package of it.
`test_structure.py` bounds some of them by the values reached so far, so that they can only improve.
"""

import argparse
import ast
import collections
import io
import re
import statistics
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("runner", "experiments", "launch")

# First words of docstrings that are clauses instead of noun phrases or imperative sentences.
CLAUSE_OPENINGS = ("What", "Which", "Whether", "Of", "Those", "As", "Who", "Whoever", "How", "Where", "Whose", "See")

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Structure:
    """Counts over one tree.

    Attributes:
        files: number of source files.
        lines: number of lines.
        median_lines: median lines of a file.
        small_files: number of files under 40 lines.
        public_names: number of public functions and classes at the top level of modules.
        repeated_names: public classes of one name in several modules, with the modules.
        private_functions: number of functions whose name begins with `_`, dunder methods left out.
        called_once: how many of these are named only once besides their definition.
        docstrings: number of docstrings.
        openings: docstrings by first word, for the words of `CLAUSE_OPENINGS`.
        clause_docstrings: `file:line` of each docstring that begins with one of these.
        comment_share: comment lines over lines that hold code.
        late_attributes: `Class.name` of each attribute that is first set by a method other than `__init__`; those
            set by the `__init__` of a base class are not late.
        imports_by_string: `file:line` of each module that is imported by its name in a string.
        any_dictionaries: number of `dict[str, Any]` in annotations and code.
    """

    files: int
    lines: int
    median_lines: float
    small_files: int
    public_names: int
    repeated_names: dict[str, list[str]]
    private_functions: int
    called_once: int
    docstrings: int
    openings: dict[str, int]
    clause_docstrings: list[str]
    comment_share: float
    late_attributes: list[str]
    imports_by_string: list[str]
    any_dictionaries: int


def measure(root: Path, package: str = "") -> Structure:
    """Measure the tree below `root`, or its dotted `package` alone.

    Uses of private functions are counted in the whole tree without tests.
    """
    everything = {path: path.read_text() for name in PACKAGES for path in sorted((root / name).rglob("*.py"))}
    parent = root.joinpath(*package.split(".")) if package else root
    texts = {path: text for path, text in everything.items() if path.is_relative_to(parent) or path.stem == parent.name}
    texts = {path: text for path, text in texts.items() if path.is_relative_to(parent) or path.parent == parent.parent}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    classes = {node.name: node for _, node in nodes if isinstance(node, ast.ClassDef)}
    top = [
        (path, node)
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_")
    ]
    homes: dict[str, list[str]] = collections.defaultdict(list)
    for path, node in top:
        if isinstance(node, ast.ClassDef):
            homes[node.name].append(str(path.relative_to(root)))
    used = collections.Counter(word for text in everything.values() for word in re.findall(r"\b_\w+", text))
    private = [node.name for _, node in nodes if isinstance(node, _FUNCTIONS) and re.match(r"_[^_]", node.name)]
    documented = [
        (path, node, text)
        for path, node in nodes
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Module)) and (text := ast.get_docstring(node))
    ]
    opened = [(path, node, text.split()[0]) for path, node, text in documented if text.split()[0] in CLAUSE_OPENINGS]
    comments, code = map(sum, zip(*(_comment_and_code_lines(text) for text in texts.values()), strict=True))
    sizes = [text.count("\n") for text in texts.values()]
    return Structure(
        files=len(texts),
        lines=sum(sizes),
        median_lines=statistics.median(sizes),
        small_files=sum(size < 40 for size in sizes),
        public_names=len(top),
        repeated_names={name: where for name, where in sorted(homes.items()) if len(where) > 1},
        private_functions=len(private),
        called_once=sum(used[name] == 2 for name in private),
        docstrings=len(documented),
        openings=dict(collections.Counter(word for _, _, word in opened).most_common()),
        clause_docstrings=[f"{path.relative_to(root)}:{getattr(node, 'lineno', 1)}" for path, node, _ in opened],
        comment_share=comments / max(code, 1),
        late_attributes=sorted(name for node in classes.values() for name in _late_attributes(node, classes)),
        imports_by_string=[
            f"{path.relative_to(root)}:{node.lineno}" for path, node in nodes if _is_import_by_string(node)
        ],
        any_dictionaries=sum(
            isinstance(node, ast.Subscript) and ast.unparse(node) == "dict[str, Any]" for _, node in nodes
        ),
    )


def _comment_and_code_lines(text: str) -> tuple[int, int]:
    """Return the numbers of comment lines and of code lines, without docstrings."""
    comments, code = set(), set()
    skipped = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    is_start_of_statement = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in skipped:
            if not (token.type == tokenize.STRING and is_start_of_statement):
                code |= set(range(token.start[0], token.end[0] + 1))
            is_start_of_statement = False
        elif token.type == tokenize.NEWLINE:
            is_start_of_statement = True
    return len(comments), len(code)


def _late_attributes(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    late = {name for method in methods if method.name != "__init__" for name in _attributes_set(method)}
    return {f"{node.name}.{name}" for name in late - _early_attributes(node, classes)}


def _early_attributes(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return the attributes set in the class body, in `__init__` and by base classes."""
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


def _is_import_by_string(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
    return name.endswith("import_module")


def format_lines(found: Structure) -> list[str]:
    """Format the measurements for the terminal."""
    return [
        f"source files: {found.files}, of {found.median_lines:g} lines in the median, {found.lines:,} lines in all; "
        f"{found.small_files} under 40 lines",
        f"public top-level names: {found.public_names}",
        f"public classes of one name: {found.repeated_names}",
        f"private functions: {found.private_functions}, called once: {found.called_once}",
        f"docstrings: {found.docstrings}; by clause opening: {sum(found.openings.values())} {found.openings}",
        *(f"    {place}" for place in found.clause_docstrings[:20]),
        f"comments: one line in {1 / max(found.comment_share, 1e-9):.0f} of code",
        f"attributes first set outside __init__: {len(found.late_attributes)}: {', '.join(found.late_attributes)}",
        f"imports by string: {len(found.imports_by_string)}: {', '.join(found.imports_by_string)}",
        f"dict[str, Any]: {found.any_dictionaries}",
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--package", default="", help="dotted name, such as runner.data")
    parsed = parser.parse_args()
    print("\n".join(format_lines(measure(parsed.root, parsed.package))))
