"""What a job is told: frozen models, strict YAML, `--set` overrides, and errors that name file, line and nearest key.

Owns the top level of a spec. Knows no model, no data and no jax: what stands under `config` belongs to the job class
and is validated by that class's `JobConfig`. Reading goes in three steps, each listing all of its problems at once:

1. `load_document` reads YAML into plain data and remembers the place of every key;
2. `validate_spec` checks the top level and `load_job_class` imports the job;
3. `validate_config` checks `config` with that job's model.

Later stages blame a key in the same words through `Document.error`.
"""

import difflib
import hashlib
import importlib
import json
import math
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator
from pydantic.json_schema import models_json_schema
from pydantic_core import ErrorDetails

from runner.errors import SpecError

Auto = Literal["auto"]
KeyPath = tuple[str, ...]

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
JOB_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"


class Frozen(BaseModel):
    """Base of every model in a spec: immutable, no unknown keys, no coercion between types, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)


class JobConfig(Frozen):
    """Base of what a job class accepts under `config`."""

    @property
    def free_keys(self) -> frozenset[str]:
        """Dotted keys (or whole sections) inside `config` that a resumed job may change: they move no bit of it."""
        return frozenset()


class Mesh(Frozen):
    """Axis sizes of the device mesh; at most one is auto, which takes the devices that the others leave."""

    data: PositiveInt | Auto = Field(default="auto", description="Devices over which only the batch is sharded.")
    fsdp: PositiveInt | Auto = Field(
        default=1, description="Devices over which batch, parameters and optimizer are sharded."
    )
    tensor: PositiveInt | Auto = Field(default=1, description="Devices over which single matrices are sharded.")

    @model_validator(mode="after")
    def _at_most_one_auto(self) -> "Mesh":
        autos = [axis for axis, size in self if size == "auto"]
        if len(autos) > 1:
            raise ValueError(f"axes {', '.join(autos)} are auto; at most one can be, give the others a size")
        return self


class Topology(Frozen):
    """The hardware that the job is sized for, and the mesh over it."""

    accelerator: str = Field(
        default="any", min_length=1, description="any, or the only hardware to accept: cpu, v5e-16 ..."
    )
    mesh: Mesh = Field(default=Mesh(), description="Axis sizes of the device mesh.")


class Checkpoint(Frozen):
    """When to save, what to keep, what to start from."""

    every_steps: PositiveInt | None = Field(default=1000, description="Save each time so many steps are complete.")
    every_minutes: PositiveFloat | None = Field(default=None, description="Save each time so many minutes have passed.")
    keep_last: PositiveInt = Field(default=3, description="Number of newest checkpoints kept.")
    keep_every_steps: PositiveInt | None = Field(
        default=None, description="Checkpoints at multiples of this stay for good."
    )
    init_from: str | None = Field(
        default=None, min_length=1, description="Warm start: the weights of this other run, once."
    )

    @model_validator(mode="after")
    def _some_cadence(self) -> "Checkpoint":
        if self.every_steps is None and self.every_minutes is None:
            raise ValueError("every_steps and every_minutes are both null; a restorable job needs one of them")
        return self


class Logging(Frozen):
    """What is reported, and how often."""

    every_steps: PositiveInt = Field(default=10, description="Steps from one logged step to the next.")
    wandb: Literal["disabled", "offline", "online"] = Field(default="disabled", description="Weights & Biases mode.")


class ExecutionSpec(Frozen):
    """One job: what runs, where it writes, on which devices, and the job's own config."""

    name: str = Field(pattern=NAME_PATTERN, max_length=128, description="Run name, usable as a file name.")
    project: str = Field(default="general", min_length=1, description="Project that the run is filed under.")
    group: str = Field(default="default", min_length=1, description="Group of runs within the project.")
    job: str = Field(pattern=JOB_PATTERN, description="module.path:Class of a RestoreableJob.")
    directory: str = Field(min_length=1, description="All that the run writes: local path, gs://, s3:// or az://.")
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seed of every random number of the job.")
    topology: Topology | None = Field(default=None, description="Devices and mesh; a trainer needs it.")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="When to save and what to keep.")
    logging: Logging = Field(default=Logging(), description="What is reported, and how often.")
    config: dict[str, Any] = Field(default={}, description="Belongs to the job class, and is validated by it.")


