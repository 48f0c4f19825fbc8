"""Every value of every key with few values: three steps and a resume are bit-identical to an uninterrupted run.

The keys are found in the models of a spec: a Literal, true or false, null, `auto`; any other value is OPEN, and SOME
has an example of it. New keys and values are included automatically, and fail if they need companions that WITH lacks.
Daily, compatible values share a run of a model that compiles fast. The soak tests run each value separately with a
GPT. Values of a decoder's own keys are traced daily, and run in the soak.
"""

import string
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pydantic import BaseModel

from experiments.gpt import PretrainGPT
from experiments.model.decoder import PretrainDecoder
from runner import BaseTrainer, ExecutionSpec, RestoreableJob
from runner.config import PrecisionConfig
from runner.optim.config import OPTIMIZERS
from runner.parallel.mesh import AXES
from runner.storage import read_json
from tests.data.buckets import URL, make_random_shards, put_in_bucket, write_corpus
from tests.support import same_bits
from tests.support.bigram import write_questions
from tests.support.tiny_jobs import make_counter, make_gpt, read_outcome, stop_after

OPEN = "another"  # any other value
STOP, STEPS, TOKENS = 2, 3, 3 * 16 * 16

BASE: dict[str, Any] = {
    "config.model": {"layers": 1, "heads": 2, "width": 16},
    "config.schedule": {"warmup_steps": 1},
    "config.train": {"total_steps": STEPS, "global_batch_examples": 16},
    "config.eval.batches": 1,
}
DECODER_BASE: dict[str, Any] = BASE | {
    "config.model": {"layers": 2, "heads": 2, "width": 16, "mlp_width": 24},
    "config.data.sequence_length": 16,
}
SOME: dict[str, Any] = {
    "topology.mesh.data": 8,
    "topology.mesh.fsdp": 2,
    "topology.mesh.sequence": 2,
    "topology.mesh.tensor": 2,
    "topology.mesh.expert": 2,
    "topology.price.dollars_per_chip_hour": 1.5,
    "topology.price.as_of": "2026-11-30",
    "checkpoint.every_steps": 1,
    "checkpoint.every_minutes": 1.0,
    "checkpoint.every_epochs": 0.1,
    "checkpoint.mean_time_between_failures_hours": 1.0,
    "checkpoint.keep_every_steps": 1,
    "checkpoint.init_from": "WARM",  # directory of a finished run
    "checkpoint.fork_from.step": 1,
    "checkpoint.local_directory": "LOCAL",  # directory on this host
    "checkpoint.local_every_steps": 1,
    "checkpoint.local_replicas": 0,
    "checkpoint.grace_seconds": 30.0,
    "deadlines.step_seconds": 600.0,
    "logging.wandb_entity": "some-team",
    "logging.profile": "1:3",
    "logging.notify.command": ["true"],
    "logging.notify.webhook": "$NO_SUCH_NAME",
    "config.model.vocabulary_size": 300,
    "config.optimizer.learning_rate": 0.01,
    "config.optimizer.clip_norm": 0.01,
    "config.optimizer.matrices": ["*embedding"],
    "config.optimizer.groups.*.weight_decay": 0.5,
    "config.optimizer.groups.*.clip_norm": 0.5,
    "config.train.replay_every_steps": 2,
    "config.schedule.warmup_share": 0.4,
    "config.schedule.decay_steps": 1,
    "config.train.total_steps": STEPS,
    "config.train.total_tokens": TOKENS,
    "config.train.total_epochs": 0.19,  # of the ids below
    "config.train.micro_batch_examples": 1,
    "config.train.batch_ramp.over_steps": 1,
    "config.train.batch_ramp.over_tokens": 100,
    "config.stages.*.from_step": 2,
    "config.stages.*.from_tokens": 300,
    "config.stages.*.why": "anneal",
    "config.train.same_bits_devices": 8,
    "config.eval.every_steps": 2,
    "config.eval.every_epochs": 0.1,
    "config.eval.global_batch_examples": 8,
    "config.eval.micro_batch_examples": 1,
    "config.eval.multiple_choice.*.micro_batch_examples": 1,
    "config.eval.multiple_choice.*.every_steps": 1,
    "config.eval.multiple_choice.*.limit": 1,
    "config.eval.samples.every_steps": 1,
    "config.eval.harness.include_path": "tasks",
    "config.eval.harness.limit": 1,
    "config.eval.harness.every_steps": 1,
    "config.memory.loss_chunk_positions": 8,
    "config.data.sequence_length": 16,
    "config.data.cache_bytes": 1 << 16,
    "config.data.tokenise": {"tokenizer": {"kind": "bytes"}, "separator": 0},
    "config.data.mixture.*.max_epochs": 1000.0,
    "hooks.*.name": "early",
    "config.model.preset": "smollm2_135m",
    "config.model.key_value_heads": 1,
    "config.model.head_dim": 6,
    "config.model.latent.query_rank": 12,
    "config.model.window": 4,
    "config.model.rope.scaling": {"name": "linear", "factor": 2.0},
    "config.model.rope.scaling.attention_factor": 1.5,
    "config.model.window_rope.scaling": {"name": "linear", "factor": 2.0},
    "config.model.window_rope.scaling.attention_factor": 1.5,
    "config.model.query_scale": 0.3,
    "config.model.attention_softcap": 2.0,
    "config.model.logit_softcap": 2.0,
    "config.model.embedding_scale": 2.0,
    "config.model.base_width": 8,
    "config.model.moe.expert_width": 24,
    "config.model.moe.shared_width": 12,
    "config.model.moe.capacity_factor": 1.0,
    "config.model.layer_embedding_width": 4,
    "config.model.full_heads.head_dim": 6,
    "config.model.full_heads.key_value_heads": 1,
    "config.model.key_value_sharing.mlp_width": 24,
    "config.model.moe.bias_rate": 0.01,
}
# Text options that token files do not read, with their defaults.
TOKEN_FILE_DEFAULTS: dict[str, Any] = {
    "config.data.tokenizer": "bytes",
    "config.data.document_separator": "none",
    "config.data.packing": "concatenate",
}
WITH: dict[tuple[str, Any], dict[str, Any]] = {
    **{
        (f"topology.mesh.{axis}", value): {f"topology.mesh.{other}": 1 for other in AXES if other != axis} | data
        for axis in AXES
        for value, data in ((OPEN, {"topology.mesh.data": "auto"}), ("auto", {"topology.mesh.data": 4}))
        if axis != "data"
    },
    ("topology.mesh.data", OPEN): {f"topology.mesh.{other}": 1 for other in AXES if other != "data"},
    ("topology.grow", "at_save"): {"topology.elastic": True},
    **{
        (f"{section}.every_epochs", OPEN): {"config.stages": [], "config.data.mixture": []}
        for section in ("checkpoint", "config.eval")
    },
    ("topology.price.as_of", None): {"topology.price.dollars_per_chip_hour": 1.5},
    ("topology.price.as_of", OPEN): {"topology.price.dollars_per_chip_hour": 1.5},
    **{
        ("config.memory.row_attention", value): dict.fromkeys((f"topology.mesh.{axis}" for axis in AXES), 1)
        | {"topology.mesh.sequence": 2, "topology.mesh.data": "auto"}
        for value in ("ring", "gather")
    },
    ("checkpoint.every_steps", None): {"checkpoint.every_minutes": 1.0},
    ("checkpoint.every", "auto"): {"checkpoint.every_steps": None, "checkpoint.every_minutes": None},
    ("checkpoint.keep_best.mode", "min"): {"checkpoint.keep_best.metric": "train/loss"},
    ("checkpoint.keep_best.mode", "max"): {"checkpoint.keep_best.metric": "train/loss"},
    ("checkpoint.local_directory", OPEN): {"checkpoint.local_every_steps": 1},
    ("checkpoint.local_every_steps", OPEN): {"checkpoint.local_directory": "LOCAL"},
    ("logging.notify.command", None): {"logging.notify.webhook": "$NO_SUCH_NAME"},
    ("logging.notify.webhook", None): {"logging.notify.command": ["true"]},
    ("config.data.dtype", "uint16"): {"config.data.source": "UINT16"},
    ("config.data.dtype", "uint32"): {"config.data.source": "UINT32"},
    ("config.data.cache_bytes", OPEN): {"config.data.source": f"{URL}/uint16.bin", **TOKEN_FILE_DEFAULTS},
    ("config.data.tokenise", OPEN): {
        "config.data.source": "TEXTS",
        "config.data.tokenizer": "bytes",
        "config.data.document_separator": "none",
    },
    ("config.data.packing", "documents"): {"config.data.source": "TEXTS"},
    ("config.data.packing", "pad"): {"config.data.source": "TEXTS"},
    ("config.data.mixture.*.dtype", "uint32"): {"source": "UINT32"},
    ("config.data.validation.*.dtype", "uint32"): {"source": "UINT32"},
    ("config.data.train_on", "answers"): {"config.data.source": "CHATS"},
    ("config.data.train_on", "all"): {"config.data.source": "CHATS"},
    ("config.data.mixture.*.train_on", "answers"): {"source": "CHATS"},
    ("config.data.mixture.*.train_on", "all"): {"source": "CHATS"},
    ("config.data.validation.*.train_on", "answers"): {"source": "CHATS"},
    ("config.data.validation.*.train_on", "all"): {"source": "CHATS"},
    ("config.data.tokenizer", "characters"): {"config.data.source": "TEXTS"},
    ("config.data.document_separator", "newline"): {"config.data.source": "TEXTS"},
    ("config.data.document_separator", "nul"): {"config.data.source": "TEXTS"},
    **{
        ("config.optimizer.name", name): {"config.optimizer.matrices": ["*embedding"]}
        for name in ("muon", "normuon", "muonh")
    },
    ("config.optimizer.name", "galore"): {"config.optimizer.matrices": ["*embedding"], "config.optimizer.rank": 8},
    ("config.optimizer.matrices", OPEN): {"config.optimizer.name": "muon"},
    ("config.schedule.warmup_share", OPEN): {"config.schedule.warmup_steps": 0},
    ("config.schedule.name", "wsd"): {"config.schedule.decay_steps": 1},
    ("config.precision.rounding", "stochastic"): {"config.precision.params": "bfloat16"},
    ("config.precision.gradient_rounding", "stochastic"): {"config.precision.matmul": "int8"},
    ("config.stability.non_finite", "roll_back"): {"config.stability.roll_back": {"skip_examples": 16}},
    ("config.stability.skip_update.grad_norm_above", None): {"config.stability.skip_update.loss_above": {}},
    ("config.stability.skip_update.loss_above", None): {"config.stability.skip_update.grad_norm_above": {}},
    ("config.schedule.decay_steps", OPEN): {"config.schedule.name": "wsd"},
    ("config.model.preset", OPEN): {"config.model.key_value_heads": 1},
    ("config.model.base_width", OPEN): {
        "config.model.latent": None,
        "config.model.linear": None,
        "config.model.moe": None,
        "config.model.layer_embedding_width": None,
    },
    ("config.model.layer_embedding_width", OPEN): {"config.model.base_width": None, "config.model.mlp": "swiglu"},
    ("config.model.full_heads.keys_as_values", True): {"config.model.query_key_norm": None},
    ("config.model.attention_gate", True): {"config.model.query_key_norm": None, "config.model.latent": None},
    ("config.model.moe.shared_width", OPEN): {"config.model.moe.shared_experts": 1},
    ("config.model.moe.shared_gate", True): {"config.model.moe.shared_experts": 1},
    ("config.model.window", OPEN): {"config.model.layer_pattern": ["window"]},
    ("config.train.same_bits_devices", OPEN): {
        "config.train.micro_batch_examples": 1,
        "config.optimizer.name": "adamw",
        "config.noise_scale": None,
        "topology.mesh.data": "auto",
        **{f"topology.mesh.{axis}": 1 for axis in AXES if axis != "data"},
    },
    ("config.train.batch_ramp.over_steps", None): {"config.train.batch_ramp.over_tokens": 100},
    ("config.train.batch_ramp.over_tokens", OPEN): {"config.train.batch_ramp.over_steps": None},
    ("config.train.batch_ramp.over_tokens", None): {"config.train.batch_ramp.over_steps": 1},
    ("config.stages.*.from_step", None): {"from_tokens": 300},
    ("config.stages.*.from_tokens", OPEN): {"from_step": None},
    ("config.train.total_steps", None): {"config.train.total_tokens": TOKENS},
    ("config.train.total_tokens", OPEN): {"config.train.total_steps": None},
    ("config.train.total_epochs", OPEN): {
        "config.train.total_steps": None,
        "config.data.source": "UINT16",
        "config.data.mixture": [],
        **TOKEN_FILE_DEFAULTS,
    },
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "llama3": {"factor": 2.0, "original_positions": 8},
    "yarn": {"factor": 2.0, "original_positions": 8},
}
# Companions of every value of keys with these prefixes.
BESIDE: dict[str, dict[str, Any]] = {
    "config.ema.": {"config.ema.decays": [0.5, 0.9]},
    "config.train.batch_ramp.": {
        "config.train.batch_ramp.from_examples": 8,
        "config.train.batch_ramp.increments": 1,
        "config.stages": [],
    },
    "config.export.": {"config.export.directory": "EXPORT"},
    "config.eval.harness.": {"config.eval.harness.tasks": ["some"]},
    "config.eval.samples.": {"config.eval.samples.prompts": ["7 8"], "config.eval.samples.tokens": 2},
    "config.model.window_rope.": {"config.model.layer_pattern": ["window"], "config.model.window": 4},
    "config.model.linear.": {
        "config.model.layer_pattern": ["linear"],
        **{f"config.model.linear.{key}": 2 for key in ("key_heads", "value_heads", "key_head_dim", "value_head_dim")},
    },
    "config.model.latent.": {
        **{
            "config.model.key_value_heads": "auto",
            "config.model.head_dim": "auto",
            "config.model.query_key_norm": None,
            "config.model.value_norm": False,
            "config.model.attention_sinks": False,
            "config.model.full_heads": None,
            "config.model.key_value_sharing": None,
        },
        **{f"config.model.latent.{key}": 8 for key in ("key_value_rank", "plain_head_dim", "value_head_dim")},
        "config.model.latent.rotary_head_dim": 4,
    },
    "config.model.moe.": {"config.model.moe.experts": 4, "config.model.moe.experts_per_token": 2},
    "config.model.full_heads.": {"config.model.layer_pattern": ["full"]},
    "config.model.key_value_sharing.": {"config.model.key_value_sharing.layers": 1},
}
for _rope in ("config.model.rope", "config.model.window_rope"):
    for _name, _options in SCALINGS.items():
        WITH[f"{_rope}.scaling.name", _name] = {f"{_rope}.scaling.{key}": each for key, each in _options.items()}
    for _value in (OPEN, "auto"):
        _yarn = {f"{_rope}.scaling.{key}": each for key, each in {"name": "yarn", **SCALINGS["yarn"]}.items()}
        WITH[f"{_rope}.scaling.attention_factor", _value] = _yarn
    for _value in (True, False):
        WITH[f"{_rope}.scaling.truncate", _value] = _yarn
