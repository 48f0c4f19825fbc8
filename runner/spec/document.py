"""Specs as the user wrote them: strict YAML with the location of every key, `--set` overrides, and messages about both.

A document is one YAML document of plain values, in which every key occurs once. This module validates nothing and
depends on no key of a spec.
"""

import contextlib
import copy
import difflib
import hashlib
import importlib.util
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from runner.console import escape_unprintable
from runner.errors import FailedError, InvalidError, SpecError
from runner.spec.model import CLASS_PATH, ExecutionSpec, Section

KeyPath = tuple[str, ...]
_OWN_PACKAGES = ("experiments", "runner")
_HOME = Path(__file__).resolve().parents[2]  # directory of the installed packages of this project
_NAMED_KEY = re.compile(r"(?<![\w.])([a-z]\w*(?:\.\w+)*)=|^([a-z]\w*(?:\.\w+)*): ")  # in messages
_MAX_SUGGESTED = 1000  # files that are considered for a suggestion
_MAX_SHOWN_CHARACTERS = 100  # of a `--set` in messages
# PyYAML takes these for line breaks, as YAML 1.1 does, and drops a byte order mark at the beginning. In YAML 1.2 they
# are characters like any other, of which none may be lost.
_BREAKS = "\x85\u2028\u2029"
_MARKED = f"{_BREAKS}\ufeff"


@dataclass(frozen=True)
class SpecLocation:
    """Location where a value was written: `specs/x.yaml:14`, or the `--set` that gave it."""

    text: str  # the location as messages show it
    line: int = 0  # line in the file, 0 for a `--set`
    key: str = ""  # dotted key that `text` already contains, for a `--set`

    def format_problem(self, path: KeyPath, message: str) -> str:
        """Return `location: key: message` as one line, without a key that the location or the message contains."""
        key = ".".join(path)
        # A message may begin with its key, or the end of it: `data.source=x.txt: no file matches`.
        ends = (".".join(path[n:]) for n in range(len(path)))
        named = next((end for end in ends if message.startswith((f"{end}=", f"{end}.", f"{end}: "))), None)
        if named is not None and message[len(named)] in ".:":
            message = message[len(named) + 1 :].lstrip()
        elif named is not None and key != self.key:
            key, message = "", f"{key}{message[len(named) :]}"
        elif named is not None:
            given = f"{named}={self.text.partition('=')[2]}"
            rest = message.removeprefix(given)
            message = rest.lstrip(": ") if message.startswith(given) and rest[:1] in (":", " ") else message
        # A message is one line even if a key or value of the spec holds a line break or a control sequence.
        return escape_unprintable(
            ": ".join([self.text, message] if key in ("", self.key) else [self.text, key, message])
        )


def describe_value(value: Any) -> str:
    """Return a value of a document in a form that is short enough for a message."""
    if isinstance(value, str):
        return f"{value[:60]!r} (text)"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return json.dumps(value)[:60]


_YAML_HINTS = {  # by words of PyYAML's message
    "mapping values are not allowed here": '; put a value that holds a colon into quotes, as in key: "a: b", and '
    "indent the keys of one section equally",
    "'\\t' that cannot start": "; indent with spaces, as YAML does not allow tabs",
    "could not find expected ':'": "; a key needs a colon and a space behind it, as in key: value",
    "'%' that cannot start": "; put the value into quotes",
    "'@' that cannot start": "; put the value into quotes",
    "'`' that cannot start": "; put the value into quotes",
    "found unexpected end of stream": "; a quote is not closed",
    "expected ',' or ']'": "; a list in brackets is not closed, or lacks a comma",
    "expected ',' or '}'": "; a mapping in braces is not closed, or lacks a comma",
    "expected <block end>": "; a line is indented differently from the others of its section",
    "but found '<stream end>'": "; a bracket, a brace or a quote is not closed",
    "aliases and tags are refused": "; put a value that begins with *, & or ! into quotes",
}


