"""Generator of the reference in `.github/docs/specs.md`: all keys of a spec and of the files of a run.

    python -m tests.repository.reference     writes the reference

Types, defaults and meanings come from the JSON Schema of the models. Whether a key may change when a run resumes is
determined by calling `compute_trajectory` with a shipped spec, as it is and with every choice that its keys offer.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from runner import RestoreableJob
from runner.attempts.events import EVENT_KEYS, EVENTS, EventType
from runner.attempts.layout import RESULT_KEYS
from runner.checkpoint.manifest import INDEX_KEYS, MANIFEST_KEYS
from runner.config import TrainerConfig
from runner.errors import SpecError
from runner.hook import Hook, Observer, hooks
from runner.huggingface.assets import ASSET_KEYS
from runner.metrics.rows import ROW_KEYS
from runner.optim.config import OPTIMIZERS, SCHEDULES, LibraryEntry
from runner.spec import (
    ExecutionSpec,
    JobConfig,
    compute_trajectory,
    is_below,
    load_document,
    load_job_class,
    validate_config,
    validate_spec,
)
from runner.spec.model import Policy, list_keys
from runner.storage import Key

ROOT = Path(__file__).parents[2]
PAGE = ROOT / ".github" / "docs" / "specs.md"
BEGIN = "<!-- Generated from here on by python -m tests.repository.reference. -->\n"
TRAINER = ROOT / "specs" / "gpt_nano.yaml"
JOBS = (  # a shipped spec of each job class, and the section of its own keys
    (TRAINER, "config.model"),
    (ROOT / "specs" / "moe_nano.yaml", "config.model"),
    (ROOT / "specs" / "counter.yaml", "config"),
)
# Overrides that give keys to sections whose default is null.
SECTION_OVERRIDES = {"ema": "config.ema={decays: [0.5]}", "adapter": "config.adapter={targets: [blocks.query]}"}
# The counters of a hook are part of the trajectory, unless it is an `Observer`; a spec does not show which it is.
HOOK_RULE = "trajectory; free for an `Observer`"
HOOK_KEYS = {"hooks": "by key", "hooks.*.hook": HOOK_RULE, "hooks.*.name": HOOK_RULE, "hooks.*.config": "by key"}
# Stages are compared step by step, see `runner/train/stages.py`.
STAGE_RULES = {"config.stages": "by key", "config.stages.*.why": "free"}
OWNER_KEY = (
    "name"  # not in the trajectory: it is stored in job.json, and another name is refused before keys are compared
)

TYPE_WORDS = {"integer": "integer", "number": "number", "string": "string", "object": "mapping", "null": "`null`"}
TYPE_WORDS |= {"array": "list"}
TYPE_WORDS |= {"int": "integer", "float": "number", "str": "string", "dict": "mapping", "list": "list"}
TYPE_WORDS |= {"boolean": "`true`, `false`", "bool": "`true`, `false`", "NoneType": "`null`"}
BOUND_SIGNS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}

SPEC_HEADS = ("key", "type", "default", "meaning", "on resume")

Schema = dict[str, Any]


@dataclass(frozen=True)
class SpecKey:
    """One key of a spec. A section that may be null counts as a key."""

    name: str
    type: str
    default: str
    meaning: str
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Section:
    """The keys of one mapping."""

    name: str
    meaning: str
    keys: list[SpecKey]


# Keys of a spec.


def collect_sections(
    schema: Schema, name: str = "", meaning: str = "", definitions: Schema | None = None
) -> list[Section]:
    """Return the section of a model and the sections of all models inside it."""
    definitions = schema.get("$defs", {}) if definitions is None else definitions
    keys: list[SpecKey] = []
    inner: list[Section] = []
    for own, given in schema["properties"].items():
        dotted = f"{name}.{own}".removeprefix(".")
        forms = [form for some in given.get("anyOf", [given]) for form in some.get("oneOf", [some])]
        models = [definitions[form["$ref"].rpartition("/")[2]] for form in forms if "$ref" in form]
        described = given.get("description") or models[0]["description"]
        for model in models:
            inner += collect_sections(
                model, dotted, model["description"] if len(models) > 1 else described, definitions
            )
        for model in filter(None, map(find_inner_model, forms)):
            inner += collect_sections(definitions[model], f"{dotted}.*", described, definitions)
        if not models or len(forms) > 1:
            default = f"`{format_literal(given['default'])}`" if "default" in given else "required"
            choices = tuple(format_literal(choice) for form in forms for choice in list_choices(form))
            keys.append(
                SpecKey(dotted, " or ".join(dict.fromkeys(map(format_type, forms))), default, described, choices)
            )
    return [Section(name, meaning, keys), *inner]


def find_inner_model(form: Schema) -> str | None:
    """Return the name of the model that the items of a list or mapping have, or None."""
    inside = form.get("items") or form.get("additionalProperties")
    choices = inside.get("anyOf", [inside]) if isinstance(inside, dict) else []
    return next((choice["$ref"].rpartition("/")[2] for choice in choices if "$ref" in choice), None)


def list_choices(form: Schema) -> list[Any]:
    """Return the values of an enumeration, or an empty list."""
    return list(form["enum"]) if "enum" in form else [form["const"]] if "const" in form else []


def format_type(form: Schema) -> str:
    """Return the type of one form of a value as text."""
    if "$ref" in form:
        return "section"
    if list_choices(form):
        return ", ".join(f"`{format_literal(choice)}`" for choice in list_choices(form))
    if find_inner_model(form):
        either = [TYPE_WORDS[choice["type"]] for choice in form.get("items", {}).get("anyOf", []) if "type" in choice]
        return f"{TYPE_WORDS[form['type']]} of {' or '.join([*either, 'sections'])}"
    bounds = [f"{sign} {form[bound]:,}" for bound, sign in BOUND_SIGNS.items() if bound in form]
    return " ".join([TYPE_WORDS[form["type"]], ", ".join(bounds)]).strip()


def format_literal(value: Any) -> str:
    """Return a value as it is written in a spec."""
    return value if isinstance(value, str) else json.dumps(value)


class ResumeRule:
    """Rule for a key that has changed when the job of a shipped spec resumes."""

    def __init__(self, path: Path, config: type[JobConfig], keys: Sequence[SpecKey]):
        self._path, self._config = path, config
        self._given = [given for section, given in SECTION_OVERRIDES.items() if section in config.model_fields]
        self._mappings = {key.name for key in keys if key.type == TYPE_WORDS["dict"] and "*" not in key.name}
        self._usual = self._trajectory() or set()
        self._content = validate_config(load_document(path, self._given), config).content_keys
        choices = [(key.name, choice) for key in keys for choice in key.choices]
        tried = {f"{name}: {choice}": self._trajectory(f"{name}={choice}") for name, choice in choices}
        self._others = {choice: keys for choice, keys in tried.items() if keys is not None}

    def _trajectory(self, *overrides: str) -> set[str] | None:
        """Return the keys of the trajectory, or None if the overrides are not valid for the spec.

        Mappings with keys of the user's choice get one key: an empty mapping has none in the trajectory, nor has a
        section that is null.
        """
        document = load_document(
            self._path, [*(f"{name}={{x: 1}}" for name in self._mappings), *self._given, *overrides]
        )
        try:
            found = compute_trajectory(validate_spec(document), validate_config(document, self._config))
        except SpecError:
            return None
        return {parent if (parent := key.rpartition(".")[0]) in self._mappings else key for key in found}

    def __call__(self, name: str) -> str:
        """Return the rule of a key, with the choices of other keys that change it."""
        if name == OWNER_KEY:
            return "stays"
        if name in HOOK_KEYS:
            return HOOK_KEYS[name]
        if name.startswith("config.stages"):
            return STAGE_RULES.get(name, "trajectory")
        if is_below(name.replace("*", "0"), self._content):
            return "content"
        if any(key.startswith(f"{name}.") for key in self._usual):
            return "by key"
        words = {True: "trajectory", False: "free"}
        usual = self._is_in(self._usual, name)
        odd = [f"`{choice}`" for choice, keys in self._others.items() if self._is_in(keys, name) != usual]
        return words[usual] + (f"; {words[not usual]} with {', '.join(odd)}" if odd else "")

    @staticmethod
    def _is_in(trajectory: set[str], name: str) -> bool:
        return any(f"{name}.".startswith(f"{key}.") for key in trajectory)


def generate_spec_lines() -> Iterator[str]:
    """Yield the tables of all keys of a spec, including those of the shipped jobs' `config`."""
    top = collect_sections(ExecutionSpec.model_json_schema(), meaning="Keys of every job.")
    for path, own in JOBS:
        document = load_document(path)
        job, config = document.data["job"], load_job_class(document, RestoreableJob).Config  # type: ignore[attr-defined]
        schema = config.model_json_schema()
        sections = collect_sections(schema, "config", schema.get("description", ""))
        rule = ResumeRule(path, config, [key for section in sections for key in section.keys])
        for section in (*top, *sections) if path == TRAINER else sections:
            if section.keys and (path == TRAINER or f"{section.name}.".startswith(f"{own}.")):
                title = f"`{section.name}`" if section.name else "Top level"
                of = f" of `{job}`" if section.name == own else ""
                yield from (f"### {title}{of}", "", section.meaning, "")
                is_of_trainer = issubclass(config, TrainerConfig) and section.name.startswith("config.")
                stage_keys = list_keys(config, Policy.STAGE) if is_of_trainer else ()
                yield from generate_spec_table(section.keys, rule, stage_keys)


