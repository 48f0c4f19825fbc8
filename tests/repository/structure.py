"""Measurements of the structure and documentation of the code.

    python -m tests.repository.structure [ROOT] [--package NAME]

prints them for the packages `runner`, `experiments` and `launch` of a checkout, or for one package of it.
`test_structure.py` bounds some of them by the values reached so far, so that they can only improve.
"""

import argparse
import ast
import collections
import functools
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

MAIN_CLASSES = ("BaseTrainer", "TrainRecipe", "Session", "Programs", "RestoreableJob", "Recipe", "Lifecycle")
TRAINING = ("runner/train", "runner/train_recipe.py", "runner/session.py", "runner/trainer.py")
# Words that mention a feature in code.
FEATURES = {
    "averages": r"ema",
    "noise scale": r"noise_scale",
    "replay": r"replay",
    "skipped updates": r"skip_update|skip_spikes|judge",
    "roll-back": r"roll_back",
    "adapter": r"adapter|lora",
    "same bits": r"same_bits|is_ordered",
    "kernel tests": r"kernel_check|kernel_cases",
    "stages": r"stages?",
    "forks": r"forks?|fork_from",
}

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
        classes: (lines, own methods) of the classes of `MAIN_CLASSES`.
        feature_files: files of `runner` whose code mentions a feature, by feature of `FEATURES`.
        callables: functions that are passed to constructors where a job trains (`TRAINING`).
        instance_dictionaries: number of `vars(self)`.
        line_shares: comments and docstrings as shares of all lines.
        test_lines: lines of tests, without benchmarks.
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
    classes: dict[str, tuple[int, int]]
    feature_files: dict[str, int]
    callables: int
    instance_dictionaries: int
    line_shares: tuple[float, float]
    test_lines: int


def measure(root: Path, package: str = "") -> Structure:
    """Measure the tree below `root`, or its dotted `package` alone.

    Uses of private functions are counted in the whole tree without tests.
    """
    everything = {path: path.read_text() for name in PACKAGES for path in sorted((root / name).rglob("*.py"))}
    parent = root.joinpath(*package.split(".")) if package else root
    texts = {path: text for path, text in everything.items() if path.is_relative_to(parent) or path.stem == parent.name}
    texts = {path: text for path, text in texts.items() if path.is_relative_to(parent) or path.parent == parent.parent}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    walked = {path: list(ast.walk(tree)) for path, tree in trees.items()}
    nodes = [(path, node) for path, found in walked.items() for node in found]
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
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id == "dict"
            and ast.unparse(node) == "dict[str, Any]"
            for _, node in nodes
        ),
        classes={name: _measure_class(classes[name]) for name in MAIN_CLASSES if name in classes},
        feature_files=_count_feature_files(
            [found for path, found in walked.items() if path.is_relative_to(root / "runner")]
        ),
        callables=sum(
            _count_callables(walked[path]) for path in trees if str(path.relative_to(root)).startswith(TRAINING)
        ),
        instance_dictionaries=sum(_is_instance_dictionary(node) for _, node in nodes),
        line_shares=(comments / sum(sizes), sum(text.count("\n") + 1 for _, _, text in documented) / sum(sizes)),
        test_lines=sum(
            path.read_text().count("\n")
            for path in (root / "tests").rglob("*.py")
            if path.relative_to(root / "tests").parts[0] != "benchmarks"
        ),
    )


def _is_instance_dictionary(node: ast.AST) -> bool:
    is_vars = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars"
    return is_vars and ast.unparse(node) == "vars(self)"


def _measure_class(node: ast.ClassDef) -> tuple[int, int]:
    """Return (lines, own methods) of a class."""
    methods = [part for part in node.body if isinstance(part, _FUNCTIONS)]
    return (node.end_lineno or node.lineno) - node.lineno + 1, len(methods)


def _count_feature_files(files: list[list[ast.AST]]) -> dict[str, int]:
    """Return the number of files whose code mentions each feature, without docstrings and comments."""
    found = dict.fromkeys(FEATURES, 0)
    for nodes in files:
        code = " ".join(_list_words(nodes))
        for feature, words in FEATURES.items():
            found[feature] += re.search(rf"(?<![a-z])({words})(?![a-z])", code, re.IGNORECASE) is not None
    return found


@functools.cache
def _list_word_fields(kind: type[ast.AST]) -> list[str]:
    """Return the fields of a kind of node that may hold a name."""
    return [field for field in kind._fields if field in ("id", "attr", "arg", "name", "module")]


def _list_words(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the names and strings of the code of a module; docstrings are expressions by themselves."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        for field in _list_word_fields(type(node)):
            if isinstance(word := getattr(node, field), str):
                yield word
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def _count_callables(nodes: list[ast.AST]) -> int:
    """Return how many functions of a module, lambdas included, it passes to constructors of classes."""
    defined = [node for node in nodes if isinstance(node, _FUNCTIONS)]
    functions = {node.name for node in defined}
    properties = {node.name for node in defined if any("property" in ast.unparse(each) for each in node.decorator_list)}
    count = 0
    for node in nodes:
        if isinstance(node, ast.Call) and re.match(r"_?[A-Z][a-z]", ast.unparse(node.func).rpartition(".")[2]):
            for given in [*node.args, *(keyword.value for keyword in node.keywords)]:
                name = ast.unparse(given).rpartition(".")[2]
                is_function = isinstance(given, ast.Name | ast.Attribute) and name in functions - properties
                is_partial = isinstance(given, ast.Call) and ast.unparse(given.func).endswith("partial")
                count += isinstance(given, ast.Lambda) or is_function or is_partial
    return count


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
    early = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}  # such as a cached property
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
        *(f"{name}: {lines} lines, {methods} own methods" for name, (lines, methods) in found.classes.items()),
        f"files of runner that mention a feature: {statistics.median(found.feature_files.values()):g} in the median, "
        + ", ".join(f"{name} {number}" for name, number in found.feature_files.items()),
        f"functions passed to constructors where a job trains: {found.callables}",
        f"vars(self): {found.instance_dictionaries}",
        "shares of lines: comments {:.1%}, docstrings {:.1%}".format(*found.line_shares),
        f"lines of tests without benchmarks: {found.test_lines:,}",
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--package", default="", help="dotted name, such as runner.data")
    parsed = parser.parse_args()
    print("\n".join(format_lines(measure(parsed.root, parsed.package))))
