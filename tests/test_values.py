"""Every value of every key that has few of them: three steps and a resume end with the bits of an undisturbed run.

The keys are found in the models of a spec: a Literal, true or false, null, `auto`; what else a key may be is OPEN, and
SOME says what to take for it. A new key or value joins by itself, and fails where it needs companions that WITH lacks.
Daily, values that do not get in each other's way share a run of a model that compiles in no time. The soak tries each
value by itself, with a GPT. Values of a decoder's own keys are traced daily, and run in the soak.
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

OPEN = "another"  # any value that is not one of a few
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
    "checkpoint.every_steps": 1,
    "checkpoint.every_minutes": 1.0,
    "checkpoint.keep_every_steps": 1,
    "checkpoint.init_from": "WARM",  # the directory of a finished run
    "checkpoint.local_directory": "LOCAL",  # a directory on this host
    "checkpoint.local_every_steps": 1,
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
    "config.schedule.warmup_share": 0.4,
    "config.schedule.decay_steps": 1,
    "config.train.total_steps": STEPS,
    "config.train.total_tokens": TOKENS,
    "config.train.total_epochs": 0.19,  # of the ids below
    "config.train.micro_batch_examples": 1,
    "config.train.same_bits_devices": 8,
    "config.eval.every_steps": 2,
    "config.eval.multiple_choice.*.every_steps": 1,
    "config.eval.multiple_choice.*.limit": 1,
    "config.eval.samples.every_steps": 1,
    "config.memory.loss_chunk_positions": 8,
    "config.data.cache_bytes": 1 << 16,
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
    "config.model.moe.capacity_factor": 1.0,
    "config.model.moe.bias_rate": 0.01,
}
# What no token files read, as it must stand beside them.
OF_TOKENS: dict[str, Any] = {
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
    ("config.data.cache_bytes", OPEN): {"config.data.source": f"{URL}/uint16.bin", **OF_TOKENS},
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
    ("config.optimizer.name", "muon"): {"config.optimizer.matrices": ["*embedding"]},
    ("config.optimizer.name", "galore"): {"config.optimizer.matrices": ["*embedding"], "config.optimizer.rank": 8},
    ("config.optimizer.matrices", OPEN): {"config.optimizer.name": "muon"},
    ("config.schedule.warmup_share", OPEN): {"config.schedule.warmup_steps": 0},
    ("config.schedule.name", "wsd"): {"config.schedule.decay_steps": 1},
    ("config.precision.rounding", "stochastic"): {"config.precision.params": "bfloat16"},
    ("config.schedule.decay_steps", OPEN): {"config.schedule.name": "wsd"},
    ("config.model.preset", OPEN): {"config.model.key_value_heads": 1},
    ("config.model.base_width", OPEN): {"config.model.latent": None, "config.model.moe": None},
    ("config.model.window", OPEN): {"config.model.layer_pattern": ["window"]},
    ("config.train.same_bits_devices", OPEN): {
        "config.train.micro_batch_examples": 1,
        "config.optimizer.name": "adamw",
        "config.noise_scale": None,
        "topology.mesh.data": "auto",
        **{f"topology.mesh.{axis}": 1 for axis in AXES if axis != "data"},
    },
    ("config.train.total_steps", None): {"config.train.total_tokens": TOKENS},
    ("config.train.total_tokens", OPEN): {"config.train.total_steps": None},
    ("config.train.total_epochs", OPEN): {
        "config.train.total_steps": None,
        "config.data.source": "UINT16",
        "config.data.mixture": [],
        **OF_TOKENS,
    },
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "llama3": {"factor": 2.0, "original_positions": 8},
    "yarn": {"factor": 2.0, "original_positions": 8},
}
# What every value of keys that begin so needs.
BESIDE: dict[str, dict[str, Any]] = {
    "config.ema.": {"config.ema.decays": [0.5, 0.9]},
    "config.eval.samples.": {"config.eval.samples.prompts": ["7 8"], "config.eval.samples.tokens": 2},
    "config.model.window_rope.": {"config.model.layer_pattern": ["window"], "config.model.window": 4},
    "config.model.latent.": {
        **{
            "config.model.key_value_heads": "auto",
            "config.model.head_dim": "auto",
            "config.model.query_key_norm": None,
        },
        **{f"config.model.latent.{key}": 8 for key in ("key_value_rank", "plain_head_dim", "value_head_dim")},
        "config.model.latent.rotary_head_dim": 4,
    },
    "config.model.moe.": {"config.model.moe.experts": 4, "config.model.moe.experts_per_token": 2},
}
for _rope in ("config.model.rope", "config.model.window_rope"):
    for _name, _options in SCALINGS.items():
        WITH[f"{_rope}.scaling.name", _name] = {f"{_rope}.scaling.{key}": each for key, each in _options.items()}
    for _value in (OPEN, "auto"):
        _yarn = {f"{_rope}.scaling.{key}": each for key, each in {"name": "yarn", **SCALINGS["yarn"]}.items()}
        WITH[f"{_rope}.scaling.attention_factor", _value] = _yarn
# Sections that stand in a list or a mapping: one of them, as the key that holds it has it, and what must stand beside.
INSIDE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "config.optimizer.groups": lambda entry: {"config.optimizer.groups": [{"pattern": "*embedding", **entry}]},
    "hooks": lambda entry: {"hooks": [{"hook": "runner.hook:EarlyStopping", **entry}]},
    "config.data.mixture": lambda entry: {
        "config.data.mixture": [{"name": "some", "source": "UINT16", **entry}],
        "config.data.source": "python-stdlib",
        "config.data.dtype": None,
        **OF_TOKENS,
    },
    "config.eval.multiple_choice": lambda entry: {
        "config.eval.multiple_choice": [{"name": "some", "path": "QUESTIONS", **entry}],
        "config.data.source": "TEXTS",  # which have a tokenizer
    },
    "config.data.validation": lambda entry: {
        "config.data.validation": {"other": {"source": "UINT16", **entry}},
        **OF_TOKENS,
        **({"config.data.source": "CHATS", "config.data.train_on": "answers"} if "answers" in entry.values() else {}),
    },
}
BY_ITSELF = [("topology", None), ("config.optimizer.learning_rate", None)]  # of another job: tests of their own


class Lookup(nn.Module):
    """Logits by token: one matrix, and what is added to them. No other token counts; of padding they are 0."""

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
    """A trainer with every key of a GPT's."""

    Config = PretrainGPT.Config

    def model(self) -> Lookup:
        return Lookup(self.vocabulary_size, self.config.precision)