def generate_hook_lines() -> Iterator[str]:
    """Yield a table of the config of each built-in hook."""
    yield from (
        "## Reference: hooks",
        "",
        "The keys belong under `config` of the entry in `hooks`.",
        "",
    )
    for hook in (each for each in vars(hooks).values() if isinstance(each, type) and issubclass(each, Hook)):
        if hook in (Hook, Observer):
            continue
        yield from (f"### `runner.hook:{hook.__name__}`", "", get_summary(hook), "")
        schema, free = hook.Config.model_json_schema(), hook.Config.model_construct().free_keys
        (section,) = collect_sections(schema, meaning=schema.get("description", ""))
        rows = [
            (f"`{key.name}`", key.type, key.default, key.meaning, "free" if key.name in free else "trajectory")
            for key in section.keys
        ]
        yield from (section.meaning, "", *generate_table(SPEC_HEADS, rows)) if rows else ("It has no keys.", "")


def get_summary(hook: type[Hook]) -> str:
    """Return the first paragraph of the docstring of a hook, in one line."""
    return " ".join((hook.__doc__ or "").partition("\n\n")[0].split())


def generate_spec_table(keys: Sequence[SpecKey], rule: ResumeRule, stage_keys: Sequence[str] = ()) -> Iterator[str]:
    """Yield a table of spec keys; one of the sections of a trainer's config has a column for stages."""
    rows = [(f"`{key.name}`", key.type, key.default, key.meaning, rule(key.name)) for key in keys]
    if not stage_keys:
        return generate_table(SPEC_HEADS, rows)
    allowed = ["yes" if is_below(key.name.replace("*", "0"), stage_keys) else "" for key in keys]
    return generate_table((*SPEC_HEADS, "in a stage"), [(*row, cell) for row, cell in zip(rows, allowed, strict=True)])


