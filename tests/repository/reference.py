"""Generator of the reference in `.github/docs/reference`: all keys of a spec and of the files of a run.

    python -m tests.repository.reference     writes the reference

There is a page for each section of the spec and for each file. A table has the first sentence about a key; the rest
follows below a heading of its own. Types, defaults and meanings come from the JSON Schema of the models. Whether a key
may change when a run resumes is determined by calling `compute_trajectory` with a shipped spec, as it is and with every
choice that its keys offer.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from runner import RestoreableJob
from runner.attempts.events import EVENT_KEYS, EVENTS, EventType
from runner.attempts.layout import FORECAST_KEYS, RESULT_KEYS
from runner.attempts.progress_file import PROGRESS_KEYS
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
PAGES = ROOT / ".github" / "docs" / "reference"
INDEX = "index.md"  # written by hand above `BEGIN`
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

SPEC_HEADS = ("key", "type", "default", "change", "affects", "meaning")
SUMMARY_CHARACTERS = 130  # a longer first sentence is cut at its first colon or semicolon
FILES = {
    "metrics.jsonl": "Rows of a run, one JSON object a logged step.",
    "events.jsonl": "Ledger of all attempts, one JSON object an event.",
    "manifest.json": "Manifest of a checkpoint, and the tables of its arrays.",
    "result.json": "Result of a run that has reached its end.",
    "forecast.json": "Forecast of the loss of a run, written before the run began.",
    "progress.json": "How far a run is, for programs that ask often.",
    "assets.json": "Files of published weights that an export needs.",
}

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


@dataclass(frozen=True)
class Entry:
    """A line of a table, and what is written below a heading of its own if the line has not everything."""

    name: str
    cells: tuple[str, ...]  # between the name and the meaning
    meaning: str
    details: tuple[str, ...] = ()  # further paragraphs


def make_anchor(heading: str) -> str:
    """Return the anchor of a heading in GitHub's form."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def summarise(meaning: str) -> str:
    """Return the first sentence of a description, or its first clause if the sentence is long."""
    (first, *_) = re.split(r"(?<=[.!?]) (?=[A-Z`\[])", meaning)
    if len(first) > SUMMARY_CHARACTERS:
        # Not inside parentheses, and not so early that nothing is said.
        for match in re.finditer(r"[:;] ", first):
            clause = first[: match.start()]
            if len(clause) > 15 and clause.count("(") == clause.count(")"):
                return f"{clause}."
    return first


class PageWriter:
    """Text of one page. A description that the page already has is a link to it."""

    def __init__(self, title: str, meaning: str):
        self.title, self.meaning = title, meaning
        self._lines = [f"# {title}", "", BEGIN, *([meaning, ""] if meaning else [])]
        self._described: dict[str, str] = {}
        self._anchors: dict[str, int] = defaultdict(int)
        self._reserve(title)

    def _reserve(self, heading: str) -> str:
        """Return the anchor of the next heading with this text."""
        anchor = make_anchor(heading)
        self._anchors[anchor] += 1
        return anchor if self._anchors[anchor] == 1 else f"{anchor}-{self._anchors[anchor] - 1}"

    def add_heading(self, heading: str, meaning: str) -> None:
        self._reserve(heading)
        self._lines += [f"## {heading}", "", *([meaning, ""] if meaning else [])]

    def add_entries(self, heads: Sequence[str], entries: Sequence[Entry]) -> None:
        """Add a table, and a heading for each entry that is longer than its line."""
        rows, below = [], list[str]()
        for entry in entries:
            summary = summarise(entry.meaning)
            if summary != entry.meaning or entry.details:
                heading = f"`{entry.name}`"
                known = self._described.get(entry.meaning)
                if known is None or entry.details:
                    anchor = self._reserve(heading)
                    self._described.setdefault(entry.meaning, anchor)
                    parts = entry.details if summary == entry.meaning else (entry.meaning, *entry.details)
                    below += [f"### {heading}", "", *(line for part in parts for line in (part, ""))]
                else:
                    anchor = known
                summary = f"{summary} [More](#{anchor})"
            rows.append((f"`{entry.name}`", *entry.cells, summary))
        self._lines += [*generate_table(heads, rows), *below]

    def add_lines(self, lines: Iterable[str]) -> None:
        self._lines += lines

    @property
    def text(self) -> str:
        return "\n".join(self._lines).rstrip("\n") + "\n"


