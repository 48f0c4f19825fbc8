"""The model card of an export: README.md, with the front matter that the Hub reads.

All of it is a function of the checkpoint, the spec and the rows up to its step, so the same step gives the same card
however often it is pushed. How much time a run took is told only of one that has reached its end: it no longer changes.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import yaml

from runner.checkpoint.manifest import Manifest
from runner.checkpoint.weights import weight_names
from runner.config import SOURCE_NAME, DataConfig
from runner.history.record import History, State
from runner.record import PARAMS
from runner.spec import ExecutionSpec
from runner.storage import JsonObject
from runner.train.metrics.row import Row
from runner.weights.tokenizer import TOKENIZER

CARD = "README.md"
EVALUATIONS_MAX = 12  # lines of the table; of more, some, evenly, and the last
_LOSS = re.compile(r"val/(.+/)?loss")
_HUB_CACHE = re.compile(r"(?:^|/)models--([^/]+)--([^/]+)(?:/|$)")  # where the Hub's own library keeps a download
_GENERATES_TEXT = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class Words:
    """What a user says of the weights that no file of the run tells.

    Attributes:
        repository: OWNER/NAME, where they are to be.
        license: as the Hub calls it, such as apache-2.0; None: the card names none.
        base_model: OWNER/NAME of the model that training began with; None: what `init_from` tells.
    """

    repository: str
    license: str | None = None
    base_model: str | None = None


@dataclass(frozen=True)
class Evidence:
    """What a run has left of a step.

    Attributes:
        spec: resolved.
        data: None of a job that is no trainer.
        manifest: of the checkpoint.
        rows: of the surviving trajectory, up to its step.
        history: of the whole run.
        config: the content of the export's `config.json`.
        files: the names of what was exported.
    """

    spec: ExecutionSpec
    data: DataConfig | None
    manifest: Manifest
    rows: Sequence[Row]
    history: History
    config: JsonObject
    files: Collection[str]


def model_card(evidence: Evidence, words: Words) -> str:
    """The content of README.md."""
    front = yaml.safe_dump(_front_matter(evidence, words), sort_keys=False, allow_unicode=True)
    spec, manifest = evidence.spec, evidence.manifest
    parts = [
        f"---\n{front}---\n",
        f"# {spec.name}\n",
        f"Weights of step {manifest.step:,} of the run `{spec.name}`, a `{_code(spec.job)}` trained on JAX.\n",
        _table(("", ""), _facts(evidence)),
        _usage(evidence, words.repository),
        _evaluations(evidence.rows),
    ]
    return "\n".join(part for part in parts if part)


def _front_matter(evidence: Evidence, words: Words) -> Mapping[str, str | list[str]]:
    """What the Hub sorts and filters by; a key of which nothing is known is left out."""
    found: dict[str, str | list[str]] = {}
    if _generates_text(evidence.config):
        found |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if words.license is not None:
        found["license"] = words.license
    base = words.base_model or _base_model(evidence.spec)
    if base is not None:
        found["base_model"] = base
    # The Hub takes names of its own kind alone: a path or a pattern of files is told in the table.
    datasets = [name for name in _sources(evidence.data) if re.match(SOURCE_NAME, name)]
    if datasets:
        found["datasets"] = datasets
    kind = evidence.config.get("model_type")
    return found | {"tags": ["jax", *([kind] if isinstance(kind, str) else [])]}


def _generates_text(config: JsonObject) -> bool:
    return any(str(name).endswith(_GENERATES_TEXT) for name in config.get("architectures") or [])


def _base_model(spec: ExecutionSpec) -> str | None:
    """OWNER/NAME where `init_from` is a download as the Hub's library keeps it; of another path nobody knows."""
    found = None if spec.checkpoint.weights is None else _HUB_CACHE.search(spec.checkpoint.weights.path)
    return None if found is None else "/".join(found.groups())


def _sources(data: DataConfig | None) -> list[str]:
    return [] if data is None else [named.source for named in data.sources]


