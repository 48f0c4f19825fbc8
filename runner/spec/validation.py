"""Validation of documents by pydantic models, the trajectory, and the output of specs as YAML and JSON Schema.

Every problem that pydantic finds becomes one line, `location: key: what is wrong`, with the nearest valid choice.

The trajectory is the set of keys of a spec, with their values, on which the bits of a run depend. A resume refuses a
change in any of them.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import ErrorDetails

from runner.errors import SpecError, suggest_choices, suggest_nearest
from runner.spec.document import Document, KeyPath, describe_value, dump_yaml, load_document
from runner.spec.model import HOOK_PATTERN, JOB_PATTERN, NAME_PATTERN, ExecutionSpec, JobConfig, iterate_models

SpecModel = TypeVar("SpecModel", bound=BaseModel)
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
_EMPTY = {"a mapping": "{}", "a list": "[]"}  # by what is needed
_PATTERN_NEEDS = {
    NAME_PATTERN: "a file name of letters, digits, '.', '_' and '-'",
    HOOK_PATTERN: "a letter, and then letters, digits, '_' and '-'",
    JOB_PATTERN: "the form module.path:Class",
}
Trajectory = dict[str, Any]  # dotted key to JSON value; a key in a list of sections has the section's index as a part
_CONFIG_HINT = "; options of the job, its model and its data are keys of config"
_SEARCH_LEVELS = 3
_INDEX = re.compile(r"\.\d+(?=\.)")


def read_spec(path: str | Path, overrides: Sequence[str] = ()) -> ExecutionSpec:
    """Load a spec and validate its top level, not yet its `config`."""
    return validate_spec(load_document(path, overrides))


def validate_spec(document: Document) -> ExecutionSpec:
    """Validate the top level of a document; `config` may be any mapping."""
    return _validate(document, ExecutionSpec, document.data, ())


def validate_config(document: Document, model: type[SpecModel], hook: int | None = None) -> SpecModel:
    """Validate the `config` section of the job, or of the hook with an index, in a spec whose top level is valid."""
    if hook is None:
        return _validate(document, model, document.data.get("config", {}), ("config",))
    entry = document.data["hooks"][hook]
    data = entry.get("config", {}) if isinstance(entry, dict) else {}
    return _validate(document, model, data, ("hooks", str(hook), "config"))


def validate_hooks(document: Document, spec: ExecutionSpec, job_class: type) -> ExecutionSpec:
    """Return `spec`. Raises `SpecError` if it has hooks, and the job class does not call them."""
    if spec.hooks and not getattr(job_class, "calls_hooks", False):
        raise document.error("hooks", f"{job_class.__name__} calls no hooks, only a BaseTrainer does; leave them out")
    return spec


def _validate(document: Document, model: type[SpecModel], data: Any, section: KeyPath) -> SpecModel:
    try:
        # From JSON, pydantic's strict mode still accepts a list for a tuple and a mapping for a model.
        return model.model_validate_json(json.dumps(data), context=document)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = [
            (_find_cause(document, model, section, path, message), message)
            for path, message in _explain(document, model, data, section, details)
        ]
    # In the order of the file; pydantic's order is that of the model.
    problems.sort(key=lambda problem: document.locate(problem[0]).line)
    raise SpecError(document.format_problems(problems))


def _find_cause(document: Document, model: type[BaseModel], section: KeyPath, path: KeyPath, message: str) -> KeyPath:
    """Return the path of the `--set` without which there is no such problem of `path`, or `path` if there is none."""
    if document.locate(document.find_named_key(path, message)).key:
        return path
    for override, data in document.iterate_without_overrides(section):
        try:
            model.model_validate_json(json.dumps(data), context=document)
        except ValidationError as error:
            details = error.errors(include_url=False)
            if any(message == other for _, other in _explain(document, model, data, section, details)):
                continue
        return override
    return path


def _explain(
    document: Document, model: type[BaseModel], data: Any, section: KeyPath, details: Iterable[ErrorDetails]
) -> Iterator[tuple[KeyPath, str]]:
    """Yield key path and message of each problem; branches of a union that all failed become one message."""
    # Problems of a value that fits no branch of a union are collected, and reported together at the end.
    misfits: dict[KeyPath, tuple[Any, list[ErrorDetails]]] = {}
    inside: set[KeyPath] = set()  # paths of mappings that have a wrong key; being a mapping is right
    for detail in details:
        kind, (inner, value) = detail["type"], _locate(detail["loc"], data)
        path = section + inner
        inside |= {path} if kind == "missing" else {path[:n] for n in range(len(path))}
        if kind == "missing":
            yield path, f"missing key {detail['loc'][-1]}"
        elif kind == "extra_forbidden":
            above = ".".join(document.find_written(path[:-1]))
            prefix = f"{above}." if document.locate(path).key and above else ""
            keys = _list_keys(model, inner[:-1], data)
            advice = suggest_nearest(path[-1], keys, prefix)
            if not advice and (place := _find_key(model, path[-1])):
                advice = f"; did you mean {'.'.join((*section, *place))}?"
            if not advice:
                hint = _CONFIG_HINT if len(path) == 1 and "config" in keys else ""
                advice = f"{suggest_choices(path[-1], keys, prefix)}{hint}"
            yield path, f"unknown key{advice}"
        elif kind == "union_tag_not_found":
            yield path, f"missing key {_get_tag(detail)}"
        elif kind == "union_tag_invalid":
            found, choices = detail["ctx"]["tag"], detail["ctx"]["expected_tags"].replace("'", "").split(", ")
            needs = f"needs one of {', '.join(choices)}{suggest_nearest(found, choices)}"
            yield (*path, _get_tag(detail)), f"got {describe_value(found)}, {needs}"
        elif "error" in detail.get("ctx", {}):  # raised by a validator of the model
            yield path, str(detail["ctx"]["error"])
        else:
            misfits.setdefault(path, (value, []))[1].append(detail)
    for path, (value, branches) in misfits.items():
        if path in inside:
            # The value is a mapping with a wrong key, which is reported already; other branches want, say, text.
            continue
        needs = " or ".join(dict.fromkeys(_describe_need(detail) for detail in branches))
        choices = [choice for detail in branches for choice in _list_choices(detail)]
        empty = _EMPTY.get(needs) if value is None else None
        advice = f"; write {empty}, or leave the key out" if empty else suggest_nearest(str(value), choices)
        yield path, f"got {describe_value(value)}, needs {needs}{advice}"


def _locate(loc: tuple[int | str, ...], data: Any) -> tuple[KeyPath, Any]:
    """Return path and value in the data for pydantic's location, in which other parts name branches of unions."""
    path: KeyPath = ()
    for part in loc:
        children = dict(enumerate(data)) if isinstance(data, list) else data
        if isinstance(children, dict) and part in children:
            data = children[part]
            path = (*path, str(part))
    return path, data


