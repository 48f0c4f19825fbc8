"""`checkpoint.init_from` with exports: imported once, after the job's own checkpoints, refused if mismatched."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments.gpt import PretrainGPT
from runner import BaseTrainer, open_checkpoint
from runner.checkpoint.leaves import flatten_with_names
from runner.checkpoint.save import SaveContents
from runner.cli.app import run_command
from runner.errors import InvalidError, PreemptedError
from runner.huggingface.load import read_leaf
from runner.huggingface.mapping import match_tensors
from runner.huggingface.safetensors import open_published_weights
from runner.plan.checks import Findings, check_weights
from runner.spec import InitFromConfig
from runner.storage import parse_lines, read_json
from tests.huggingface.small import convert_to_tensors, make_leaves, write_export
from tests.support.tiny_jobs import are_leaves_equal, make_counter, make_gpt, read_outcome, stop_after

STOP, STEPS = 4, 8  # the job has the compiled programs of test_trainer.py
JOB: dict[str, Any] = {"checkpoint.every_steps": STOP, "checkpoint.keep_best": {"metric": "val/loss"}}


class ExportingGPT(PretrainGPT):
    """GPT that is exported while it trains."""

    def make_save_contents(self) -> SaveContents:
        out = self.store.root.parent / "meanwhile"
        if self.step == STEPS and not out.exists():
            self.checkpointer.wait_until_finished()  # the previous step is committed, this one is not saved yet
            assert run_command(["export", str(self.store.root), "-o", str(out)]) == 0
        return super().make_save_contents()


class StartOnlyGPT(PretrainGPT):
    """GPT that keeps its initial state and ends without a step."""

    def run(self) -> None:
        self.first = jax.device_get(self.state.params)
        self.evaluated = self.validation.evaluate(self.weights(self.state), 0, self.attempt.hosts)
        raise PreemptedError("seen enough")


def run_start_only(job: BaseTrainer) -> Any:
    with pytest.raises(PreemptedError, match="seen enough"):
        job()
    return job.first


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("init_from")


@pytest.fixture(scope="module")
def run(directory: Path) -> BaseTrainer:
    """A finished run."""
    job = make_gpt(directory / "run", **JOB)
    job()
    return job


@pytest.fixture(scope="module")
def export_directory(directory: Path, run: BaseTrainer) -> Path:
    assert run_command(["export", str(run.store.root), "-o", str(directory / "exported")]) == 0
    return directory / "exported"


def read_stable_events(root: Path) -> list[str]:
    """Return the events without those that depend on timing."""
    found = [event["event"] for event in parse_lines((root / "events.jsonl").read_bytes())]
    return sorted(event for event in found if event != "progress")


def load_parameters(source: Path, job: BaseTrainer, params: Any = None, allowed: Sequence[str] = ()) -> Any:
    """Load the initial parameters of a job from `source`, in place of `params` or of its present ones."""
    return load_initial_weights(source, job, {"params": job.state.params if params is None else params}, allowed)[
        "params"
    ]


def load_initial_weights(source: Path, job: BaseTrainer, like: Any, allowed: Sequence[str] = ()) -> Any:
    """Load the initial weights of a job from `source`, with the shardings of `like`."""
    published = open_published_weights(str(source))
    rule = InitFromConfig(path=str(source), allow_missing=list(allowed))
    shapes = {name: leaf.shape for name, leaf in flatten_with_names(like).items()}
    pieces = match_tensors(published, job.family(), shapes, rule).pieces
    leaves = [
        read_leaf(published.store, published.versions, pieces[name], leaf)
        for name, leaf in flatten_with_names(like).items()
    ]
    return jax.device_get(jax.tree.unflatten(jax.tree.structure(like), leaves))


def test_a_fine_tune_starts_with_the_final_weights_and_loss(directory: Path, run: BaseTrainer, export_directory: Path):
    job = make_gpt(directory / "tuned", StartOnlyGPT, **JOB | {"checkpoint.init_from": str(export_directory)})
    assert are_leaves_equal(run_start_only(job), jax.device_get(run.state.params))
    assert job.evaluated["val/loss"] == read_json(run.store, "result.json")["val_loss"]


@pytest.mark.soak
def test_weights_are_imported_once_and_exports_are_read_only(directory: Path, run: BaseTrainer, export_directory: Path):
    source = shutil.copytree(export_directory, directory / "source")
    begun = JOB | {"checkpoint.init_from": {"path": str(source)}}
    whole = make_gpt(directory / "whole", ExportingGPT, **begun)
    whole()
    stopped = make_gpt(directory / "stopped", **begun)
    stop_after(stopped, STOP)
    shutil.rmtree(source)  # its own checkpoint takes precedence over init_from
    make_gpt(directory / "stopped", **begun)()
    assert read_outcome(directory / "stopped") == read_outcome(directory / "whole")
    assert read_stable_events(directory / "whole") == read_stable_events(run.store.root)
    weights, _ = open_checkpoint(directory / "whole", STOP)
    assert are_leaves_equal(load_parameters(directory / "meanwhile", run), weights["params"])


@pytest.mark.soak  # test_load.py covers a smaller family daily
def test_longer_tables_take_the_first_entries(directory: Path, run: BaseTrainer, export_directory: Path):
    changes = {"config.data.sequence_length": 32, "config.model.vocabulary_size": 300}
    longer = make_gpt(directory / "longer", **changes)
    fresh = longer.setup_builder.build(jax.devices()).init_state()
    allowed = ["transformer.wte.weight", "transformer.wpe.weight"]
    found = load_parameters(export_directory, longer, fresh.params, allowed)
    fresh = jax.device_get(fresh.params)
    known = jax.device_get(run.state.params)
    for name, size in (("embedding", 256), ("positions", 16)):
        assert (found[name][:size] == known[name]).all()
        assert (found[name][size:] == fresh[name][size:]).all()
    assert are_leaves_equal(found["blocks"], known["blocks"])


def test_tensor_names_of_the_first_release_are_known(directory: Path, run: BaseTrainer, export_directory: Path):
    files = load_file(export_directory / "model.safetensors")
    files = {name.removeprefix("transformer."): value for name, value in files.items()}
    files |= {f"h.{layer}.attn.bias": np.tril(np.ones((1, 1, 16, 16), np.uint8)) for layer in range(2)}
    files["lm_head.weight"] = files["wte.weight"]
    (directory / "first").mkdir()
    shutil.copy(export_directory / "config.json", directory / "first")
    save_file(files, directory / "first" / "model.safetensors")
    assert are_leaves_equal(load_parameters(directory / "first", run), jax.device_get(run.state.params))


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"config.model": {"layers": 1, "heads": 4, "width": 32}},
        [f"transformer.h.1.{name}.{kind}: is left over" for name in ("attn.c_attn", "mlp.c_fc") for kind in ("bias",)],
    ),
    ({"config.model": {"layers": 2, "heads": 2, "width": 32}}, ["config.json: n_head: got 4, the model needs 2"]),
    ({"config.model.layers": 3}, ["transformer.h.2.ln_1.bias: is missing, the model needs [32]"]),
    (
        {"config.data.sequence_length": 32},
        ["transformer.wpe.weight: has the shape [16, 32], the model needs [32, 32]"],
    ),
]


def list_plan_problems(job: BaseTrainer, abstract: Any = None) -> list[str]:
    """Return the problems that `plan` finds in the initial weights of a job."""
    findings = Findings()
    check_weights(
        job, job.setup_builder.build(jax.devices()).abstract_state if abstract is None else abstract, findings
    )
    return findings.problems


@pytest.mark.parametrize(("changes", "expected"), REFUSED, ids=str)
def test_plan_reports_weights_that_do_not_match(
    directory: Path, export_directory: Path, changes: dict[str, Any], expected: list[str]
):
    found = list_plan_problems(
        make_gpt(directory / "misfit", **changes, **{"checkpoint.init_from": str(export_directory)})
    )
    for line in expected:
        assert any(line in problem for problem in found), found


def test_weights_that_do_not_match_are_refused_before_the_claim(directory: Path, export_directory: Path):
    job = make_gpt(directory / "misfit", **{"config.model.heads": 2, "checkpoint.init_from": str(export_directory)})
    with pytest.raises(InvalidError, match=r"checkpoint\.init_from: .*: n_head: got 4, the model needs 2"):
        job()
    assert not (directory / "misfit").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{run}", None),
        (
            {"path": "{run}", "allow_missing": ["*"]},
            "allow_missing: nothing reads it: .* is not in Hugging",
        ),
        ({"path": "{run}", "rename": {"a": "b"}}, "rename: nothing reads it: .* export the run"),
        ({"path": "{run}", "ignored_config_keys": ["a"]}, "ignored_config_keys: nothing reads it: .* export the run"),
        ({"path": "{exported}", "weights": "ema_0.9"}, "weights: nothing reads it: .* has no averages"),
        ({"path": "{run}", "weights": "ema_0.9"}, "got weights 'ema_0.9', has params; needs one of them"),
        ("{run}/checkpoints/3", "3: no manifest.json: it was never committed"),
        ("{run}/nothing", "no checkpoint is here"),
        ({"path": "{exported}", "rename": {"transformer.h.7": None}}, "rename: no tensor begins with transformer.h.7"),
        ("{small}", "model_type: got 'small', the model needs 'gpt2'"),
    ],
    ids=str,
)
def test_sources_of_init_from(
    directory: Path, run: BaseTrainer, export_directory: Path, source: Any, message: str | None
):
    if not (directory / "small").exists():
        write_export(directory / "small", convert_to_tensors(make_leaves()))
    places = {"run": str(run.store.root), "exported": str(export_directory), "small": str(directory / "small")}
    path = (source if isinstance(source, str) else source["path"]).format(**places)
    rule = path if isinstance(source, str) else source | {"path": path}
    job = make_gpt(directory / "chosen", **{"checkpoint.init_from": rule})
    found = list_plan_problems(job, run.abstract_state())
    assert bool(found) == (message is not None)
    assert message is None or re.search(message, found[0])


def test_a_job_without_a_family_is_reported(directory: Path, export_directory: Path, run: BaseTrainer):
    class NoFamilyGPT(PretrainGPT):
        def family(self) -> None:
            return None

    job = make_gpt(directory / "nameless", NoFamilyGPT, **{"checkpoint.init_from": str(export_directory)})
    (problem,) = list_plan_problems(job, run.abstract_state())
    assert "the job does not map its parameters to Hugging Face's names; implement `family`" in problem
    make_counter(directory / "count")()
    with pytest.raises(InvalidError, match="does not map its parameters to Hugging Face's names; implement `family`"):
        run_command(["export", str(directory / "count"), "-o", str(directory / "none")])


def test_the_best_checkpoint_is_the_one_kept_as_best(directory: Path, run: BaseTrainer):
    make_counter(directory / "no_best")()
    rows, _ = read_outcome(run.store.root)
    losses = {row["step"]: row["val/loss"] for row in rows if "val/loss" in row}
    best = min(losses, key=lambda step: losses[step])
    found, _ = open_checkpoint(run.store.root, "best")
    assert are_leaves_equal(found, open_checkpoint(run.store.root, best)[0])
    with pytest.raises(InvalidError, match=r"its spec has no checkpoint\.keep_best"):
        open_checkpoint(directory / "no_best", "best")


def test_weights_have_the_sharding_of_the_given_state(run: BaseTrainer, directory: Path):
    job = make_gpt(directory / "sharded", **{"topology.mesh": {"data": 2, "fsdp": 2, "tensor": 2}})
    abstract = {"params": job.setup_builder.build(jax.devices()).abstract_state.params}
    found, _ = open_checkpoint(run.store.root, like=abstract)
    assert are_leaves_equal(found["params"], run.state.params)
    assert [leaf.sharding for leaf in jax.tree.leaves(found)] == [leaf.sharding for leaf in jax.tree.leaves(abstract)]
    other = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*leaf.shape, 1), leaf.dtype), abstract)
    message = r"params\.blocks\.attention_norm\.bias: checkpoint has float32\[2,32\], the job float32\[2,32,1\]"
    with pytest.raises(InvalidError, match=message):
        open_checkpoint(run.store.root, like=other)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.nan, "float32"),
        pytest.param(-np.inf, "float32", marks=pytest.mark.soak),
        pytest.param(1e300, "float64", marks=pytest.mark.soak),
        pytest.param(np.inf, "float16", marks=pytest.mark.soak),
    ],
)
def test_weights_that_are_not_finite_are_refused_by_tensor_and_file(
    value: float, dtype: str, directory: Path, export_directory: Path
):
    source = shutil.copytree(export_directory, directory / f"bad-{value}-{dtype}")
    found = load_file(source / "model.safetensors")
    name = next(name for name in sorted(found) if ".h.1." in name and name.endswith("weight"))
    bad = found[name].astype(dtype)
    bad.reshape(-1)[-1] = value
    save_file({**found, name: bad}, source / "model.safetensors")
    with pytest.raises(InvalidError, match=rf"model\.safetensors: {re.escape(name)} has values that are NaN") as caught:
        make_gpt(directory / f"from-{value}-{dtype}", **JOB | {"checkpoint.init_from": str(source)})()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