@dataclass(frozen=True)
class ChangeRule:
    """Cells of a key of a spec: how its value may change during a run, and what its value affects."""

    resume: ResumeRule
    config: JobConfig
    stage_keys: Sequence[str]

    def make_entry(self, key: SpecKey) -> Entry:
        rule, _, exceptions = self.resume(key.name).partition("; ")
        exceptions = exceptions.replace("free", "May change at any restart").replace("trajectory", "Affects results")
        details = (f"{exceptions}.",) if exceptions else ()
        change, affects = self.explain(key.name, rule)
        return Entry(key.name, (key.type, key.default, change, affects), key.meaning, details)

    def explain(self, name: str, rule: str) -> tuple[str, str]:
        """Return both cells of a key with this rule for a resume."""
        if rule in ("free", "by key", "stays", "content"):
            words = {"free": "any restart", "by key": "by key", "stays": "no", "content": "same content"}
            affects = {"free": "", "by key": "", "stays": "name", "content": "results"}
            return words[rule], affects[rule]
        if name.startswith("hooks") or name == "job":
            return "no", "results"  # the form of the state depends on them
        if name.startswith("config.stages"):
            return "later steps", "results"
        dotted = name.replace("*", "0")
        ways = ["stage"] if is_below(dotted, self.stage_keys) else []
        ways += ["fork"] if self.config.list_fork_changes([dotted]) else []
        return ", ".join(ways) or "no", "results"


def name_page(section: str, job: str) -> str:
    """Return the name of the page of a section."""
    if not section.startswith("config"):
        return section.partition(".")[0] or "top"
    if section.startswith(("config.model.moe", "config.model.rope", "config.model.window_rope")):
        return "config.model.moe" if ".moe" in section else "config.model.rope"
    first = ".".join(section.split(".")[:2])
    names = {
        ("config.model", "PretrainGPT"): "config.model.gpt",
        ("config.model", "PretrainDecoder"): "config.model.decoder",
        ("config", "Counter"): "config.counter",
    }
    return names.get((first, job.rpartition(":")[2]), first.removesuffix(".*"))


def generate_spec_pages() -> dict[str, PageWriter]:
    """Return a page for each section of a spec, including those of the shipped jobs' `config`."""
    pages: dict[str, PageWriter] = {}
    top = collect_sections(ExecutionSpec.model_json_schema(), meaning="Keys of every job.")
    for path, own in JOBS:
        document = load_document(path)
        job, config = document.data["job"], load_job_class(document, RestoreableJob).Config  # type: ignore[attr-defined]
        schema = config.model_json_schema()
        meaning = schema.get("description", "Keys of a trainer's config that may be null or empty.")
        sections = collect_sections(schema, "config", meaning)
        rule = ResumeRule(path, config, [key for section in sections for key in section.keys])
        stage_keys = list_keys(config, Policy.STAGE) if issubclass(config, TrainerConfig) else ()
        changes = ChangeRule(rule, validate_config(document, config), stage_keys)
        for section in (*top, *sections) if path == TRAINER else sections:
            if section.keys and (path == TRAINER or f"{section.name}.".startswith(f"{own}.")):
                of = f" of `{job}`" if section.name == own else ""
                # Alternatives for one section differ in the only value of their key `name`.
                kinds = [key.choices[0] for key in section.keys if key.name.endswith(".name") and len(key.choices) == 1]
                of += "".join(f" with `name: {kind}`" for kind in kinds)
                title = f"`{section.name}`{of}" if section.name else "Top level of a spec"
                name = name_page(section.name, job)
                if name in pages:
                    pages[name].add_heading(title, section.meaning)
                else:
                    pages[name] = PageWriter(title, section.meaning)
                pages[name].add_entries(SPEC_HEADS, [changes.make_entry(key) for key in section.keys])
    return pages


def add_hooks(page: PageWriter) -> None:
    """Add the config of each built-in hook."""
    page.add_heading("Built-in hooks", "The keys belong under `config` of the entry in `hooks`.")
    for hook in (each for each in vars(hooks).values() if isinstance(each, type) and issubclass(each, Hook)):
        if hook in (Hook, Observer):
            continue
        page.add_heading(f"`runner.hook:{hook.__name__}`", get_summary(hook))
        schema, free = hook.Config.model_json_schema(), hook.Config.model_construct().free_keys
        (section,) = collect_sections(schema, meaning=schema.get("description", ""))
        cells = {True: ("any restart", ""), False: ("no", "results")}
        entries = [
            Entry(key.name, (key.type, key.default, *cells[key.name in free]), key.meaning) for key in section.keys
        ]
        page.add_lines((section.meaning, "") if entries else ("It has no keys.", ""))
        if entries:
            page.add_entries(SPEC_HEADS, entries)