def parse_yaml(text: str, locate: Callable[[int], SpecLocation]) -> tuple[Any, dict[KeyPath, SpecLocation]]:
    """Parse one YAML document into plain data and the location of every key.

    `locate` makes a location of a line number. Raises `SpecError` with a line for each problem.
    """

    def make_error(line: int, reason: str) -> SpecError:
        return SpecError(locate(line).format_problem((), f"unreadable YAML: {reason}"))

    # Characters of the private use area that the text does not contain stand for `_MARKED` while PyYAML reads it.
    unused = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in text)
    stand_ins = dict(zip(map(ord, _MARKED), unused, strict=False))
    text = text.translate(stand_ins)
    try:
        # The node is composed first and built by `_Loader.build`, since PyYAML's own constructors drop locations and
        # accept duplicate keys.
        loader = _Loader(text, locate, {ord(stand_in): chr(marked) for marked, stand_in in stand_ins.items()})
        node = loader.get_single_node()
        data = None if node is None else loader.build(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        line = mark.line + 1 if mark else 1
        place = f"column {mark.column + 1}: " if mark and locate(line).line else ""
        hint = next((hint for words, hint in _YAML_HINTS.items() if words in reason), "")
        raise make_error(line, f"{place}{reason}{hint}") from None
    except yaml.reader.ReaderError as error:
        raise make_error(text[: error.position].count("\n") + 1, error.reason) from None
    except RecursionError:
        raise make_error(1, "nested too deeply") from None
    if loader.problems:
        raise SpecError("\n".join(loader.problems))
    return data, loader.locations


class _Loader(yaml.SafeLoader):
    """SafeLoader with the plain scalars of YAML 1.2: `1e-3` is a number; `on`, `012` and `2024-01-01` are text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own way to replace the resolvers of the base class

    def __init__(self, text: str, locate: Callable[[int], SpecLocation], stand_ins: Mapping[int, str]):
        """Read `text`, in which each character of `stand_ins` stands for another."""
        super().__init__(text)
        self.stand_ins = stand_ins
        self.locate = locate
        self.locations: dict[KeyPath, SpecLocation] = {(): locate(1)}
        self.problems: list[str] = []

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        # With them one line could stand for many keys, so that no location would be right, or name a Python class.
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            raise yaml.composer.ComposerError(None, None, "anchors, aliases and tags are refused", event.start_mark)
        return super().compose_node(parent, index)

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        """Return the plain data of a node, and record the location of each key and the problems found."""
        if isinstance(node, yaml.MappingNode):
            return self._build_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            items = [((*path, str(i)), item) for i, item in enumerate(node.value)]
            self.locations.update({child: self.locate(item.start_mark.line + 1) for child, item in items})
            return [self.build(item, child) for child, item in items]
        try:
            value = self.construct_object(node)
        except ValueError:  # Python refuses to read a whole number of thousands of digits
            value = math.inf
        if isinstance(value, str):
            value = value.translate(self.stand_ins)
            if any("\ud800" <= character <= "\udfff" for character in value):
                problem = f"{value[:20]!r} has half a surrogate pair, which is no character"
                self.problems.append(self.locations[path].format_problem(path, problem))
        if isinstance(value, float) and not math.isfinite(value):
            problem = f"{node.value[:20]} is too large a number"
            self.problems.append(self.locations[path].format_problem(path, problem))
        return value

    def _build_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            location = self.locate(key_node.start_mark.line + 1)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(location.format_problem((), "a key must be text, not a list or a mapping"))
                continue
            # The text as written: `on` and `1` are keys like any other.
            key = key_node.value.translate(self.stand_ins)
            child = (*path, key)
            if key in data:
                repeat = f"{'.'.join(child)}: duplicate key, first given at {self.locations[child].text}"
                self.problems.append(location.format_problem((), repeat))
                continue
            self.locations[child] = location
            data[key] = self.build(value_node, child)
        return data


for _tag, _pattern, _first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", list("tf")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+", list("-+0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


class TextDumper(yaml.SafeDumper):
    """Dumper of YAML that other programs read as the same value."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: every value is written in full."""
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Return a scalar; text with what some readers take for a line break is in double quotes, which escape it."""
        is_ambiguous = any(character in text for character in _BREAKS)
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if is_ambiguous else None)


TextDumper.add_representer(str, lambda dumper, text: dumper.represent_text(text))


class _SpecDumper(TextDumper):
    """Dumper for `parse_yaml`."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def dump_yaml(value: Any, dumper: type[TextDumper] = _SpecDumper, **options: Any) -> str:
    """Return YAML of plain data, after reading it back: what differs must not be submitted or recorded.

    Without a dumper for other programs, a `TextDumper`, this is YAML that `parse_yaml` reads. `options` are those of
    `yaml.dump`.
    """
    text: str = yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True, **options)
    is_spec = issubclass(dumper, _SpecDumper)
    found = parse_yaml(text, lambda line: SpecLocation(str(line), line))[0] if is_spec else yaml.safe_load(text)
    if json.dumps(found) != json.dumps(value):
        raise FailedError("a bug: YAML that was written reads back as something else; please report it")
    return text


