"""BaseTrainer: public methods, rows, memory, overridable parts, and resume on any mesh."""

import contextlib
import dataclasses
import functools
import gc
import inspect
import json
import math
import os
import shlex
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

from experiments.gpt import GPTConfig, PretrainGPT
from runner import BaseTrainer, ExecutionSpec
from runner.accelerator import CHIPS
from runner.checkpoint.fingerprint import compute_fingerprint
from runner.checkpoint.manifest import read_committed
from runner.config import TrainerConfig
from runner.data import Dataset, Prefetcher, is_available, load_dataset, token_files
from runner.distributed.agreement import Hosts
from runner.distributed.clock import DATA, SAVE
from runner.distributed.preemption import StopNotice
from runner.errors import (
    DataError,
    DivergedError,
    HookError,
    InvalidError,
    PhaseError,
    PreemptedError,
    SpecError,
    StateError,
)
from runner.hook import Observer
from runner.optim.groups import Parameter
from runner.parallel.mesh import AXES
from runner.plan.checks import Findings, open_job
from runner.spec import hash_record, parse_document, read_spec, validate_config, validate_spec
from runner.storage import LocalStore, read_json, read_log
from runner.train import program
from runner.train.checks import list_local_options, validate_hardware
from tests.support.tiny_jobs import (
    RecordingGPT,
    are_leaves_equal,
    make_gpt,
    make_gpt_document,
    make_gpt_spec,
    make_mesh_options,
    read_recorded_rows,
    read_rows,
    read_trajectory,
    start_python,
    stop_after,
    wait_for_output,
)
from tests.test_values import TrainLookup

JOB = {"job": "tests.support.tiny_jobs:RecordingGPT"}
STOP, STEPS = 4, 8
NO_ARGUMENT = inspect.Parameter.empty


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def undisturbed(directory):
    """An uninterrupted job with data parallelism over 8 devices."""
    job = make_gpt(directory / "undisturbed", RecordingGPT, **JOB)
    job()
    return job


@pytest.fixture(scope="module")
def interrupted(directory):
    """The directory of a job stopped halfway, just before an evaluation."""
    job = make_gpt(directory / "interrupted", RecordingGPT, **JOB)
    stop_after(job, STOP)
    assert "val/loss" not in read_rows(job.store.root)[-1]
    shutil.rmtree(job.store.root / "rows")
    return job.store.root


# Public methods of the contract.


def test_a_spec_without_topology_is_an_assertion_error(tmp_path):
    document = make_gpt_document(tmp_path / "run")
    del document["topology"]
    with pytest.raises(AssertionError):
        PretrainGPT(ExecutionSpec.model_validate(document))


@pytest.mark.parametrize(
    ("name", "kind", "parameters"),
    [
        ("sharded_init", staticmethod, ["model", "key", "args", "mesh", "kwargs"]),
        ("optimizer", classmethod, ["cls"]),
        ("schedule", classmethod, ["cls"]),
        ("train_step", classmethod, ["cls", "state", "batch", "key", "accumulate_steps"]),
        ("val_step", classmethod, ["cls", "state", "batch"]),
        ("evaluator", None, ["self"]),
        ("batch", None, ["self", "slice"]),
        ("save", None, ["self", "suffix"]),
        ("load", None, ["self", "suffix"]),
        ("run", None, ["self"]),
    ],
)
def test_the_methods_have_the_signatures_of_the_contract(name, kind, parameters):
    raw = inspect.getattr_static(BaseTrainer, name)
    assert kind is None or isinstance(raw, kind)
    signature = inspect.signature(raw.__func__ if kind else raw)
    given = list(signature.parameters)
    assert given[: len(parameters)] == parameters
    assert all(signature.parameters[more].default is not NO_ARGUMENT for more in given[len(parameters) :])
    if name == "sharded_init":
        assert signature.parameters["mesh"].kind is inspect.Parameter.KEYWORD_ONLY
    if name == "batch":
        assert signature.parameters["slice"].default == "train"


def test_done_is_a_property_and_public_classes_import_from_runner():
    assert isinstance(BaseTrainer.done, property)
    assert BaseTrainer.__module__ == "runner.trainer"


# Rows and result.


def test_every_logged_step_has_one_row_with_its_keys(undisturbed):
    expected = {"step", "train/loss", "train/loss_mean", "train/grad_norm", "train/learning_rate", "train/tokens"}
    expected |= {f"perf/{name}" for name in ("tokens_per_second", "step_seconds_median", "step_seconds_p95")}
    expected |= {f"perf/{name}" for name in ("time", "attempt", "host_bytes", "host_free_bytes", "cpu_cores")}
    found = read_rows(undisturbed.store.root)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    evaluated = {"val/loss", "val/accuracy", "perf/eval_seconds", "perf/eval_tokens_per_second"}
    for row in found:
        assert set(row) == expected | (evaluated if row["step"] in (4, 8) else set())
        assert row["train/tokens"] == row["step"] * 16 * 16
    assert {row["perf/attempt"] for row in found} == {1}
    assert sorted(row["perf/time"] for row in found) == [row["perf/time"] for row in found]
    assert found[-1]["train/loss"] < found[0]["train/loss"] < math.log(256) + 0.1