SpecModel = TypeVar("SpecModel", bound=BaseModel)


# --- documents: plain data that remembers the place of every key ---


@dataclass(frozen=True)
class Place:
    """Where a value was written: `specs/x.yaml:14`, or the `--set` that gave it."""

    text: str
    line: int = 0
    key: str = ""  # the dotted key that `text` already names, for a --set


@dataclass(frozen=True)
class Document:
    """A spec as the user wrote it, overrides applied, nothing validated yet."""

    data: dict[str, Any]
    places: dict[KeyPath, Place]

    def place(self, path: KeyPath) -> Place:
        """The place of `path`, or of the nearest mapping around it that was written at all."""
        return next(self.places[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.places)

    def line(self, path: KeyPath, message: str) -> str:
        """One line that blames `path`; a --set that names the key itself is not made to repeat it."""
        place, key = self.place(path), ".".join(path)
        return _printable(": ".join([place.text, message] if key in ("", place.key) else [place.text, key, message]))

    def error(self, key: str, message: str) -> SpecError:
        """The error that blames a dotted key, for checks that the models cannot make."""
        return SpecError(self.line(tuple(key.split(".")) if key else (), message))


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
    data, places = _parse(text, lambda line: Place(f"{path}:{line}", line))
    document = Document(data, places)
    if not isinstance(data, dict):
        got = "nothing" if data is None else _got(data)
        raise document.error("", f"got {got}, needs a mapping with name, job and directory")
    problems = []
    for override in overrides:
        try:
            _override(document, override)
        except SpecError as error:
            problems.append(str(error))
    _raise_all(problems)
    return document


def document_of(spec: ExecutionSpec) -> Document:
    """The document of a spec that was made in Python, and so has no lines."""
    return Document(spec.model_dump(mode="json"), {(): Place("ExecutionSpec")})


class _Loader(yaml.SafeLoader):
    """SafeLoader with the plain scalars of YAML 1.2: `1e-3` is a number; `on`, `012` and `2024-01-01` are text."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            raise yaml.composer.ComposerError(None, None, "anchors, aliases and tags are refused", event.start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back as the same value."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", list("tf")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+", list("-+0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def _parse(text: str, at: Callable[[int], Place]) -> tuple[Any, dict[KeyPath, Place]]:
    """Plain data of one YAML document and the place of every key in it; `at` makes a place of a line."""
    places: dict[KeyPath, Place] = {(): at(1)}
    problems: list[str] = []
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        data = None if node is None else _build(loader, node, (), Document({}, places), at, problems)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise SpecError(_printable(f"{at(mark.line + 1 if mark else 1).text}: unreadable YAML: {reason}")) from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise SpecError(f"{at(line).text}: unreadable YAML: {error.reason}") from None
    except RecursionError:
        raise SpecError(f"{at(1).text}: unreadable YAML: nested too deeply") from None
    _raise_all(problems)
    return data, places


def _build(
    loader: _Loader, node: yaml.Node, path: KeyPath, seen: Document, at: Callable[[int], Place], problems: list[str]
) -> Any:
    if isinstance(node, yaml.MappingNode):
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = at(key_node.start_mark.line + 1)
            if not isinstance(key_node, yaml.ScalarNode):
                problems.append(f"{place.text}: a key must be text, not a list or a mapping")
                continue
            key = key_node.value  # as written: `on` and `1` are keys like any other
            child = (*path, key)
            if key in data:
                first = seen.places[child].text
                problems.append(_printable(f"{place.text}: {'.'.join(child)}: duplicate key, first given at {first}"))
                continue
            seen.places[child] = place
            data[key] = _build(loader, value_node, child, seen, at, problems)
        return data
    if isinstance(node, yaml.SequenceNode):
        items = list(enumerate(node.value))
        seen.places.update({(*path, str(i)): at(item.start_mark.line + 1) for i, item in items})
        return [_build(loader, item, (*path, str(i)), seen, at, problems) for i, item in items]
    try:
        value = loader.construct_object(node)
    except ValueError:  # Python refuses to read a whole number of thousands of digits
        value = math.inf
    if isinstance(value, float) and not math.isfinite(value):
        problems.append(seen.line(path, f"{node.value[:20]} is too large a number"))
    return value


def _override(document: Document, text: str) -> None:
    """Apply one `dotted.key=value` in place; sections that the file leaves out are created."""
    key, equals, value_text = text.partition("=")
    path = tuple(key.strip().split("."))
    place = Place(_printable(f"--set {text}"), key=".".join(path))
    if not equals or not all(path):
        raise SpecError(f"{place.text}: needs the form dotted.key=value")
    value, _ = _parse(value_text, lambda line: place)
    parent = document.data
    for n, part in enumerate(path[:-1], start=1):
        if parent.get(part) is None:
            parent[part] = {}
            document.places[path[:n]] = place
        if not isinstance(parent[part], dict):
            raise SpecError(f"{place.text}: {'.'.join(path[:n])} is {_got(parent[part])}, so it has no keys")
        parent = parent[part]
    for stale in [known for known in document.places if known[: len(path)] == path]:
        del document.places[stale]
    parent[path[-1]] = value
    document.places[path] = place


# --- validation: pydantic's findings, told in the user's words ---


def read_spec(path: str | Path, overrides: Sequence[str] = ()) -> ExecutionSpec:
    """Load a spec and validate its top level; `config` waits for its job class."""
    return validate_spec(load_document(path, overrides))


def validate_spec(document: Document) -> ExecutionSpec:
    return _validate(document, ExecutionSpec, ())


def validate_config(document: Document, model: type[SpecModel]) -> SpecModel:
    """The `config` section as an instance of the job class's model."""
    return _validate(document, model, ("config",))


def _validate(document: Document, model: type[SpecModel], section: KeyPath) -> SpecModel:
    data: Any = document.data
    for part in section:
        data = data.get(part, {})
    try:  # as JSON, where strict still reads a list as a tuple and a mapping as a model
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        problems = list(_explain(document, model, section, data, error.errors(include_url=False)))
    problems.sort(key=lambda problem: document.place(problem[0]).line)
    raise SpecError("\n".join(document.line(path, message) for path, message in problems))


def _explain(
    document: Document, model: type[BaseModel], section: KeyPath, data: Any, details: Iterable[ErrorDetails]
) -> Iterator[tuple[KeyPath, str]]:
    """Pairs of key path and message; the branches of a union that all failed become one message."""
    misfits: dict[KeyPath, list[ErrorDetails]] = {}
    values: dict[KeyPath, Any] = {}
    for detail in details:
        kind, (inner, value) = detail["type"], _locate(detail["loc"], data)
        path = section + inner
        if kind == "missing":
            yield path, f"missing key {detail['loc'][-1]}"
        elif kind == "extra_forbidden":
            prefix = ".".join(path[:-1]) + "." if document.place(path).key and path[:-1] else ""
            yield path, f"unknown key{_nearest(path[-1], _keys_of(model, inner[:-1]), prefix)}"
        elif "error" in detail.get("ctx", {}):  # raised by a validator, in its own words
            yield path, str(detail["ctx"]["error"])
        else:
            misfits.setdefault(path, []).append(detail)
            values[path] = value
    for path, found in misfits.items():
        needs = " or ".join(dict.fromkeys(_need(detail) for detail in found))
        choices = [choice for detail in found for choice in _choices(detail)]
        near = difflib.get_close_matches(str(values[path]), choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        yield path, f"got {_got(values[path])}, needs {needs}{hint}"


def _locate(loc: tuple[int | str, ...], data: Any) -> tuple[KeyPath, Any]:
    """The part of pydantic's location that stands in the data (the rest names union branches), and the value there."""
    path: KeyPath = ()
    for part in loc:
        if part in (data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()):
            data = data[part]
            path = (*path, str(part))
    return path, data


def _keys_of(model: type[BaseModel], path: KeyPath) -> list[str]:
    for part in path:
        if part in model.model_fields:
            model = next(_models_in(model.model_fields[part].annotation), model)
    return list(model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _nearest(word: str, choices: Sequence[str], prefix: str = "") -> str:
    """`; did you mean ...?`, or all the choices where none is near."""
    near = difflib.get_close_matches(word, choices, n=1)
    if near:
        return f"; did you mean {prefix}{near[0]}?"
    return f"; choose from {', '.join(choices)}" if choices else ""


_NEEDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "text of at least {min_length} character(s)",
    "string_too_long": "text of at most {max_length} characters",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
}
_PATTERN_NEEDS = {
    NAME_PATTERN: "a file name of letters, digits, '.', '_' and '-'",
    JOB_PATTERN: "the form module.path:Class",
}


def _need(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "literal_error":
        choices = _choices(detail)
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if kind == "string_pattern_mismatch":
        return _PATTERN_NEEDS.get(context["pattern"], f"text that matches {context['pattern']}")
    return _NEEDS[kind].format(**context) if kind in _NEEDS else f"another value: {detail['msg']}"


def _choices(detail: ErrorDetails) -> list[str]:
    if detail["type"] != "literal_error":
        return []
    return [choice.strip("'") for choice in re.split(r", | or ", detail["ctx"]["expected"])]


def _got(value: Any) -> str:
    if isinstance(value, str):
        return f"{value[:60]!r} (text)"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return json.dumps(value)[:60]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise SpecError("\n".join(problems))


# --- the job class ---


def load_job_class(document: Document, base: type) -> type:
    """Import the `module:Class` of a validated document's `job`, a subclass of `base`."""
    module_name, _, class_name = document.data["job"].partition(":")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything; all of it ends here
        raise document.error("job", _import_failure(module_name, error)) from None
    job_class = getattr(module, class_name, None)
    jobs = [name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)]
    if job_class is None:
        raise document.error("job", f"module {module_name} has no {class_name}{_nearest(class_name, jobs)}")
    if not (isinstance(job_class, type) and issubclass(job_class, base)):
        raise document.error("job", f"{module_name}:{class_name} is not a subclass of {base.__name__}")
    return job_class


def _import_failure(module_name: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
        package, _, missing = str(error.name).rpartition(".")
        search = getattr(sys.modules.get(package), "__path__", []) if package else [os.getcwd()]
        prefix = f"{package}." if package else ""
        near = difflib.get_close_matches(missing, [module.name for module in pkgutil.iter_modules(search)], n=1)
        return f"no module {error.name}" + (f"; did you mean {prefix}{near[0]}?" if near else "")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    where, reason = f"{frames[-1].filename}:{frames[-1].lineno}", str(error).partition("\n")[0]
    if isinstance(error, SyntaxError):
        where, reason = f"{error.filename}:{error.lineno}", error.msg
    return f"importing {module_name} raised {type(error).__name__}: {reason} (at {where})"


# --- out again: YAML, JSON Schema, and what defines the trajectory ---


def dump_spec(spec: ExecutionSpec) -> str:
    """YAML text that `parse_document` reads back as the same spec."""
    return yaml.dump(spec.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def json_schema(config_model: type[BaseModel] | None = None) -> dict[str, Any]:
    """JSON Schema of a spec (draft 2020-12), with `config_model` as one form that `config` may take."""
    models: list[type[BaseModel]] = [ExecutionSpec] if config_model is None else [ExecutionSpec, config_model]
    refs, definitions = models_json_schema([(model, "validation") for model in models])
    defs = definitions["$defs"]
    schema = defs.pop(refs[ExecutionSpec, "validation"]["$ref"].rpartition("/")[2])
    if config_model is not None:
        any_form = schema["properties"]["config"]
        any_form["anyOf"] = [refs[config_model, "validation"], {"type": any_form.pop("type")}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "$defs": defs}


def trajectory(spec: ExecutionSpec, config: JobConfig) -> dict[str, Any]:
    """Flat dotted key -> value of all that the state's bits depend on; everything else may change on resume."""
    free = tuple(f"config.{key}." for key in config.free_keys)
    flat = {"job": spec.job, "seed": spec.seed, **_flatten(config.model_dump(mode="json"), "config.")}
    return {key: value for key, value in flat.items() if not f"{key}.".startswith(free)}


def hash_of(trajectory: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON, in hexadecimal."""
    text = json.dumps(trajectory, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _flatten(data: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