@dataclass(frozen=True)
class Trust:
    """Modules whose classes a document may name which the user has not written.

    A class that a spec names is code, and importing its module runs it. A user's own spec may name any module. The
    `spec.yaml` of a run's directory may be somebody else's: from it only classes of this project are imported, and
    those of modules that the user allows.
    """

    # Names of modules that the user allows besides those of this project, each with its submodules.
    modules: tuple[str, ...] = ()

    def validate(self, path: str) -> None:
        """Raise `InvalidError` unless the class path `module:Class` is of a module that is allowed. Imports nothing."""
        module = path.partition(":")[0]
        if _is_below(module, self.modules):
            return
        place = ""
        if _is_below(module, _OWN_PACKAGES):
            # A package of this name in the working directory, or on PYTHONPATH, is not that of this project.
            found = importlib.util.find_spec(module.partition(".")[0])
            origin = None if found is None or found.origin is None else Path(found.origin).resolve()
            if origin is not None and origin.parent.parent == _HOME:
                return
            place = f" at {origin or 'an unknown place'}"
        raise InvalidError(
            f"{path} comes from module {module}{place}, which this directory names; if you trust it, pass --trust "
            f"{module} (in Python: trust=[{module!r}])"
        )


def list_named_modules(data: Any) -> Iterator[str]:
    """Yield the modules of all class paths in the plain data of a spec."""
    if isinstance(data, dict | list):
        for value in data.values() if isinstance(data, dict) else data:
            yield from list_named_modules(value)
    elif isinstance(data, str) and CLASS_PATH.fullmatch(data):
        yield data.partition(":")[0]


def format_trust(data: Any) -> str:
    """Return the options of read-only commands that trust the modules of a spec other than those of this project."""
    modules = sorted({module for module in list_named_modules(data) if not _is_below(module, _OWN_PACKAGES)})
    return "".join(f" --trust {module}" for module in modules)


def _is_below(module: str, names: Collection[str]) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in names)