def test_mfu_is_logged_if_the_peak_of_the_devices_is_known(tmp_path, monkeypatch):
    speeds = dataclasses.replace(CHIPS["v5e"].speeds, flops_per_second=1e9)
    monkeypatch.setitem(CHIPS, "cpu", dataclasses.replace(CHIPS["cpu"], speeds=speeds))
    job = make_gpt(tmp_path / "run")
    job()
    for row in read_rows(job.store.root):
        expected = row["perf/tokens_per_second"] * job.flops_per_token(job.train_setup).per_token / (8 * 1e9)
        assert row["perf/mfu"] == pytest.approx(expected)


def test_the_learning_rate_of_a_step_is_the_schedule_at_completed_steps(undisturbed):
    rates = [row["train/learning_rate"] for row in read_rows(undisturbed.store.root)]
    assert rates[:3] == pytest.approx([0.0, 5e-4, 1e-3])
    assert rates[5] == pytest.approx(1e-4 + 9e-4 * 0.5)


def test_the_result_contains_step_tokens_losses_and_fingerprint(undisturbed):
    last = read_rows(undisturbed.store.root)[-1]
    assert read_json(undisturbed.store, "result.json") == {
        "step": STEPS,
        "tokens": STEPS * 16 * 16,
        "train_loss": last["train/loss"],
        "val_loss": last["val/loss"],
        "fingerprint": compute_fingerprint(undisturbed.state),
    }
    assert undisturbed.done
    assert int(undisturbed.state.step) == STEPS


def test_the_resolved_spec_has_no_auto_and_makes_the_same_job(undisturbed):
    path = undisturbed.store.root / "spec.yaml"
    document = yaml.safe_load(path.read_text())
    # Layers are named separately, and kernels are tested at each start.
    assert [document["config"]["memory"].pop(key) for key in ("row_attention", "attention")] == ["auto", "auto"]
    assert "auto" not in str(document)
    again = RecordingGPT(read_spec(path))
    assert again.config.model.vocabulary_size == 256
    assert again.topology.mesh.model_dump() == dict.fromkeys(AXES, 1) | {"data": 8}
    assert again.config.train.micro_batch_examples == 2
    assert again.done


def test_a_batch_has_x_y_and_mask_sharded_over_the_mesh(undisturbed):
    for slice in ("train", "validation"):
        batch = undisturbed.batch(slice, 3)
        assert {field: leaf.shape for field, leaf in batch.items()} == dict.fromkeys(
            ("x", "y", "padding_mask"), (1, 16, 16)
        )
        assert batch["x"].addressable_shards[0].data.shape == (1, 2, 16)
        assert (batch["x"][:, :, 1:] == batch["y"][:, :, :-1]).all()
    assert are_leaves_equal(undisturbed.batch("train"), undisturbed.batch("train", STEPS))


def test_the_validation_loss_is_the_mean_over_its_tokens(undisturbed):
    loss_sum = tokens = 0.0
    validation = undisturbed.validation
    state = validation.make_val_state(undisturbed.weights(undisturbed.state), STEPS)
    for index in range(2):
        loss, count, _ = validation.compiled(state, undisturbed.batch("validation", index))
        loss_sum, tokens = loss_sum + float(loss), tokens + float(count)
    assert read_rows(undisturbed.store.root)[-1]["val/loss"] == pytest.approx(loss_sum / tokens, rel=1e-6)


# Resume on the same and on other meshes.


def test_resume_on_the_same_mesh_is_bit_identical(directory, undisturbed, interrupted):
    again = shutil.copytree(interrupted, directory / "again")
    make_gpt(again, RecordingGPT, **JOB)()
    assert read_trajectory(again) == read_trajectory(undisturbed.store.root)
    assert read_json(LocalStore(again), "result.json") == read_json(undisturbed.store, "result.json")


def launch(*arguments, directory, devices, data, fsdp, tensor):
    path = directory.parent / f"{directory.name}.yaml"
    document = make_gpt_document(directory, **JOB, **make_mesh_options(data, fsdp, tensor))
    path.write_text(yaml.safe_dump(document))
    return start_python("-m", *(str(path) if word == "SPEC" else word for word in arguments), devices=devices)


@pytest.fixture
def resumed_elsewhere(request, directory, interrupted):
    """The directory of a run resumed on another mesh: 8 devices here, 4, 1, or 2 processes with 2 each."""
    copy = shutil.copytree(interrupted, directory / request.param)
    runner = ("runner", "SPEC")
    local = ("launch", "local", "SPEC", "--processes", "2", "--devices-per-process", "2")
    starts = {
        "data 2 x fsdp 2": lambda to: launch(*runner, directory=to, devices=4, data=2, fsdp=2, tensor=1),
        "one device": lambda to: launch(*runner, directory=to, devices=1, data=1, fsdp=1, tensor=1),
        "two processes": lambda to: launch(*local, directory=to, devices=None, data="auto", fsdp=2, tensor=1),
    }
    if request.param in starts:
        wait_for_output(starts[request.param](copy))
    else:
        make_gpt(copy, RecordingGPT, **JOB, **make_mesh_options(1, 4, 2))()
    return copy