# Sections in a list or mapping: one entry in its containing key, with the companions that it needs.
INSIDE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "config.optimizer.groups": lambda entry: {"config.optimizer.groups": [{"pattern": "*embedding", **entry}]},
    "hooks": lambda entry: {"hooks": [{"hook": "runner.hook:EarlyStopping", **entry}]},
    "config.data.mixture": lambda entry: {
        "config.data.mixture": [{"name": "some", "source": "UINT16", **entry}],
        "config.data.source": "python-stdlib",
        "config.data.dtype": None,
        **TOKEN_FILE_DEFAULTS,
    },
    "config.stages": lambda entry: {
        "config.stages": [{"from_step": 2, "set": {"optimizer.weight_decay": 0.5}, **entry}],
    },
    "config.eval.multiple_choice": lambda entry: {
        "config.eval.multiple_choice": [{"name": "some", "path": "QUESTIONS", **entry}],
        "config.data.source": "TEXTS",  # has a tokenizer
    },
    "config.data.validation": lambda entry: {
        "config.data.validation": {"other": {"source": "UINT16", **entry}},
        **TOKEN_FILE_DEFAULTS,
        **({"config.data.source": "CHATS", "config.data.train_on": "answers"} if "answers" in entry.values() else {}),
    },
}
SEPARATE_CASES = [
    ("topology", None),
    *(("checkpoint.fork_from.step", value) for value in (OPEN, "newest", "best")),
    ("config.data.sequence_length", None),  # data of arrays
    ("config.optimizer.learning_rate", None),
    *(
        (f"config.eval.harness.{key}", value)
        for key in ("include_path", "limit", "every_steps")
        for value in (OPEN, None)
    ),
]  # need another job, and have their own tests