def get_summary(hook: type[Hook]) -> str:
    """Return the first paragraph of the docstring of a hook, in one line."""
    return " ".join((hook.__doc__ or "").partition("\n\n")[0].split())


# Optimizers and schedules.


def generate_name_table(names: Mapping[str, LibraryEntry], source: str) -> Iterator[str]:
    """Yield a table of optimizers or schedules: their keys with defaults, and the source or the formula."""
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


def make_key_entry(key: Key) -> Entry:
    """Return the table line of a key of a file."""
    return Entry(key.name, (format_kind(key), key.unit), key.meaning)


def format_kind(key: Key) -> str:
    """Return the type of a value as text."""
    kinds = get_args(key.type) if isinstance(key.type, UnionType) else (key.type,)
    return " or ".join(TYPE_WORDS[kind.__name__] for kind in kinds)


def make_event_entry(event: EventType) -> Entry:
    """Return the table line of an event, with its details as a list."""
    types = [", ".join(filter(None, (format_kind(key), key.unit))) for key in event.details]
    details = [f"- `{key.name}` ({kind}): {key.meaning}" for key, kind in zip(event.details, types, strict=True)]
    return Entry(event.name, (event.writer,), event.meaning, ("\n".join(details),) if details else ())


def generate_file_pages() -> dict[str, PageWriter]:
    """Return a page for each kind of file in the directory of a run."""
    heads = ("key", "type", "unit", "meaning")
    pages = {name: PageWriter(f"`{name}`", meaning) for name, meaning in FILES.items()}

    def add(name: str, keys: Sequence[Key]) -> None:
        pages[name].add_entries(heads, [make_key_entry(key) for key in keys])

    add("metrics.jsonl", ROW_KEYS)
    pages["events.jsonl"].add_lines(("Every event has these keys:", ""))
    add("events.jsonl", EVENT_KEYS)
    pages["events.jsonl"].add_heading("Events", "")
    pages["events.jsonl"].add_entries(("event", "written by", "meaning"), [make_event_entry(each) for each in EVENTS])
    pages["manifest.json"].add_lines(("The file is `checkpoints/<step>/manifest.json`.", ""))
    add("manifest.json", MANIFEST_KEYS)
    pages["manifest.json"].add_heading("`checkpoints/<step>/arrays.<attempt>/<process>.json`", "")
    add("manifest.json", INDEX_KEYS)
    add("result.json", RESULT_KEYS)
    add("forecast.json", FORECAST_KEYS)
    add("progress.json", PROGRESS_KEYS)
    pages["assets.json"].add_lines(("The file is `assets/assets.json`.", ""))
    add("assets.json", ASSET_KEYS)
    return pages


def generate_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table and an empty line."""
    for row in (heads, ["---"] * len(heads), *rows):
        assert not any("|" in cell for cell in row), row
        yield f"| {' | '.join(row)} |"
    yield ""


def generate_pages() -> dict[str, str]:
    """Return the text of every page by its file name; that of the index below its marker."""
    sections, files = generate_spec_pages(), generate_file_pages()
    add_hooks(sections["hooks"])
    meaning = "A key that the chosen optimizer does not read is refused unless it has its default value."
    sections["config.optimizer"].add_heading("Optimizers", meaning)
    sections["config.optimizer"].add_lines(generate_name_table(OPTIMIZERS, "source"))
    meaning = "`u` is the completed fraction of the steps after the warm-up, `final` is `final_learning_rate`."
    sections["config.schedule"].add_heading("Schedules", meaning)
    sections["config.schedule"].add_lines(generate_name_table(SCHEDULES, "after the warm-up"))
    index = [BEGIN]
    for title, pages in (("Sections of a spec", sections), ("Files of a run", files)):
        rows = [(f"[{page.title}]({name}.md)", page.meaning) for name, page in pages.items()]
        index += [f"## {title}", "", *generate_table(("page", "content"), rows)]
    found = {f"{name}.md": page.text for name, page in (sections | files).items()}
    return found | {INDEX: "\n".join(index)}


if __name__ == "__main__":
    generated = generate_pages()
    for former in PAGES.glob("*.md"):
        if former.name not in generated:
            former.unlink()
    for file_name, text in generated.items():
        kept = (PAGES / file_name).read_text().partition(BEGIN)[0] if file_name == INDEX else ""
        (PAGES / file_name).write_text(kept + text)
    print(PAGES.relative_to(ROOT))