@pytest.mark.soak
@pytest.mark.parametrize(
    "resumed_elsewhere",
    [
        *(
            pytest.param(mesh, marks=pytest.mark.soak)
            for mesh in ("fsdp 4 x tensor 2", "data 2 x fsdp 2", "one device")
        ),
        "two processes",
    ],
    indirect=True,
)
def test_resume_on_another_mesh_has_equal_batches_and_losses_within_rounding(undisturbed, resumed_elsewhere):
    for step in range(STOP, STEPS):
        expected = read_recorded_rows(undisturbed.store.root, step)
        assert len(expected) == 16
        assert read_recorded_rows(resumed_elsewhere, step) == expected
    expected, actual = read_trajectory(undisturbed.store.root), read_trajectory(resumed_elsewhere)
    assert actual[: STOP - 1] == expected[: STOP - 1]
    assert [row["step"] for row in actual] == list(range(1, STEPS + 1))
    for row, reference in zip(actual, expected, strict=True):
        assert set(row) == set(reference)
        for key, value in reference.items():
            assert row[key] == pytest.approx(value, rel=1e-5), (row["step"], key)
    restored = [event for event in read_log(LocalStore(resumed_elsewhere), "events") if event["event"] == "restore"]
    assert [event["step"] for event in restored] == [STOP]


# Donation and tracing.


class CountingTrainer(BaseTrainer):
    """A trainer that counts how often forward is traced, and checks that each step donates the previous state."""

    traces = 0

    returns_loss_sum = True

    @classmethod
    def forward(cls, apply_fn, params, batch, key):
        cls.traces += 1
        return super().forward(apply_fn, params, batch, key)

    def run(self):
        self.traces_before_run, self.gone = type(self).traces, []
        self.before = jax.tree.leaves(self.state)
        super().run()

    def save_or_stop(self):
        self.gone.append([leaf.is_deleted() for leaf in self.before])
        self.before = jax.tree.leaves(self.state)
        super().save_or_stop()


@pytest.mark.parametrize("base", [TrainLookup, pytest.param(PretrainGPT, marks=pytest.mark.soak)])
def test_the_state_is_donated_and_both_programs_are_traced_once(base, tmp_path):
    class Counting(CountingTrainer, base):
        """The trainer with a model."""

    job = make_gpt(tmp_path / "run", Counting, **make_mesh_options(2, 2, 2) | {"config.model.layers": 1})
    job()
    traces = type(job).traces
    assert (job.traces_before_run, traces) == (2, 2)  # errors in either shape appear before anything runs
    assert len(job.gone) == STEPS
    assert all(all(step) for step in job.gone)


# Memory.


def get_needed_bytes(job):
    figures = job.compiled.executable.memory_analysis()
    resident = figures.argument_size_in_bytes + figures.output_size_in_bytes - figures.alias_size_in_bytes
    return resident + figures.temp_size_in_bytes


@pytest.mark.soak
def test_the_micro_batch_fits_the_memory_and_does_not_change_the_loss(tmp_path, monkeypatch):
    changes = {"config.train.global_batch_examples": 64, "config.model.layers": 1, "config.eval.every_steps": None}
    memory = [1 << 40]
    monkeypatch.setattr(program, "read_device_memory_bytes", lambda: memory[0])
    ample = make_gpt(tmp_path / "ample", **changes)
    ample()
    assert (ample.compiled.layout.micro_batch_examples, ample.compiled.layout.accumulate_steps) == (8, 1)

    memory[0] = int(get_needed_bytes(ample) * 0.97 / program.MEMORY_SHARE)
    scarce = make_gpt(tmp_path / "scarce", **changes)
    stop_after(scarce, STOP)
    chosen = scarce.compiled.layout.micro_batch_examples
    assert chosen < 8
    assert scarce.compiled.layout.accumulate_steps == 8 // chosen
    assert get_needed_bytes(scarce) <= memory[0] * program.MEMORY_SHARE

    memory[0] = 1 << 40
    resumed = make_gpt(tmp_path / "scarce", **changes)
    resumed()
    assert resumed.compiled.layout.micro_batch_examples == chosen, "an earlier choice on this hardware is kept"
    for row, reference in zip(read_rows(resumed.store.root), read_rows(ample.store.root), strict=True):
        assert row["train/loss"] == pytest.approx(reference["train/loss"], rel=1e-5)
        assert row["train/tokens"] == reference["train/tokens"]


@pytest.mark.soak
def test_too_little_memory_for_one_example_is_reported_with_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "read_device_memory_bytes", lambda: 100 * 2**10)
    with pytest.raises(SpecError, match=r"topology: a step with 1 example\(s\) a device needs 0\.\d+ GiB .* 0\.00 GiB"):
        make_gpt(
            tmp_path / "run", **{"config.train.micro_batch_examples": 1, "config.train.global_batch_examples": 8}
        )()
    assert not list(tmp_path.glob("run/checkpoints/*"))


# Overridable parts.


@pytest.mark.soak
def test_a_job_can_define_an_optax_optimizer_and_a_schedule(tmp_path):
    class Own(PretrainGPT):
        @classmethod
        def optimizer(cls):
            return optax.sgd(0.0)

        @classmethod
        def schedule(cls):
            return optax.constant_schedule(0.125)

        def run(self):
            self.first = jax.device_get(self.state.params)
            super().run()

    changes = {"config.train.total_steps": 2, "config.schedule.warmup_steps": 0, "config.model.layers": 1}
    job = make_gpt(tmp_path / "run", Own, **changes)
    job()
    assert are_leaves_equal(job.first, job.state.params)
    assert [row["train/learning_rate"] for row in read_rows(job.store.root)] == [0.125, 0.125]