class Lookup(nn.Module):
    """Logits looked up by token plus a bias, independent of other tokens; 0 for padding."""

    vocabulary_size: int
    precision: PrecisionConfig

    @nn.compact
    def __call__(
        self, x_BxT: jax.Array, segments: Any = None, positions: Any = None, *, deterministic: bool
    ) -> jax.Array:
        size, precision = self.vocabulary_size, self.precision
        bias_V = self.param("bias", nn.initializers.zeros, (size,), precision.params)
        logits_BxTxV = nn.Embed(size, size, dtype=precision.compute, param_dtype=precision.params)(x_BxT) + bias_V
        return logits_BxTxV if segments is None else jnp.where((segments > 0)[..., None], logits_BxTxV, 0)


class TrainLookup(BaseTrainer):
    """A trainer with every config key of a GPT."""

    Config = PretrainGPT.Config

    def model(self) -> Lookup:
        return Lookup(self.vocabulary_size, self.config.precision)


@dataclass(frozen=True)
class Case:
    """One value of one key, with its companions."""

    key: str
    value: Any
    changes: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


def list_values(annotation: Any) -> list[Any]:
    """Return the values of an annotation, and OPEN if it allows others; a section has none, but keys of its own."""
    origin = get_origin(annotation)
    if annotation is bool:
        return [True, False]
    if annotation is type(None):
        return [None]
    if origin is Literal:
        return list(get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return []
    if origin in (Union, types.UnionType):
        return [value for part in get_args(annotation) for value in list_values(part)]
    return [OPEN]


def iterate_models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from iterate_models(part)


def iterate_choices(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield every key below `model` with few values, and these; `*` stands for an entry of a list or mapping."""
    for name, field in model.model_fields.items():
        key, values = f"{prefix}{name}", list_values(field.annotation)
        if values != [OPEN]:
            yield key, values
        inside = f"{key}.*." if get_origin(field.annotation) in (list, dict) else f"{key}."
        for inner in iterate_models(field.annotation):
            yield from iterate_choices(inner, inside)


def make_cases(found: Iterator[tuple[str, list[Any]]]) -> list[Case]:
    """Return a case for every value of these keys."""
    made = []
    for key, values in found:
        for value in values:
            taken = SOME[key] if value == OPEN else value
            beside = [needs for begin, needs in BESIDE.items() if key.startswith(begin)]
            companions = {name: each for needs in [*beside, WITH.get((key, value), {})] for name, each in needs.items()}
            made.append(Case(key, value, changes_for(key, taken, companions)))
    return made


def changes_for(key: str, value: Any, companions: dict[str, Any]) -> dict[str, Any]:
    """Return the changes that set `key` to `value`; for a key in a list or mapping, the whole containing key."""
    holder, inside, name = key.partition(".*.")
    if not inside:
        return companions | {key: value}
    return INSIDE[holder]({name: value} | companions)


def iterate_all_choices() -> Iterator[tuple[str, list[Any]]]:
    """Yield the keys of a GPT's spec."""
    yield from iterate_choices(ExecutionSpec)
    yield from iterate_choices(PretrainGPT.Config, "config.")


def iterate_decoder_choices() -> Iterator[tuple[str, list[Any]]]:
    """Yield the keys that only a decoder has."""
    yield from (
        choice for choice in iterate_choices(PretrainDecoder.Config, "config.") if choice[0].startswith("config.model.")
    )


CASES, DECODERS = make_cases(iterate_all_choices()), make_cases(iterate_decoder_choices())
TRAINERS = [case for case in CASES if (case.key, case.value) not in SEPARATE_CASES]


def do_agree(some: dict[str, Any], others: dict[str, Any]) -> bool:
    """Return True if the changes are compatible: they have no common key, or the same value for it."""
    pairs = [(key, name) for key in some for name in others if is_inside(key, name) or is_inside(name, key)]
    return all(key == name and some[key] == others[name] for key, name in pairs)


def is_inside(key: str, section: str) -> bool:
    return f"{key}.".startswith(f"{section}.")


def pack_cases(cases: list[Case]) -> list[list[Case]]:
    """Pack every case once into few runs, by first fit."""
    rows: list[list[Case]] = []
    for case in cases:
        fits = (row for row in rows if all(do_agree(case.changes, other.changes) for other in row))
        row = next(fits, None)
        if row is None:
            rows.append(row := [])
        row.append(case)
    return rows


class SilentTracking:
    """A replacement for W&B, which takes seconds; tests/metrics/test_writers.py uses the real one."""

    def __init__(self, *arguments: object):
        pass

    def add(self, row: dict[str, Any]) -> None:
        """Do nothing."""

    def supersede(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


@pytest.fixture(autouse=True)
def _no_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(WandbWriter=SilentTracking)
    monkeypatch.setitem(sys.modules, "runner.metrics.wandb", module)


@pytest.fixture(autouse=True)
def _bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    write_ids(tmp_path / "bucket" / "uint16.bin", "uint16")
    put_in_bucket(monkeypatch, tmp_path / "bucket")
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))


def get_value(job: RestoreableJob, key: str) -> Any:
    found: Any = {"config": job.config, **dict(job.spec)}
    for part in key.split("."):
        if part == "*":
            (found,) = found.values() if isinstance(found, dict) else found
        else:
            found = found[part] if isinstance(found, dict) else getattr(found, part)
    return found


def replace_places(value: Any, places: dict[str, str]) -> Any:
    """Return `value` with the names of places replaced by their paths, at any depth."""
    if isinstance(value, list):
        return [replace_places(item, places) for item in value]
    if isinstance(value, dict):
        return {name: replace_places(item, places) for name, item in value.items()}
    return places.get(str(value), value)


def write_ids(path: Path, dtype: str) -> Path:
    """Write a token file once, because a job checks the times of its files."""
    if not path.exists():
        np.random.default_rng(0).integers(0, 256, 4096).astype(dtype).tofile(path)
    return path


def write_chats(directory: Path) -> Path:
    """Write a corpus of dialogues once."""
    if not directory.exists():
        write_corpus(
            directory, make_random_shards([[30] * 40], 256), vocabulary_size=256, marks_of=lambda ids: ids % 3 == 0
        )
    return directory


def write_texts(directory: Path) -> Path:
    """Write text files with all characters of the questions once, and return their glob."""
    directory.mkdir(exist_ok=True)
    for number in range(40):
        path = directory / f"{number}.txt"
        if not path.exists():
            lines = "".join(f"{number} and {other} is {number + other}.\n" for other in range(5 + number))
            path.write_text(lines + string.printable)
    return directory / "*.txt"


def merge_changes(row: list[Case]) -> dict[str, Any]:
    """Return the combined changes of several cases."""
    return {key: value for case in row for key, value in case.changes.items()}


def make_job_factory(
    together: dict[str, Any], directory: Path, job_class: type[BaseTrainer], base: dict[str, Any]
) -> Callable[..., BaseTrainer]:
    """Return a function that makes a job with these changes in a named directory."""

    def make(name: str, **changes: Any) -> BaseTrainer:
        places = {"WARM": str(directory / "warm"), "LOCAL": str(directory / f"{name}.local")}
        places["EXPORT"] = str(directory / f"{name}.export")
        places |= {each.upper(): str(write_ids(directory / f"{each}.bin", each)) for each in ("uint16", "uint32")}
        places["CHATS"] = str(write_chats(directory / "chats"))
        places["TEXTS"] = str(write_texts(directory / "texts"))
        places["QUESTIONS"] = str(write_questions(directory / "questions.jsonl", number=2))
        placed = {key: replace_places(value, places) for key, value in together.items()}
        return make_gpt(directory / name, job_class, **base | placed | changes)

    return make


def check_resume(row: list[Case], directory: Path, job_class: type[BaseTrainer], base: dict[str, Any] = BASE) -> None:
    """Run the combined values of several cases."""
    together = merge_changes(row)
    make = make_job_factory(together, directory, job_class, base)
    if "checkpoint.init_from" in together:
        make("warm", **{"checkpoint.init_from": None})()
    for case in row:
        assert case.value == OPEN or get_value(make("whole"), case.key) == case.value
    resume(make)
    assert read_outcome(directory / "resumed") == read_outcome(directory / "whole")


def resume(make: Callable[[str], RestoreableJob]) -> None:
    """Run three steps uninterrupted, and stopped after two and resumed, and compare the bits."""
    make("whole")()
    stopped = make("resumed")
    stop_after(stopped, STOP)
    make("resumed")()
    assert read_json(make("resumed").store, "result.json") == read_json(make("whole").store, "result.json")


def test_keys_with_few_values_are_found() -> None:
    found = {(case.key, case.value) for case in CASES}
    known = {
        ("topology.mesh.fsdp", "auto"),
        ("topology.elastic", True),
        ("topology", None),
        ("checkpoint.keep_best.mode", "max"),
        ("logging.wandb", "offline"),
        ("config.precision.params", "bfloat16"),
        ("config.precision.matmul", "int8"),
        ("config.precision.matmul", "float8"),
        ("config.precision.gradient_rounding", "stochastic"),
        ("config.model.layer_loop", "unroll"),
        ("config.train.total_tokens", OPEN),
        ("config.optimizer.name", "adafactor"),
    }
    assert known <= found


DAILY_VALUES_MIN = 15  # per run; runs of fewer values are in the soak
ROWS = [
    row if len(row) >= DAILY_VALUES_MIN else pytest.param(row, marks=pytest.mark.soak)
    # A TrainLookup has no layout of Hugging Face.
    for row in pack_cases([case for case in TRAINERS if not case.key.startswith("config.export.")])
]


@pytest.mark.daily(2)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{len(row)} values")
def test_combined_values_resume_bit_identically(row: list[Case], tmp_path: Path) -> None:
    check_resume(row, tmp_path, TrainLookup)


@pytest.mark.soak
@pytest.mark.parametrize("case", TRAINERS, ids=str)
def test_each_value_resumes_bit_identically(case: Case, tmp_path: Path) -> None:
    check_resume([case], tmp_path, PretrainGPT)


DAILY_DECODER_VALUES_MIN = 6
DECODER_ROWS = [
    row if len(row) >= DAILY_DECODER_VALUES_MIN else pytest.param(row, marks=pytest.mark.soak)
    for row in pack_cases(DECODERS)
]


@pytest.mark.daily(3)
@pytest.mark.parametrize("row", DECODER_ROWS, ids=lambda row: f"{len(row)} values")
def test_combined_decoder_values_trace_a_train_step(row: list[Case], tmp_path: Path) -> None:
    together = merge_changes(row)
    job = make_gpt(tmp_path / "run", PretrainDecoder, **DECODER_BASE | together)
    assert all(case.value == OPEN or get_value(job, case.key) == case.value for case in row)
    job.setup_builder.trace(job.setup_builder.build(jax.devices()))


@pytest.mark.soak
@pytest.mark.parametrize("case", DECODERS, ids=str)
def test_each_decoder_value_resumes_bit_identically(case: Case, tmp_path: Path) -> None:
    check_resume([case], tmp_path, PretrainDecoder, DECODER_BASE)


def can_be_ordered(case: Case) -> bool:
    """Return True if a value affects the program of a step and is compatible with `same_bits_devices`."""
    name = case.changes.get("config.optimizer.name", "adamw")
    return (
        case.key.startswith("config.")
        and not case.key.startswith(("config.eval.", "config.train.", "config.export."))
        and do_agree(case.changes, same_bits.SAME_BITS_OPTIONS)
        and OPTIMIZERS[name].supports_same_bits
        and not case.key.startswith("config.noise_scale")
    )


ORDERED = [
    *((row, PretrainGPT, BASE) for row in pack_cases([case for case in TRAINERS if can_be_ordered(case)])),
    *((row, PretrainDecoder, DECODER_BASE) for row in pack_cases([case for case in DECODERS if can_be_ordered(case)])),
]


@pytest.mark.soak
@pytest.mark.parametrize(("row", "job_class", "base"), ORDERED)
def test_values_are_bit_identical_on_one_two_and_eight_devices(
    row: list[Case],
    job_class: type[BaseTrainer],
    base: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same_bits.use_user_compiler_options(monkeypatch)
    make = make_job_factory(merge_changes(row) | same_bits.SAME_BITS_OPTIONS, tmp_path, job_class, base)
    on_one, *others = (same_bits.compute_bits(make("run"), number) for number in same_bits.DEVICE_COUNTS)
    assert others == [on_one] * len(others)


def test_a_job_without_a_topology_resumes_bit_identically(tmp_path: Path) -> None:
    resume(lambda name: make_counter(tmp_path / name, **{"topology": None, "config.total_steps": STEPS}))


class OwnOptimizer(TrainLookup):
    @classmethod
    def optimizer(cls) -> optax.GradientTransformation:
        return optax.adam(0.1)


def test_a_custom_optimizer_needs_no_learning_rate(tmp_path: Path) -> None:
    assert [(case.key, case.value) for case in CASES if case not in TRAINERS] == SEPARATE_CASES
    changes = BASE | {"config.optimizer": {}}
    resume(lambda name: make_gpt(tmp_path / name, OwnOptimizer, **changes))
    rows, result = read_outcome(tmp_path / "whole")
    assert "train/learning_rate" not in rows[-1]
    assert rows[-1]["train/loss"] == result["train_loss"]
    line, *spec = (tmp_path / "whole" / "spec.yaml").read_text().splitlines()
    assert (
        line
        == "# config.optimizer.name is not used: tests.test_values:OwnOptimizer.optimizer returns an object of optax"
    )
    assert not [each for each in spec if each.startswith("#")]


class InjectedOptimizer(TrainLookup):
    @classmethod
    def optimizer(cls) -> optax.GradientTransformation:
        rate = optax.linear_schedule(0.1, 0.0, 10)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=rate))


def test_a_learning_rate_in_the_state_of_a_custom_optimizer_is_logged(tmp_path: Path) -> None:
    resume(lambda name: make_gpt(tmp_path / name, InjectedOptimizer, **BASE | {"config.optimizer": {}}))
    rows, _ = read_outcome(tmp_path / "resumed")
    assert [row["train/learning_rate"] for row in rows] == pytest.approx([0.1, 0.09, 0.08])
    assert rows == read_outcome(tmp_path / "whole")[0]
