"""Documents: a spec as the user wrote it, overrides applied, every key with its place. Nothing here is validated."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.errors import InvalidError, SpecError
from runner.spec.dialect import parse
from runner.spec.model import ExecutionSpec
from runner.spec.wording import KeyPath, Place, got


@dataclass(frozen=True)
class Document:
    """A spec as the user wrote it, overrides applied, nothing validated yet."""

    data: dict[str, Any]
    places: dict[KeyPath, Place]

    def place(self, path: KeyPath) -> Place:
        """The place of `path`, or of the nearest mapping around it that was written at all."""
        return next(self.places[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.places)

    def line(self, path: KeyPath, message: str) -> str:
        """One line that blames `path` at its place."""
        return self.place(path).blame(path, message)

    def error(self, key: str, message: str) -> SpecError:
        """The error that blames a dotted key, for checks that the models cannot make."""
        return SpecError(self.line(tuple(key.split(".")) if key else (), message))

    def refuse(self, problems: Mapping[str, str], prefix: str = "") -> None:
        """Raise one error with a line for each problem, by dotted key below `prefix`; nothing if there is none."""
        if problems:
            raise SpecError("\n".join(str(self.error(prefix + key, message)) for key, message in problems.items()))

    @contextlib.contextmanager
    def blaming(self, key: str) -> Iterator[None]:
        """Inside, what is invalid is the fault of a dotted key, unless it has been blamed on one already."""
        try:
            yield
        except SpecError:
            raise
        except InvalidError as error:
            raise self.error(key, str(error)) from error


def load_document(path: str | Path, overrides: Sequence[str] = ()) -> Document:
    """Read a local YAML file and apply `dotted.key=value` overrides to it."""
    try:
        raw = Path(path).read_bytes()
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise SpecError(f"{path}: cannot read the spec: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise SpecError(f"{path}:{line}: not UTF-8 text: byte 0x{raw[error.start]:02x}") from None
    return parse_document(text, str(path), overrides)


def parse_document(text: str, path: str, overrides: Sequence[str] = ()) -> Document:
    """Read YAML text; `path` is what errors call it."""
    data, places = parse(text, lambda line: Place(f"{path}:{line}", line))
    document = Document(data, places)
    if not isinstance(data, dict):
        found = "nothing" if data is None else got(data)
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


def document_of(spec: ExecutionSpec) -> Document:
    """The document of a spec that was made in Python, and so has no lines."""
    return Document(spec.model_dump(mode="json"), {(): Place("ExecutionSpec")})


def _apply(override: str, document: Document) -> None:
    """Apply one `dotted.key=value` in place; sections that the file leaves out are created."""
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    place = Place(f"--set {override}", key=".".join(path))
    if not equals or not all(path):
        raise SpecError(place.blame((), "needs the form dotted.key=value"))
    value, _ = parse(text, lambda line: place)
    parent = document.data
    for n, part in enumerate(path[:-1], start=1):
        if parent.get(part) is None:
            parent[part] = {}
            document.places[path[:n]] = place
        if not isinstance(parent[part], dict):
            section = ".".join(path[:n])
            raise SpecError(place.blame((), f"{section} is {got(parent[part])}, so it has no keys"))
        parent = parent[part]
    for stale in [known for known in document.places if known[: len(path)] == path]:
        del document.places[stale]
    parent[path[-1]] = value
    document.places[path] = place