def _get_tag(detail: ErrorDetails) -> str:
    """Return the key whose value selects one of the models of a union."""
    return str(detail["ctx"]["discriminator"]).strip("'")


def _list_keys(model: type[BaseModel], path: KeyPath, data: Any) -> list[str]:
    """Return the keys of the model at `path` inside `model`; in a union, of the one that `data` selects."""
    for part in path:
        data = data[int(part)] if isinstance(data, list) else data[part]
        if part in model.model_fields:
            models = list(iterate_models(model.model_fields[part].annotation, everywhere=True)) or [model]
            model = next((choice for choice in models if _is_selected_by(choice, data)), models[0])
    return list(model.model_fields)


def _find_key(model: type[BaseModel], key: str) -> KeyPath:
    """Return the path inside `model` of the first key of this name in any section of it; empty if there is none."""
    sections: list[tuple[KeyPath, type[BaseModel]]] = [((), model)]
    for path, section in sections:  # in order of depth, since the list grows at its end
        for name, field in section.model_fields.items():
            if name == key:
                return (*path, name)
            if len(path) < _SEARCH_LEVELS:
                sections += [((*path, name), each) for each in iterate_models(field.annotation)]
    return ()


def _is_selected_by(model: type[BaseModel], data: Any) -> bool:
    """Return True if a key of `data` has the single value that `model` allows for it, such as `kind` in a union."""
    fields = model.model_fields.items()
    return isinstance(data, dict) and any(get_args(field.annotation) == (data.get(name),) for name, field in fields)