@pytest.mark.parametrize(("name", "moments"), [("adamw", 2), ("lion", 1), ("sgd", 1)])
def test_a_job_can_name_its_optimizer_and_schedule(tmp_path, name, moments):
    class Named(PretrainGPT):
        @classmethod
        def optimizer(cls):
            return name

        @classmethod
        def schedule(cls):
            return "linear"

    job = make_gpt(tmp_path / "run", Named)
    job.setup(Hosts.single_process())
    abstract = job.abstract_state()
    kernels = [leaf for leaf in jax.tree.leaves(abstract.opt_state) if leaf.shape == (256, 32)]
    assert len(kernels) == moments
    params = {"w": jnp.ones(3)}
    known = {"w": Parameter("w", (3,), (None,))}
    tx = job.setup_builder.optimizer_choice.build_optimizer(
        job.config, job.setup_builder.optimizer_choice.build_schedule(job.config), known
    )
    state, sizes = tx.init(params), []
    for _ in range(STEPS):
        updates, state = tx.update({"w": jnp.full(3, 1e-3)}, state, params)
        sizes.append(float(-updates["w"][0]))
    assert sizes[0] == 0.0
    if name != "sgd":
        assert sizes[2:] == pytest.approx(np.linspace(1e-3, 1e-4, 7)[:6], rel=1e-3)


class CoefficientGPT(PretrainGPT):
    """A job with an auxiliary loss whose coefficient is in the spec."""

    class Config(TrainerConfig[GPTConfig]):
        auxiliary: float = 0.0
        rate: float = 0.0

    @classmethod
    def forward(cls, apply_fn, params, batch, key):
        loss_sum, meta = super().forward(apply_fn, params, batch, key)
        return loss_sum + cls.config.auxiliary * jnp.sum(batch["padding_mask"]), meta

    @classmethod
    def optimizer(cls):
        return optax.sgd(cls.config.rate)

    @classmethod
    def schedule(cls):
        return optax.constant_schedule(cls.config.rate)


@pytest.mark.soak
def test_classmethods_see_only_the_config_of_their_job(tmp_path):
    changes = {"config.train.total_steps": 1, "config.schedule.warmup_steps": 0, "config.model.layers": 1}
    changes |= {"config.optimizer": {}}
    jobs = {
        auxiliary: make_gpt(tmp_path / str(auxiliary), CoefficientGPT, **changes, **{"config.auxiliary": auxiliary})
        for auxiliary in (0.0, 2.0)
    }
    for job in jobs.values():
        job()
    (plain,), (more,) = (read_rows(job.store.root) for job in jobs.values())
    assert more["train/loss"] == pytest.approx(plain["train/loss"] + 2.0, rel=1e-6)
    assert more["val/loss"] == pytest.approx(plain["val/loss"] + 2.0, rel=1e-6)
    other = make_gpt(tmp_path / "rate", CoefficientGPT, **changes, **{"config.rate": 0.5})
    assert (jobs[0.0].schedule()(0), other.schedule()(0)) == (0.0, 0.5)
    assert [type(job).__name__ for job in (*jobs.values(), other)] == ["CoefficientGPT"] * 3
    assert isinstance(other, CoefficientGPT)
    assert CoefficientGPT.train_step.__self__ is CoefficientGPT


SPEC_WITH_UNREAD_KEYS = """\
name: x
job: experiments.gpt:PretrainGPT
directory: {directory}
topology: {{mesh: {{data: auto}}}}
config:
  model: {{layers: 1, heads: 1, width: 8}}
  data:
    source: {source}
    sequence_length: 8
    tokenizer: {tokenizer}
  optimizer:
    learning_rate: 1.0e-3
    momentum: 0.5
  schedule:
    name: constant
    final_learning_rate: 1.0e-4
  train: {{total_steps: 2, global_batch_examples: 8}}
"""


def test_unread_keys_are_rejected_with_their_line_and_their_readers(tmp_path):
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(bytes(2000))
    text = SPEC_WITH_UNREAD_KEYS.format(directory=tmp_path / "run", source=tokens, tokenizer="characters")

    def refused(*overrides):
        document = parse_document(text, "x.yaml", overrides)
        job = PretrainGPT(validate_spec(document), document)
        with pytest.raises(SpecError) as caught:
            job()
        assert not (tmp_path / "run").exists()
        return str(caught.value).splitlines()

    expected = [
        "x.yaml:13: config.optimizer.momentum: adamw does not read it, sgd or muon or normuon or muonh would",
        "x.yaml:16: config.schedule.final_learning_rate: constant does not read it, "
        "linear or cosine or cosine_restarts or polynomial or wsd would",
    ]
    findings = Findings()
    assert open_job(parse_document(text, "x.yaml"), findings) is None
    assert refused() == findings.problems == expected
    read = ("config.optimizer.name=sgd", "config.schedule.name=cosine")
    assert refused(*read) == [
        "x.yaml:10: config.data.tokenizer: it has no effect, because token files are tokenized already; leave it out"
    ]
    assert refused(*read, "config.optimizer={}")[0] == "--set config.optimizer={}: missing key learning_rate"