# Optimizers and schedules.


def generate_recipe_lines() -> Iterator[str]:
    """Yield the tables of optimizers and schedules: their keys with defaults, and the source or the formula."""
    yield from (
        "## Reference: optimizers",
        "",
        "A key that the chosen optimizer does not read is refused unless it has its default value.",
        "",
    )
    yield from generate_name_table(OPTIMIZERS, "source")
    text = "`u` is the completed fraction of the steps after the warm-up, `final` is `final_learning_rate`."
    yield from ("## Reference: schedules", "", text, "")
    yield from generate_name_table(SCHEDULES, "after the warm-up")


def generate_name_table(names: Mapping[str, LibraryEntry], source: str) -> Iterator[str]:
    """Yield a table of optimizers or schedules."""
    rows = [
        (
            f"`{name}`",
            ", ".join(f"`{key}: {format_literal(default)}`" for key, default in of.defaults.items()),
            of.source,
        )
        for name, of in names.items()
    ]
    return generate_table(("name", "keys and defaults", source), rows)


# Keys of files.


def generate_key_table(keys: Sequence[Key]) -> Iterator[str]:
    """Yield a table of the keys of a file."""
    rows = [(f"`{key.name}`", format_kind(key), key.unit, key.meaning) for key in keys]
    return generate_table(("key", "type", "unit", "meaning"), rows)


def format_kind(key: Key) -> str:
    """Return the type of a value as text."""
    kinds = get_args(key.type) if isinstance(key.type, UnionType) else (key.type,)
    return " or ".join(TYPE_WORDS[kind.__name__] for kind in kinds)


def format_event_row(event: EventType) -> tuple[str, str, str, str]:
    """Return the table row of one event, with its details in one cell."""
    types = [", ".join(filter(None, (format_kind(key), key.unit))) for key in event.details]
    details = [f"`{key.name}` ({kind}): {key.meaning}" for key, kind in zip(event.details, types, strict=True)]
    return f"`{event.name}`", event.writer, event.meaning, " ".join(details)


def generate_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table and an empty line."""
    for row in (heads, ["---"] * len(heads), *rows):
        assert not any("|" in cell for cell in row), row
        yield f"| {' | '.join(row)} |"
    yield ""


def generate_reference() -> str:
    """Return the whole reference."""
    lines = [
        "## Reference: the keys of a spec",
        "",
        *generate_spec_lines(),
        *generate_recipe_lines(),
        *generate_hook_lines(),
    ]
    lines += [
        "## Reference: `metrics.jsonl`",
        "",
        "One JSON object per logged step.",
        "",
        *generate_key_table(ROW_KEYS),
    ]
    lines += [
        "## Reference: `events.jsonl`",
        "",
        "One JSON object per event. Every event has these keys:",
        "",
        *generate_key_table(EVENT_KEYS),
    ]
    lines += [
        *generate_table(("event", "written by", "meaning", "details"), [format_event_row(event) for event in EVENTS])
    ]
    lines += ["## Reference: `checkpoints/<step>/manifest.json`", "", *generate_key_table(MANIFEST_KEYS)]
    lines += [
        "## Reference: `checkpoints/<step>/arrays.<attempt>/<process>.json`",
        "",
        *generate_key_table(INDEX_KEYS),
    ]
    lines += ["## Reference: `result.json`", "", *generate_key_table(RESULT_KEYS)]
    lines += ["## Reference: `assets/assets.json`", "", *generate_key_table(ASSET_KEYS)]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(BEGIN)[0] + BEGIN + "\n" + generate_reference())
    print(PAGE.relative_to(ROOT))