def _describe_need(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "literal_error":
        choices = _list_choices(detail)
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if kind == "string_pattern_mismatch":
        return _PATTERN_NEEDS.get(context["pattern"], f"text that matches {context['pattern']}")
    return _NEEDS[kind].format(**context) if kind in _NEEDS else f"another value: {detail['msg']}"


def _list_choices(detail: ErrorDetails) -> list[str]:
    if detail["type"] != "literal_error":
        return []
    return [choice.strip("'") for choice in re.split(r", | or ", detail["ctx"]["expected"])]


def dump_spec(spec: ExecutionSpec, comments: Sequence[str] = ()) -> str:
    """Return YAML that `parse_document` reads back as the same spec, below lines of comment."""
    return "".join(f"# {each}\n" for each in comments) + dump_yaml(spec.model_dump(mode="json"))


def json_schema(config_model: type[BaseModel] | None = None, *, any_other: bool = True) -> dict[str, Any]:
    """Return the JSON Schema of a spec (draft 2020-12), with this model of `config`; None allows any mapping.

    With `any_other`, other mappings are allowed for `config` beside the model.
    """
    models: list[type[BaseModel]] = [ExecutionSpec] if config_model is None else [ExecutionSpec, config_model]
    refs, definitions = models_json_schema([(model, "validation") for model in models])
    defs = definitions["$defs"]
    schema = defs.pop(refs[ExecutionSpec, "validation"]["$ref"].rpartition("/")[2])
    if config_model is not None:
        config = schema["properties"]["config"]
        # `config` of the top level is any mapping, which stays as one alternative if other jobs are allowed.
        other = {"type": config.pop("type")}
        config["anyOf"] = [refs[config_model, "validation"], *([other] if any_other else [])]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "$defs": defs}


def compute_trajectory(spec: ExecutionSpec, config: JobConfig) -> Trajectory:
    """Return all keys on which the state's bits depend; everything else may change on resume."""
    flat = {"job": spec.job, "seed": spec.seed, **flatten(config.model_dump(mode="json"), "config.")}
    free_keys = config.free_keys
    kept = {key: value for key, value in flat.items() if not is_below(key, free_keys)}
    return kept | config.stage_trajectory


def is_below(key: str, sections: Iterable[str]) -> bool:
    """Return True if a key of a trajectory is one of these dotted keys of `config`, or below one."""
    # The index of a section in a list is left out, so that a section is meant at every index.
    return f"{_INDEX.sub('', key)}.".startswith(tuple(f"config.{section}." for section in sections))


def is_one_of(key: str, keys: Iterable[str]) -> bool:
    """Return True if a key of a trajectory is one of these dotted keys of `config`, at any index of a list."""
    return _INDEX.sub("", key) in {f"config.{each}" for each in keys}


def fill_in_defaults(saved: Trajectory, present: Trajectory, config: JobConfig) -> Trajectory:
    """Return a saved trajectory with today's default of each key of `present` that it lacks.

    The trajectory may be from an older version of the job. A version that adds a key gives it a default that does not
    change older trajectories. The choices of `config` determine which defaults apply.
    """
    saved = flatten(saved)
    defaults = _find_missing_defaults(saved, config, "config")
    return {key: value for key, value in defaults.items() if key in present} | saved


def _find_missing_defaults(saved: Trajectory, model: BaseModel, prefix: str) -> Trajectory:
    """Return the defaults of the keys of `model` for which `saved` has neither the key nor one below it."""
    found: Trajectory = {}
    for name, field in type(model).model_fields.items():
        key, value = f"{prefix}.{name}", getattr(model, name)
        # The version that saved it knew this section, but perhaps not yet every key in it.
        if any(f"{other}.".startswith(f"{key}.") for other in saved):
            items = enumerate(value) if isinstance(value, list) else ()
            for place, section in [(key, value), *((f"{key}.{index}", item) for index, item in items)]:
                if isinstance(section, BaseModel):
                    found |= _find_missing_defaults(saved, section, place)
        elif not field.is_required():
            # Validation is skipped: the other required fields of the model are not needed for one default.
            default = type(model).model_construct(**{name: field.get_default(call_default_factory=True)})
            found |= flatten(default.model_dump(mode="json", include={name}), f"{prefix}.")
    return found


def hash_record(record: dict[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of a record, in hexadecimal."""
    # Digests are stored in checkpoints: this form must never change.
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def flatten(data: Trajectory, prefix: str = "") -> Trajectory:
    """Return the values of nested mappings, and of lists of mappings, by dotted key."""
    flat: Trajectory = {}
    for key, value in data.items():
        # Sections in a list become keys with their index, so that a message can name the one key that differs.
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