def test_a_run_started_with_unread_keys_resumes_without_them(directory, interrupted, undisturbed):
    again = shutil.copytree(interrupted, directory / "unread")
    for path in (again / "job.json", *again.glob("checkpoints/*/manifest.json")):
        content = json.loads(path.read_text())
        assert content["identity"]["config.optimizer.momentum"] == 0.9
        content["identity"]["config.optimizer.momentum"] = 0.5
        if content.pop("digest", None) is not None:
            content["digest"] = hash_record(content)
        path.write_text(json.dumps(content))
    with pytest.raises(InvalidError, match=r"config\.optimizer\.b1"):
        make_gpt(again, RecordingGPT, **JOB, **{"config.optimizer.b1": 0.5})()
    job = make_gpt(again, RecordingGPT, **JOB)
    job()
    assert read_json(job.store, "result.json") == read_json(undisturbed.store, "result.json")


class MetaLookup(TrainLookup):
    """A job that returns `extra` as meta."""

    extra: ClassVar[dict[str, Any]] = {}

    @classmethod
    def forward(cls, apply_fn, params, batch, key):
        loss_sum, meta = super().forward(apply_fn, params, batch, key)
        return loss_sum, meta | {name: make(loss_sum) for name, make in cls.extra.items()}


def test_rows_contain_scalars_returned_by_a_step_and_need_no_gradient_norm(tmp_path):
    class Told(MetaLookup):
        extra: ClassVar = {
            "share": lambda loss: loss * 0 + 0.5,
            "count": lambda _: jnp.int32(3),
            "odd": lambda _: jnp.inf,
        }

        @classmethod
        def train_step(cls, state, batch, key, accumulate_steps):
            state, loss, meta = super().train_step(state, batch, key, accumulate_steps)
            return state, loss, meta | {"mine": meta.pop("grad_norm")}

    job = make_gpt(tmp_path / "run", Told, **{"config.train.total_steps": 2, "config.schedule": {}})
    job()
    for row in read_rows(job.store.root):
        assert (row["train/share"], row["train/count"], row["train/odd"]) == (0.5, 3, None)
        assert "train/grad_norm" not in row
        assert row["train/mine"] > 0
    assert (row["val/share"], row["val/count"], row["val/odd"]) == (0.5, 3, None)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("heads", lambda loss: jnp.ones((2, 3)), r"'heads' as meta, float32 of shape \(2, 3\); a row needs a scalar"),
        ("empty", lambda loss: jnp.ones(0), r"'empty' as meta, float32 of shape \(0,\)"),
        ("inner", lambda loss: {"a": loss}, "'inner' as meta, a dict; a row needs a scalar"),
        ("nothing", lambda loss: None, "'nothing' as meta, a NoneType"),
        ("wave", lambda loss: loss + 1j, "'wave' as meta, complex64"),
        ("key", lambda loss: jax.random.key(0), "'key' as meta, key<fry>"),
        ("loss", lambda loss: loss, "'loss' as meta, which is a reserved name"),
        ("tokens", lambda loss: loss, "'tokens' as meta, which is a reserved name"),
        ("learning_rate", lambda loss: loss, "'learning_rate' as meta, which is a reserved name"),
        ("grad_norm", lambda loss: loss, "'grad_norm' as meta, which is a reserved name"),
    ],
)
def test_invalid_meta_is_rejected_before_the_directory_is_claimed(tmp_path, name, make, message):
    class Refused(MetaLookup):
        extra: ClassVar = {name: make}

    with pytest.raises(InvalidError, match=message) as caught:
        make_gpt(tmp_path / "run", Refused, **{"config.model.layers": 1})()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_a_changed_token_file_ends_the_job_before_the_next_commit(tmp_path, monkeypatch):
    path = tmp_path / "tokens.bin"
    np.arange(4000, dtype="<u2").__mod__(200).tofile(path)

    class Overwritten(PretrainGPT):
        def save_or_stop(self):
            if self.step == 3:
                os.utime(path, (1, 1))
            super().save_or_stop()

    changes = {"config.data.source": str(path), "config.model.layers": 1, "checkpoint.every_steps": 2}
    job = make_gpt(tmp_path / "run", Overwritten, **changes)
    phases = {
        place: note_phases(monkeypatch, job, holder, place)
        for holder, place in ((Prefetcher, "__next__"), (Dataset, "check"))
    }
    with pytest.raises(DataError, match=r"tokens\.bin: changed since the job started") as caught:
        job()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    job.checkpointer.wait_until_finished()
    assert list(read_committed(job.store)) == [2]
    # The watchdog must not count waits for a bucket as steps.
    assert phases == {"__next__": {DATA}, "check": {SAVE}}
    np.ones(4000, "<u2").tofile(path)
    with pytest.raises(InvalidError, match=r"tokens\.bin does not hold the data of the earlier steps"):
        make_gpt(tmp_path / "run", Overwritten, **changes)()


def note_phases(monkeypatch, job, holder, name):
    """Record the phases in which the job calls a function."""
    phases, function = set(), getattr(holder, name)

    def noting(*arguments):
        phases.add(job.attempt.progress.phase)
        return function(*arguments)

    monkeypatch.setattr(holder, name, noting)
    return phases