@dataclass(frozen=True)
class Document:
    """A spec as the user wrote it, with overrides applied and nothing validated."""

    data: dict[str, Any]  # plain data
    locations: dict[KeyPath, SpecLocation]  # location of every key, and of the document under the empty path
    unfilled: Section | None = None  # the data as the user wrote them, if `data` is different; else None
    # Paths of keys or sections of `data` that the user has written under another path, and that path. `locations` and
    # messages have the paths that the user has written.
    written: Mapping[KeyPath, KeyPath] = field(default_factory=dict)
    trust: Trust | None = None  # modules that the document may name, if it is not the user's own; None: any module
    # Value in the file of each key that a `--set` gives; the list is empty if the file does not have the key.
    overridden: dict[KeyPath, list[Any]] = field(default_factory=dict)

    def validate_trust(self, path: str) -> None:
        """Raise `InvalidError` if the document may not name the class path `module:Class`."""
        if self.trust is not None:
            self.trust.validate(path)

    def compute_digest(self) -> str:
        """Return a digest of the data as written, which is the same for the same spec and overrides."""
        # Supervisors compute it too, and they read nothing but the spec.
        given = self.data if self.unfilled is None else self.unfilled
        return hashlib.sha256(json.dumps(given, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def iterate_without_overrides(self, section: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
        """Yield the path of each `--set` below a section, and the data of the section without it."""
        for path, former in self.overridden.items():
            if path[: len(section)] != section or path == section:
                continue
            data = copy.deepcopy(self.data)
            parent: Any = data
            with contextlib.suppress(KeyError, IndexError, TypeError):  # a later `--set` replaced a section around it
                for part in path[:-1]:
                    parent = parent[int(part) if isinstance(parent, list) else part]
                if former:
                    parent[int(path[-1]) if isinstance(parent, list) else path[-1]] = former[0]
                else:
                    del parent[path[-1]]
                for part in section:
                    data = data[part]
                yield path, data

    def find_written(self, path: KeyPath) -> KeyPath:
        """Return the path under which the user has written a key of `data`."""
        number = next((n for n in range(len(path), 0, -1) if path[:n] in self.written), 0)
        return (*self.written[path[:number]], *path[number:]) if number else path

    def locate(self, path: KeyPath) -> SpecLocation:
        """Return the location of `path`, or of the innermost mapping around it that was written."""
        path = self.find_written(path)
        # The empty path is always known, so this finds something.
        return next(self.locations[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.locations)

    def find_named_key(self, path: KeyPath, message: str) -> KeyPath:
        """Return the written key below a section that a message names as `key=value`, first of all one of a `--set`.

        A key at the beginning of the message, as in `data.mixture.a: no file`, outranks the others.
        """
        found = []
        for value_key, first_key in _NAMED_KEY.findall(message):
            parts = tuple((value_key or first_key).split("."))
            # The name may repeat the end of the path of the section.
            number = next((n for n in range(len(parts) - 1, 0, -1) if path[-n:] == parts[:n]), 0)
            key = (*path, *parts[number:])
            # The name of a source of a mixture is no key.
            lengths = range(len(key), len(path), -1) if first_key else (len(key),)
            located = [key[:n] for n in lengths if self.find_written(key[:n]) in self.locations]
            if first_key and located:
                return located[0]
            found += located
        return next((key for key in found if self.locate(key).key), found[0] if found else path)

    def format_problem(self, path: KeyPath, message: str) -> str:
        """Return `location: key: message` as one line."""
        path = self.find_named_key(path, message)
        return self.locate(path).format_problem(self.find_written(path), message)

    def format_problems(self, problems: Sequence[tuple[KeyPath, str]]) -> str:
        """Return a line for each problem. One `--set` is shown with its first problem only, because it may be long.

        Messages about the same key become one line.
        """
        by_path: dict[KeyPath, list[str]] = {}
        for path, message in problems:
            by_path.setdefault(self.find_named_key(path, message), []).append(message)
        lines, previous = [], None
        for path, messages in by_path.items():
            location, message = self.locate(path), "; ".join(messages)
            is_repeated = location is previous and location.key != ""
            lines.append(
                f"  {escape_unprintable('.'.join(self.find_written(path)))}: {escape_unprintable(message)}"
                if is_repeated
                else self.format_problem(path, message)
            )
            previous = location
        return "\n".join(lines)

    def replace_values(self, section: KeyPath, changes: Sequence[tuple[KeyPath, Mapping[str, Any]]]) -> "Document":
        """Return the document with other values below a section, as parts of this document give them.

        A problem of such a value is located in its part, and any other problem of the section in the last part.
        `changes` has the path of each part in this document and its values by dotted key, in the order in which they
        apply.
        """
        origin = changes[-1][0]
        whole = SpecLocation(f"{self.locate(origin).text}: {'.'.join(origin)}", key=".".join(section))
        kept = {path: place for path, place in self.locations.items() if path[: len(section)] != section}
        changed = replace(self, data=copy.deepcopy(self.data), locations={**kept, section: whole})
        for origin, values in changes:
            for key, value in values.items():
                path, place = (*section, *key.split(".")), self.locate((*origin, key))
                location = SpecLocation(f"{place.text}: {'.'.join((*origin, key))}", place.line, ".".join(path))
                _set_value(changed, path, copy.deepcopy(value), location)
        return changed

    def fill_in(self, section: KeyPath, values: Mapping[str, Any], origin: KeyPath) -> "Document":
        """Return the document with `values` in a section, but for keys that the section has itself.

        Sections among the values are filled in likewise, key by key. A problem of a value is located at `origin`, the
        key that it follows from.
        """
        place, name = self.locate(origin), ".".join(origin)
        derived = SpecLocation(place.text if place.key == name else f"{place.text}: {name}", place.line)
        unfilled = self.data if self.unfilled is None else self.unfilled
        filled = replace(self, data=copy.deepcopy(self.data), locations={**self.locations}, unfilled=unfilled)
        branch = filled.data
        for n, key in enumerate(section, 1):
            if branch.get(key) is None:
                branch[key] = {}
                filled.locations[section[:n]] = derived
            branch = branch[key]

        def add(branch: Section, values: Mapping[str, Any], path: KeyPath, depth: int) -> None:
            for key, value in values.items():
                if key not in branch:
                    branch[key] = copy.deepcopy(value)
                    filled.locations[(*path, key)] = derived
                elif depth and isinstance(branch[key], dict) and isinstance(value, dict):
                    add(branch[key], value, (*path, key), depth - 1)

        add(branch, values, section, 1)
        return filled

    def error(self, key: str, message: str) -> SpecError:
        """Return the error for a dotted key, for checks that the models cannot make."""
        return SpecError(self.format_problem(tuple(key.split(".")) if key else (), message))

    def raise_problems(self, problems: Mapping[str, str], prefix: str = "") -> None:
        """Raise one error with a line for each message by dotted key, if there is any. `prefix` begins each key."""
        if problems:
            raise SpecError(
                self.format_problems([(tuple(f"{prefix}{key}".split(".")), text) for key, text in problems.items()])
            )

    @contextlib.contextmanager
    def errors_at(self, key: str) -> Iterator[None]:
        """Attribute an `InvalidError` inside the context to a dotted key, unless it already names one."""
        try:
            yield
        except SpecError:
            raise
        except InvalidError as error:
            first, *others = str(error).split("\n")
            lines = [str(self.error(key, first)), *(f"  {escape_unprintable(line)}" for line in others)]
            raise SpecError("\n".join(lines)) from error


def load_document(path: str | Path, overrides: Sequence[str] = ()) -> Document:
    """Read a local YAML file and apply `dotted.key=value` overrides to it."""
    try:
        raw = Path(path).read_bytes()
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise SpecError(f"{path}: cannot read the spec: {error.strerror}{_suggest_spec(Path(path))}") from None
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise SpecError(f"{path}:{line}: not UTF-8 text: byte 0x{raw[error.start]:02x}") from None
    return parse_document(text, str(path), overrides)


def _suggest_spec(path: Path) -> str:
    """Return `; did you mean ...?` with the nearest YAML file of the directory, or of its siblings if there is none."""
    if (path / "spec.yaml").is_file():
        return f"; did you mean {path / 'spec.yaml'}?"
    directory, pattern = path.parent, "*.y*ml"
    if not directory.is_dir():
        directory, pattern = directory.parent, "*/*.y*ml"
    # Common directories and the suffix would make any two names similar.
    found = {
        str(each.relative_to(directory).with_suffix("")): str(each)
        for each in itertools.islice(directory.glob(pattern), _MAX_SUGGESTED)
    }
    nearest = difflib.get_close_matches(str(path.relative_to(directory).with_suffix("")), found, n=1)
    return f"; did you mean {found[nearest[0]]}?" if nearest else ""


def format_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return overrides for `parse_document` that set these values by dotted key."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def parse_document(text: str, path: str, overrides: Sequence[str] = ()) -> Document:
    """Parse YAML text and apply overrides to it; `path` is the file that messages name."""
    data, locations = parse_yaml(text, lambda line: SpecLocation(f"{path}:{line}", line))
    document = Document(data, locations)
    if not isinstance(data, dict):
        found = "nothing" if data is None else describe_value(data)
        raise document.error("", f"got {found}, needs a mapping with name, job and directory")
    problems = []
    for override in overrides:
        try:
            _apply(override, document)
        except SpecError as error:
            problems.append(str(error))
    if problems:
        raise SpecError("\n".join(problems))
    return document


def make_document(spec: ExecutionSpec) -> Document:
    """Make the document of a spec that was made in Python, and so has no lines."""
    return Document(spec.model_dump(mode="json"), {(): SpecLocation("ExecutionSpec")})


def _apply(override: str, document: Document) -> None:
    """Apply one `dotted.key=value` in place, and create the sections that the file leaves out."""
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    shown = override if len(override) <= _MAX_SHOWN_CHARACTERS else f"{override[:_MAX_SHOWN_CHARACTERS]}..."
    location = SpecLocation(f"--set {shown}", key=".".join(path))
    if not equals or not all(path):
        raise SpecError(location.format_problem((), "needs the form dotted.key=value"))
    # The value is YAML, so `--set a.b=[1, 2]` and `null` mean what they mean in the file.
    value, _ = parse_yaml(text, lambda line: location)
    former = _set_value(document, path, value, location)
    document.overridden.setdefault(path, former)


def _set_value(document: Document, path: KeyPath, value: Any, location: SpecLocation) -> list[Any]:
    """Set a value in place, and return a list of the one before, which is empty if there was none."""
    # Sections on the way are created; the override is then the location of each.
    parent = document.data
    for n in range(1, len(path)):
        key = _parse_key(parent, path[:n], location)
        # A section that is absent, or present without keys, becomes an empty one.
        if isinstance(parent, dict) and parent.get(key) is None:
            parent[key] = {}
            document.locations[path[:n]] = location
        parent = parent[key]
        if not isinstance(parent, dict | list):
            section = ".".join(path[:n])
            problem = f"{section} is {describe_value(parent)}, so it has no keys; override {section} itself"
            raise SpecError(location.format_problem((), problem))
    # The keys of a section that is replaced are no longer where the file has them.
    for stale in [known for known in document.locations if known[: len(path)] == path]:
        del document.locations[stale]
    key = _parse_key(parent, path, location)
    is_there = isinstance(parent, list) or key in parent
    former = [copy.deepcopy(parent[key])] if is_there else []
    parent[key] = value
    document.locations[path] = location
    return former


def _parse_key(parent: dict[str, Any] | list[Any], path: KeyPath, location: SpecLocation) -> Any:
    """Return the last part of `path` as a key of `parent`: an index, if that is a list."""
    if isinstance(parent, dict):
        return path[-1]
    index = int(path[-1]) if path[-1].isdecimal() else -1
    if not 0 <= index < len(parent):
        section, indices = ".".join(path[:-1]), f"0 to {len(parent) - 1}" if parent else "none"
        problem = f"{section} is a list, got {path[-1]!r}, needs an index: {indices}; or override {section} itself"
        raise SpecError(location.format_problem((), problem))
    return index