def _facts(evidence: Evidence) -> Iterable[tuple[str, str]]:
    """What is told of the weights, by name."""
    spec, data, manifest = evidence.spec, evidence.data, evidence.manifest
    yield "step", f"{manifest.step:,}"
    tokens = _newest(evidence.rows, "train/tokens")
    if tokens is not None:
        yield "tokens", f"{int(tokens):,}"
    for name, key in (("training loss", "train/loss"), ("validation loss", "val/loss")):
        loss = _newest(evidence.rows, key)
        if loss is not None:
            yield f"{name}, nats a token", f"{loss:.4f}"
    weights = [manifest.leaves[name]["shape"] for name in weight_names(manifest, PARAMS)]
    yield "parameters", f"{sum(math.prod(shape) for shape in weights):,}"
    if data is not None:
        yield "data", ", ".join(f"`{_code(_public(source))}`" for source in _sources(data))
        yield "tokens of an example", f"{data.sequence_length:,}"
        has_tokenizer = TOKENIZER in evidence.files
        yield "tokenizer", f"`{TOKENIZER}`" if has_tokenizer else f"not here as `{TOKENIZER}`"
    if spec.checkpoint.weights is not None:
        yield "began with", f"`{_code(_public(spec.checkpoint.weights.path))}`"
    yield "seed", str(spec.seed)
    yield from _hardware(manifest)
    if evidence.history.state is State.DONE:
        yield "time", f"{evidence.history.wall_seconds / 3600:.2f} h, {evidence.history.goodput:.1%} of it in steps"
    yield "fingerprint of the whole state", f"`{manifest.fingerprint}`"


def _hardware(manifest: Manifest) -> Iterable[tuple[str, str]]:
    """What has saved the step: its devices, and the versions of what ran on them."""
    topology, environment = manifest.topology or {}, manifest.environment or {}
    mesh = topology.get("mesh")
    if isinstance(mesh, dict) and "device_kind" in topology:
        axes = ", ".join(f"{axis} {size}" for axis, size in mesh.items() if size != 1)
        kind = _code(str(topology["device_kind"]))
        yield "hardware", f"{math.prod(mesh.values())} x `{kind}`" + (f" ({axes})" if axes else "")
    versions = environment.get("versions")
    if isinstance(versions, dict):
        yield "versions", ", ".join(f"{_code(str(name))} {_code(str(number))}" for name, number in versions.items())


def _newest(rows: Sequence[Row], key: str) -> float | None:
    """The newest value of a key that is a number, None if no row has one."""
    found = (row[key] for row in reversed(rows) if isinstance(row.get(key), int | float))
    return next(found, None)


def _evaluations(rows: Sequence[Row]) -> str:
    """A table of the validation losses over the steps; empty where there are none."""
    evaluated = [row for row in rows if any(_LOSS.fullmatch(key) for key in row)]
    if not evaluated:
        return ""
    stride = math.ceil(len(evaluated) / EVALUATIONS_MAX)
    shown = evaluated[::-1][::stride][::-1]
    keys = list(dict.fromkeys(key for row in shown for key in row if _LOSS.fullmatch(key)))
    lines = [(f"{row['step']:,}", *(_figure(row.get(key)) for key in ("train/loss", *keys))) for row in shown]
    return "## Losses\n\n" + _table(("step", "train/loss", *keys), lines)


def _figure(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else ""


def _usage(evidence: Evidence, repository: str) -> str:
    """How the weights are opened, where `transformers` knows their architecture."""
    if not _generates_text(evidence.config):
        return ""
    has_tokenizer = TOKENIZER in evidence.files
    lines = [
        "```python",
        f"from transformers import AutoModelForCausalLM{', AutoTokenizer' if has_tokenizer else ''}",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{repository}")',
        *([f'tokenizer = AutoTokenizer.from_pretrained("{repository}")'] if has_tokenizer else []),
        "```",
        "",
    ]
    return "\n".join(lines)


def _public(where: str) -> str:
    """A path without the directories of the machine that it was on, which tell a reader nothing; a URL as it is."""
    return where if "://" in where else where.rstrip("/").rpartition("/")[2]


def _code(text: str) -> str:
    """Text that may stand in a cell, inside of backticks or not: one line that begins no markup."""
    return "".join(each if each.isprintable() and each not in "`|<>" else " " for each in text)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