def test_an_invalid_token_id_ends_the_run_with_2_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "SCANNED_TOKENS_MAX", 100)
    path = tmp_path / "tokens.bin"
    ids = np.arange(4000, dtype="<u2") % 200
    ids[3990] = 999  # in the validation split, which the first row reads
    ids.tofile(path)
    changes = {"config.data.source": str(path), "config.model.vocabulary_size": 200}
    with pytest.raises(DataError, match=r"token id 999 at position 3990 of .*tokens\.bin is beyond") as caught:
        make_gpt(tmp_path / "run", TrainLookup, **changes)()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


# Loading during a run.


class LoadingLookup(TrainLookup):
    """A job that saves a named checkpoint at step 3 and loads a checkpoint once, at step 6."""

    name = "three"
    place = "save_or_stop"
    loaded = None

    def act(self, place):
        if place == self.place and self.step == 6 and self.loaded is None:
            self.state = jax.tree.map(jnp.zeros_like, self.state)
            self.load(self.name)
            self.loaded = jax.device_get(self.state), self.step

    def save_or_stop(self):
        if self.step == 3 and self.loaded is None:
            self.kept = jax.device_get(self.state)
            self.save("three")
        self.act("save_or_stop")
        super().save_or_stop()

    def prepare(self):
        super().prepare()
        write_row = self.session.write_row

        def write_and_act():
            write_row()
            self.act("write_row")

        self.session.write_row = write_and_act

    def evaluator(self):
        return [*super().evaluator(), ActingEvaluator(self)]

    def batch(self, slice="train", step=None):
        if slice == "train" and step == 6 and self.place == "batch":
            self.load(self.name)
        return super().batch(slice, step)


class ActingEvaluator:
    """An evaluator that calls its job."""

    def __init__(self, job):
        self.job = job

    def evaluate(self, weights, step, hosts):
        self.job.act("evaluate")
        return {}


class ActingHook(Observer):
    """A hook that calls its job."""

    def on_row(self, moment):
        self.job.act("on_row")


LOADING = {"config.eval.every_steps": 2, "logging.every_steps": 2, "logging.tensorboard": True}
LOADING["hooks"] = ["tests.support.hooks:RowCounter", "tests.support.hooks:DiaryObserver"]