@dataclass(frozen=True)
class Case:
    """One value of one key, and what it needs of others."""

    key: str
    value: Any
    changes: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


def values_of(annotation: Any) -> list[Any]:
    """The values that an annotation names, and OPEN if it allows others; a section has keys of its own for that."""
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
        return [value for part in get_args(annotation) for value in values_of(part)]
    return [OPEN]


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def choices(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Dotted key and values of every key below `model` that names some; `*` stands for a section of several."""
    for name, field in model.model_fields.items():
        key, values = f"{prefix}{name}", values_of(field.annotation)
        if values != [OPEN]:
            yield key, values
        inside = f"{key}.*." if get_origin(field.annotation) in (list, dict) else f"{key}."
        for inner in models_in(field.annotation):
            yield from choices(inner, inside)


def cases(found: Iterator[tuple[str, list[Any]]]) -> list[Case]:
    """Every value of these keys."""
    made = []
    for key, values in found:
        for value in values:
            taken = SOME[key] if value == OPEN else value
            beside = [needs for begin, needs in BESIDE.items() if key.startswith(begin)]
            companions = {name: each for needs in [*beside, WITH.get((key, value), {})] for name, each in needs.items()}
            made.append(Case(key, value, changes_for(key, taken, companions)))
    return made


def changes_for(key: str, value: Any, companions: dict[str, Any]) -> dict[str, Any]:
    """What to set so that `key` has `value`; of a section of several the whole of what holds it."""
    holder, inside, name = key.partition(".*.")
    if not inside:
        return companions | {key: value}
    return INSIDE[holder]({name: value} | companions)


def all_choices() -> Iterator[tuple[str, list[Any]]]:
    """Keys of a GPT's spec."""
    yield from choices(ExecutionSpec)
    yield from choices(PretrainGPT.Config, "config.")


def decoder_choices() -> Iterator[tuple[str, list[Any]]]:
    """Keys of a decoder's own."""
    yield from (
        choice for choice in choices(PretrainDecoder.Config, "config.") if choice[0].startswith("config.model.")
    )


CASES, DECODERS = cases(all_choices()), cases(decoder_choices())
TRAINERS = [case for case in CASES if (case.key, case.value) not in BY_ITSELF]


def do_agree(some: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether both can be asked for at once: they touch no common key, or say the same of it."""
    pairs = [(key, name) for key in some for name in others if is_inside(key, name) or is_inside(name, key)]
    return all(key == name and some[key] == others[name] for key, name in pairs)


def is_inside(key: str, section: str) -> bool:
    return f"{key}.".startswith(f"{section}.")


def packed(cases: list[Case]) -> list[list[Case]]:
    """Every case once, in as few runs as first fit finds."""
    rows: list[list[Case]] = []
    for case in cases:
        fits = (row for row in rows if all(do_agree(case.changes, other.changes) for other in row))
        row = next(fits, None)
        if row is None:
            rows.append(row := [])
        row.append(case)
    return rows


class SilentTracking:
    """Takes the place of W&B, which would take seconds; tests/metrics/test_writers.py has the real one."""

    def __init__(self, *arguments: object):
        pass

    def add(self, row: dict[str, Any]) -> None:
        """Nowhere."""

    def supersede(self) -> None:
        """Nothing is there."""

    def finish(self) -> None:
        """Nothing is open."""


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


def value_in(job: RestoreableJob, key: str) -> Any:
    found: Any = {"config": job.config, **dict(job.spec)}
    for part in key.split("."):
        if part == "*":
            (found,) = found.values() if isinstance(found, dict) else found
        else:
            found = found[part] if isinstance(found, dict) else getattr(found, part)
    return found


def put_in_place(value: Any, places: dict[str, str]) -> Any:
    """`value` with the names of places, however deep, replaced by where they are."""
    if isinstance(value, list):
        return [put_in_place(item, places) for item in value]
    if isinstance(value, dict):
        return {name: put_in_place(item, places) for name, item in value.items()}
    return places.get(str(value), value)


def write_ids(path: Path, dtype: str) -> Path:
    """A token file, made once: a job looks at the times of its files."""
    if not path.exists():
        np.random.default_rng(0).integers(0, 256, 4096).astype(dtype).tofile(path)
    return path


def write_chats(directory: Path) -> Path:
    """A corpus of dialogues, made once."""
    if not directory.exists():
        write_corpus(
            directory, make_random_shards([[30] * 40], 256), vocabulary_size=256, marks_of=lambda ids: ids % 3 == 0
        )
    return directory


def write_texts(directory: Path) -> Path:
    """A glob of text files, which are documents with all the characters of questions, made once."""
    directory.mkdir(exist_ok=True)
    for number in range(40):
        path = directory / f"{number}.txt"
        if not path.exists():
            lines = "".join(f"{number} and {other} is {number + other}.\n" for other in range(5 + number))
            path.write_text(lines + string.printable)
    return directory / "*.txt"


def all_of(row: list[Case]) -> dict[str, Any]:
    """What the values of a row change, together."""
    return {key: value for case in row for key, value in case.changes.items()}


def maker(
    together: dict[str, Any], directory: Path, job_class: type[BaseTrainer], base: dict[str, Any]
) -> Callable[..., BaseTrainer]:
    """What makes jobs with these values by the name of their directory."""

    def make(name: str, **changes: Any) -> BaseTrainer:
        places = {"WARM": str(directory / "warm"), "LOCAL": str(directory / f"{name}.local")}
        places |= {each.upper(): str(write_ids(directory / f"{each}.bin", each)) for each in ("uint16", "uint32")}
        places["CHATS"] = str(write_chats(directory / "chats"))
        places["TEXTS"] = str(write_texts(directory / "texts"))
        places["QUESTIONS"] = str(write_questions(directory / "questions.jsonl", number=2))
        placed = {key: put_in_place(value, places) for key, value in together.items()}
        return make_gpt(directory / name, job_class, **base | placed | changes)

    return make


def check(row: list[Case], directory: Path, job_class: type[BaseTrainer], base: dict[str, Any] = BASE) -> None:
    """The values of a row, together."""
    together = all_of(row)
    make = maker(together, directory, job_class, base)
    if "checkpoint.init_from" in together:
        make("warm", **{"checkpoint.init_from": None})()
    for case in row:
        assert case.value == OPEN or value_in(make("whole"), case.key) == case.value
    resume(make)
    assert read_outcome(directory / "resumed") == read_outcome(directory / "whole")


def resume(make: Callable[[str], RestoreableJob]) -> None:
    """Three steps undisturbed; stopped after two and resumed; the same bits."""
    make("whole")()
    stopped = make("resumed")
    stop_after(stopped, STOP)
    make("resumed")()
    assert read_json(make("resumed").store, "result.json") == read_json(make("whole").store, "result.json")


def test_the_models_name_the_keys_that_are_known_to_have_few_values() -> None:
    found = {(case.key, case.value) for case in CASES}
    known = {
        ("topology.mesh.fsdp", "auto"),
        ("topology.elastic", True),
        ("topology", None),
        ("checkpoint.keep_best.mode", "max"),
        ("logging.wandb", "offline"),
        ("config.precision.params", "bfloat16"),
        ("config.model.layer_loop", "unroll"),
        ("config.train.total_tokens", OPEN),
        ("config.optimizer.name", "adafactor"),
    }
    assert known <= found


DAILY_VALUES_MIN = 5  # in a run; what is alone or nearly so waits for the soak
ROWS = [row if len(row) >= DAILY_VALUES_MIN else pytest.param(row, marks=pytest.mark.soak) for row in packed(TRAINERS)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{len(row)} values")
def test_values_together_resume_to_the_bits_of_an_undisturbed_run(row: list[Case], tmp_path: Path) -> None:
    check(row, tmp_path, TrainLookup)


@pytest.mark.soak
@pytest.mark.parametrize("case", TRAINERS, ids=str)
def test_each_value_alone_resumes_to_the_bits_of_an_undisturbed_run(case: Case, tmp_path: Path) -> None:
    check([case], tmp_path, PretrainGPT)


@pytest.mark.parametrize("row", packed(DECODERS), ids=lambda row: f"{len(row)} values")
def test_values_of_a_decoder_together_make_a_train_step(row: list[Case], tmp_path: Path) -> None:
    together = all_of(row)
    job = make_gpt(tmp_path / "run", PretrainDecoder, **DECODER_BASE | together)
    assert all(case.value == OPEN or value_in(job, case.key) == case.value for case in row)
    job.setup_builder.trace(job.setup_builder.build(jax.devices()))


@pytest.mark.soak
@pytest.mark.parametrize("case", DECODERS, ids=str)
def test_each_value_of_a_decoder_resumes_to_the_bits_of_an_undisturbed_run(case: Case, tmp_path: Path) -> None:
    check([case], tmp_path, PretrainDecoder, DECODER_BASE)


def can_be_ordered(case: Case) -> bool:
    """Whether a value bears on the program of a step, and can stand beside `same_bits_devices`."""
    name = case.changes.get("config.optimizer.name", "adamw")
    return (
        case.key.startswith("config.")
        and not case.key.startswith(("config.eval.", "config.train."))
        and do_agree(case.changes, same_bits.SAME_BITS_OPTIONS)
        and OPTIMIZERS[name].is_elementwise
        and not case.key.startswith("config.noise_scale")
    )


ORDERED = [
    *((row, PretrainGPT, BASE) for row in packed([case for case in TRAINERS if can_be_ordered(case)])),
    *((row, PretrainDecoder, DECODER_BASE) for row in packed([case for case in DECODERS if can_be_ordered(case)])),
]


@pytest.mark.soak
@pytest.mark.parametrize(("row", "job_class", "base"), ORDERED)
def test_values_have_the_same_bits_on_one_device_two_and_eight(
    row: list[Case],
    job_class: type[BaseTrainer],
    base: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same_bits.use_user_compiler_options(monkeypatch)
    make = maker(all_of(row) | same_bits.SAME_BITS_OPTIONS, tmp_path, job_class, base)
    on_one, *others = (same_bits.compute_bits(make("run"), number) for number in same_bits.DEVICE_COUNTS)
    assert others == [on_one] * len(others)


def test_a_job_without_a_topology_resumes_to_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    resume(lambda name: make_counter(tmp_path / name, **{"topology": None, "config.total_steps": STEPS}))


class OwnOptimizer(TrainLookup):
    @classmethod
    def optimizer(cls) -> optax.GradientTransformation:
        return optax.adam(0.1)


def test_an_optimizer_of_the_jobs_own_needs_no_learning_rate_and_none_is_logged(tmp_path: Path) -> None:
    assert [(case.key, case.value) for case in CASES if case not in TRAINERS] == BY_ITSELF
    changes = BASE | {"config.optimizer": {}}
    resume(lambda name: make_gpt(tmp_path / name, OwnOptimizer, **changes))
    rows, result = read_outcome(tmp_path / "whole")
    assert "train/learning_rate" not in rows[-1]
    assert rows[-1]["train/loss"] == result["train_loss"]


class InjectedOptimizer(TrainLookup):
    @classmethod
    def optimizer(cls) -> optax.GradientTransformation:
        rate = optax.linear_schedule(0.1, 0.0, 10)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=rate))


def test_a_rate_that_an_optimizer_of_the_jobs_own_keeps_in_its_state_is_logged(tmp_path: Path) -> None:
    resume(lambda name: make_gpt(tmp_path / name, InjectedOptimizer, **BASE | {"config.optimizer": {}}))
    rows, _ = read_outcome(tmp_path / "resumed")
    assert [row["train/learning_rate"] for row in rows] == pytest.approx([0.1, 0.09, 0.08])
    assert rows == read_outcome(tmp_path / "whole")[0]