@pytest.mark.parametrize(
    ("name", "place", "changes", "step"),
    [
        ("three", "save_or_stop", {"checkpoint.every_steps": 100}, 3),
        pytest.param("4", "save_or_stop", {"checkpoint.every_steps": 2}, 4, marks=pytest.mark.soak),
        pytest.param(
            *("three", "write_row", {"checkpoint.every_steps": 4, "checkpoint.keep_last": 1}, 3),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_job_continues_from_a_loaded_checkpoint_as_if_restored(name, place, changes, step, tmp_path):
    plain = make_gpt(tmp_path / "plain", TrainLookup, **LOADING | changes)
    plain()
    job = make_gpt(tmp_path / "run", LoadingLookup, **LOADING | changes)
    job.name, job.place = name, place
    job()
    state, loaded_step = job.loaded
    assert loaded_step == step
    assert name != "three" or are_leaves_equal(state, job.kept)
    assert read_trajectory(tmp_path / "run") == read_trajectory(tmp_path / "plain")
    assert are_leaves_equal(job.state, plain.state)
    assert "8" in os.listdir(tmp_path / "run" / "checkpoints")
    (event,) = [each for each in read_log(job.store, "events") if each["event"] == "load"]
    assert (event["step"], event["name"], event["before"]) == (step, name, 6)
    # Observers have no state and are called again; TensorBoard restarts with the remaining rows.
    seen = [int(line.split()[-1]) for line in (tmp_path / "run" / "diary").read_text().splitlines() if "row" in line]
    assert seen == [2, 4, 6, *range(step + 2 - step % 2, 9, 2)]


@pytest.mark.parametrize("kind", ["kill", pytest.param("stop", marks=pytest.mark.soak)])
def test_a_job_that_ends_after_a_load_resumes_from_the_loaded_checkpoint(kind, tmp_path):
    changes = {"checkpoint.every_steps": 5, "checkpoint.keep_last": 1}
    plain = make_gpt(tmp_path / "plain", TrainLookup, **LOADING | changes)
    plain()

    class Ending(LoadingLookup):
        def save_or_stop(self):
            super().save_or_stop()
            if self.loaded and kind == "kill":
                raise KeyboardInterrupt

    job = make_gpt(tmp_path / "run", Ending, **LOADING | changes)
    with pytest.raises(KeyboardInterrupt if kind == "kill" else PreemptedError):
        job(stop=None if kind == "kill" else StopAfterLoad(job))
    again = make_gpt(tmp_path / "run", TrainLookup, **LOADING | changes)
    again()
    (restored,) = [each for each in read_log(job.store, "events") if each["event"] == "restore"]
    assert restored["step"] == 3
    assert read_trajectory(tmp_path / "run") == read_trajectory(tmp_path / "plain")
    assert are_leaves_equal(again.state, plain.state)


class StopAfterLoad(StopNotice):
    """A stop notice that is given once `job` has loaded."""

    def __init__(self, job):
        super().__init__()
        self._job = job

    def poll(self):
        return self._job.loaded is not None


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("evaluate", "evaluation"),
        pytest.param("on_row", "hook ActingHook.on_row", marks=pytest.mark.soak),
        pytest.param("batch", "the work of a thread", marks=pytest.mark.soak),
    ],
)
def test_a_load_during_a_step_is_rejected(place, words, tmp_path):
    job = make_gpt(tmp_path / "run", LoadingLookup, **LOADING | {"hooks": [f"{__name__}:ActingHook"]})
    job.place = place
    with pytest.raises((PhaseError, HookError), match=f"load: it was called during {words}"):
        job()


PHASES = {
    "before": (lambda job: None, "not (running|compiled) yet"),
    "done": (lambda job: job(), "has ended"),
    "stopped": (lambda job: stop_after(job, 2), "has ended"),
}
METHODS = {
    "batch": lambda job: job.batch(),
    "evaluator": lambda job: job.evaluator(),
    "validation": lambda job: job.validation,
    "save": lambda job: job.save("name"),
    "load": lambda job: job.load("2"),
    "save_or_stop": lambda job: job.save_or_stop(),
}


@pytest.mark.parametrize("phase", ["before", "done", pytest.param("stopped", marks=pytest.mark.soak)])
def test_methods_called_in_the_wrong_phase_raise(phase, tmp_path):
    reach, words = PHASES[phase]
    job = make_gpt(tmp_path / "run", TrainLookup)
    reach(job)
    before = sorted(path for path in tmp_path.rglob("*"))
    for name, call in METHODS.items():
        if phase != "before" and name in ("batch", "evaluator", "validation"):
            assert call(job)  # attributes that need no running job still work
            continue
        with pytest.raises(PhaseError, match=f"TrainLookup.{name}: the job .*{words}") as caught:
            call(job)
        assert caught.value.exit_code == 1
        assert "\n" not in str(caught.value)
    assert sorted(path for path in tmp_path.rglob("*")) == before


@pytest.mark.soak
def test_a_non_finite_loss_stops_the_run_and_keeps_the_last_checkpoint(tmp_path):
    wild = {"config.optimizer.learning_rate": 1e30, "config.optimizer.clip_norm": None}
    wild |= {"config.schedule": {"name": "constant"}, "checkpoint.every_steps": 1}
    job = make_gpt(tmp_path / "run", **wild)
    with pytest.raises(DivergedError, match=r"step 2: training diverged: loss .*; checkpoint 1 is kept"):
        job()
    job.checkpointer.wait_until_finished()
    assert list(read_committed(job.store)) == [1]
    assert [row["step"] for row in read_rows(job.store.root)] == [1]
    assert not job.done


def test_a_warm_start_takes_only_the_weights_of_another_run(tmp_path, undisturbed):
    class AtTheStart(PretrainGPT):
        def run(self):
            self.first = jax.device_get(self.state)
            raise PreemptedError("seen enough")

    job = make_gpt(tmp_path / "run", AtTheStart, **{"checkpoint.init_from": str(undisturbed.store.root)})
    with pytest.raises(PreemptedError):
        job()
    assert are_leaves_equal(job.first.params, undisturbed.state.params)
    assert int(job.first.step) == 0
    moments = [leaf for leaf in jax.tree.leaves(job.first.opt_state) if leaf.ndim]
    assert moments
    assert all((leaf == 0).all() for leaf in moments)


# Errors before any device is used.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology.mesh": {"data": 16}}, r"topology\.mesh: .*larger than the 8 devices here"),
        ({"topology.mesh": {"data": 3}}, r"topology\.mesh: .*does not use exactly the 8 devices here"),
        ({"topology.accelerator": "v5e-16"}, r"sized for v5e-16, here: 8 x cpu; to run it here: --set "),
        ({"topology.accelerator": "abacus"}, r"topology\.accelerator: got 'abacus'"),
        ({"config.train.global_batch_examples": 12}, r"config\.train: .*use 8 or 16"),
        ({"config.train.micro_batch_examples": 3}, r"config\.train: micro_batch_examples=3 does not divide"),
        ({"config.data.source": "nowhere.txt"}, r"config\.data\.source=nowhere\.txt: no file matches"),
    ],
    ids=str,
)
def test_invalid_configs_are_rejected_with_their_key(tmp_path, changes, message):
    with pytest.raises(SpecError, match=message):
        make_gpt(tmp_path / "run", **changes)()
    assert not (tmp_path / "run").exists()


def test_devices_of_several_kinds_are_refused(tmp_path, monkeypatch):
    job = make_gpt(tmp_path / "run")
    kinds = ["NVIDIA H100 80GB HBM3"] * 7 + ["NVIDIA A100-SXM4-80GB"]
    devices = [SimpleNamespace(device_kind=kind, process_index=place // 4) for place, kind in enumerate(kinds)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    words = r"\(1 x NVIDIA A100-SXM4-80GB on process 1, 7 x NVIDIA H100 80GB HBM3 on processes 0, 1\)"
    with pytest.raises(InvalidError, match=f"several kinds {words}"):
        validate_hardware(job.spec, job.topology, job.config, Hosts.single_process())


@pytest.mark.parametrize(("chunk", "is_dropped"), [(None, False), (64, False), (96, True)])
def test_a_suggested_sequence_length_divides_into_loss_chunks(tmp_path, chunk, is_dropped):
    changes = {"config.data.sequence_length": 192, "config.memory.loss_chunk_positions": chunk}
    job = make_gpt(tmp_path / "run", **changes)
    options = list_local_options(job.spec, job.topology, job.config, 8)
    assert "config.data.sequence_length=128" in options
    assert ("config.memory.loss_chunk_positions=null" in options) == is_dropped


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    "data",
    [
        {"source": "/nowhere/*.bin"},
        {"source": "/nowhere/*.bin", "dtype": "uint32"},
        {"mixture": [{"name": "a", "source": "/nowhere/a.txt"}, {"name": "b", "source": "python-stdlib"}]},
        {"source": "python-stdlib", "validation": {"other": "/nowhere/b.txt"}},
    ],
    ids=["source", "dtype", "mixture", "validation"],
)
def test_missing_data_suggests_a_source_that_trains(tmp_path, data):
    job = make_gpt(tmp_path / "run", **{"config.data": {"sequence_length": 16, **data}})
    options = [shlex.split(option)[0] for option in list_local_options(job.spec, job.topology, job.config, 8)]
    text = yaml.safe_dump(job.spec.model_dump(mode="json"))
    offered = validate_config(parse_document(text, "spec.yaml", options), PretrainGPT.Config).data
    assert all(is_available(named.source) for named in (*offered.sources, *offered.validation.values()))
    load_dataset(offered, seed=0, batch_examples=8, cache_directory=tmp_path)


def test_a_spec_of_a_trainer_is_completed_from_defaults(tmp_path):
    spec = make_gpt_spec(tmp_path / "run")
    assert spec.topology is not None
    assert PretrainGPT(spec).total_steps == STEPS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda leaf: leaf.astype(jnp.bfloat16), r"params\.embedding\S*: was float32\[.*\], is bfloat16"),
        (lambda leaf: leaf[None], r"params\.embedding\S*: was float32\[.*\], is float32\[1,"),
        (lambda leaf: {"inner": leaf}, r"params\.embedding\S*\.inner: was not there at the start"),
    ],
    ids=["dtype", "shape", "structure"],
)
def test_a_train_step_that_changes_the_state_type_is_rejected_before_compilation(tmp_path, change, message):
    class Changing(PretrainGPT):
        @classmethod
        def train_step(cls, state, batch, key, accumulate_steps):
            state, loss, meta = super().train_step(state, batch, key, accumulate_steps)
            return state.replace(params=state.params | {"embedding": change(state.params["embedding"])}), loss, meta

    with pytest.raises(StateError, match=message):
        make_gpt(tmp_path / "run", Changing)()
    assert not (tmp_path / "run" / "attempts").exists()


def test_a_job_on_cpus_keeps_the_memory_of_its_steps(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr("runner.train.program.keep_freed_memory", kept.append)
    job = make_gpt(tmp_path / "run", TrainLookup)
    job()
    assert kept == [jax.local_device_count() * job.compiled.memory.temporaries]
    assert kept[0] > 0


# Garbage collection.


class Cycle:
    """An object that refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.own = self


class LeaveGarbage(PretrainGPT):
    """GPT that leaves a reference cycle at each step, and fails or is interrupted at the sixth."""

    ending = "done"

    def save_or_stop(self) -> None:
        self.seen.append((gc.isenabled(), gc.get_freeze_count() > 0, sum(each() is not None for each in self.alive)))
        self.alive.append(weakref.ref(Cycle()))
        if self.step == 6 and self.ending != "done":
            raise {"error": ValueError, "interrupt": KeyboardInterrupt}[self.ending]("asked")
        super().save_or_stop()


@pytest.mark.parametrize("ending", ["done", "error", "interrupt"])
def test_garbage_is_collected_at_rows_and_the_collector_restored_at_the_end(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tests themselves have frozen objects, which a job would respect.
    counts = iter([0])
    real = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: next(counts, real()))
    calls: list[str] = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, functools.partial(calls.append, name))
    job = make_gpt(tmp_path / "run", LeaveGarbage, **{"logging.every_steps": 3, "config.eval": {"every_steps": 6}})
    job.ending, job.seen, job.alive = ending, [], []
    with contextlib.suppress(ValueError, KeyboardInterrupt):
        job()
    seen = job.seen[:6]
    # Automatic collection ends with the first row, which may free the cycles of earlier steps at any time.
    assert [is_enabled for is_enabled, *_ in seen] == [True, True, False, False, False, False]
    assert [alive for *_, alive in seen[2:]] == [0, 1, 2, 0]
    assert gc.isenabled()
    assert calls == ["freeze", "unfreeze"]


@pytest.mark.parametrize("state", ["off", "frozen"])
def test_a_process_keeps_the_collector_that_it_has_set_up(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(gc, "unfreeze", lambda: frozen.append(False))
    job = make_gpt(tmp_path / "run", LeaveGarbage)
    job.seen, job.alive = [], []
    if state == "off":
        gc.disable()
    try:
        job()
        assert gc.isenabled() == (state == "frozen")
        assert not frozen
    finally:
        gc.enable()
