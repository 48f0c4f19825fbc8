"""A start that continues a run with edited code says so, or is refused; other differences are no edit."""

import importlib.util
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from runner import BaseTrainer
from runner.cli.app import main
from runner.cli.verify_resume import find_program_change
from runner.errors import InvalidError
from runner.parallel.mesh import make_mesh
from runner.storage import LocalStore, read_log
from runner.train import program_history
from runner.train.compile import compute_program_digest
from runner.train.program_history import KNOWN_MAX, ProgramHistory, ProgramRecord, find_change
from tests.support import libtpu
from tests.support.bigram import BIGRAM_OPTIONS
from tests.support.tiny_jobs import make_counter, make_gpt, stop_after

FACTS: dict[str, Any] = {
    "config.model": "a",
    "mesh": {"data": 4},
    "device_kind": "cpu",
    "micro_batch_examples": 2,
    "versions": {"jax": "0.10.2"},
    "options": {},
}
RATE = {"config.schedule": {"name": "constant"}}
SOURCE = """
import jax.numpy as jnp
import optax
from tests.support.bigram import BigramTrainer


class Job(BigramTrainer):
    @classmethod
    def forward(cls, apply_fn, params, batch, key):
        loss_sum, _ = super().forward(apply_fn, params, batch, key)
        return loss_sum * 2.0, {}

    @classmethod
    def optimizer(cls):
        return optax.sgd(0.1)

    @classmethod
    def val_step(cls, state, batch):
        return super().val_step(state, batch)

    def batch(self, slice="train", step=None):
        return super().batch(slice, step)
"""
EDITS = {
    "the loss": (("loss_sum * 2.0", "loss_sum * 3.0"), True),
    "the optimizer": (("sgd(0.1)", "sgd(0.2)"), True),
    "a comment and blank lines": (("return loss_sum", "# why\n\n\n        return loss_sum"), False),
    "the validation step": (("super().val_step(state, batch)", "(jnp.float32(0), jnp.float32(1), {})"), False),
    "the data": (("super().batch(slice, step)", "super().batch(slice, step * 2)"), False),
}


def record(digest: str, **facts: Any) -> dict[str, Any]:
    return ProgramHistory().add(ProgramRecord(digest, FACTS | facts))


# Comparison of records.


@pytest.mark.parametrize(
    ("now", "settings", "software"),
    [
        (ProgramRecord("b", FACTS), [], []),
        (ProgramRecord("b", FACTS | {"mesh": {"data": 2}}), ["mesh {'data': 4} -> {'data': 2}"], []),
        (ProgramRecord("b", FACTS | {"config.model": "b"}), ["config.model"], []),
        (ProgramRecord("b", FACTS | {"device_kind": "TPU v5e"}), ["device_kind cpu -> TPU v5e"], []),
        (ProgramRecord("b", FACTS | {"versions": {"jax": "0.11.0"}}), [], ["jax 0.10.2 -> 0.11.0"]),
        (ProgramRecord("b", FACTS | {"options": {"XLA_FLAGS": "--x"}}), [], ["XLA_FLAGS none -> --x"]),
        (ProgramRecord("b", FACTS | {"later": 1}), [], []),
    ],
)
def test_a_change_names_what_else_differs(now: ProgramRecord, settings: list[str], software: list[str]) -> None:
    change = find_change(record("a"), now)
    assert change is not None
    assert (change.before, change.now, change.settings, change.software) == ("a", "b", settings, software)
    assert change.is_expected == bool(settings)
    assert ("the code" in change.list_changes()[-1]) == (not settings and not software)


def test_equal_programs_are_no_change_whatever_else_differs() -> None:
    assert find_change(record("a"), ProgramRecord("a", FACTS)) is None
    assert find_change(record("a"), ProgramRecord("a", FACTS | {"mesh": {}, "versions": {"jax": "9"}})) is None


def test_a_mesh_that_the_run_had_before_is_compared_with_its_own_program() -> None:
    history = ProgramHistory()
    four, two = ProgramRecord("a4", FACTS), ProgramRecord("a2", FACTS | {"mesh": {"data": 2}})
    history.add(four)
    saved = history.add(two)
    assert find_change(saved, four) is None
    change = ProgramHistory().resume(saved, ProgramRecord("b4", FACTS))
    assert change is not None
    assert (change.before, change.is_expected) == ("a4", False)


def test_each_change_of_the_code_is_counted_also_back() -> None:
    saved, counts = record("a"), []
    for digest in ("a", "b", "b", "a"):
        history = ProgramHistory()
        history.resume(saved, ProgramRecord(digest, FACTS))
        saved = history.add(ProgramRecord(digest, FACTS))
        counts.append(saved["changes"])
    assert counts == [0, 1, 1, 2]


def test_programs_of_the_former_code_are_forgotten_after_an_edit() -> None:
    history = ProgramHistory()
    history.add(ProgramRecord("a2", FACTS | {"mesh": {"data": 2}}))
    saved = history.add(ProgramRecord("a4", FACTS))
    edited = ProgramHistory()
    edited.resume(saved, ProgramRecord("b4", FACTS))
    again = find_change(edited.add(ProgramRecord("b4", FACTS)), ProgramRecord("b2", FACTS | {"mesh": {"data": 2}}))
    assert again is not None
    assert again.is_expected


def test_a_manifest_holds_few_programs() -> None:
    history = ProgramHistory()
    saved = [history.add(ProgramRecord("a", FACTS | {"processes": number})) for number in range(3 * KNOWN_MAX)][-1]
    assert len(saved["known"]) == KNOWN_MAX
    assert list(saved["known"])[-1] == ProgramRecord("a", saved["facts"]).facts_digest


def test_verify_resume_names_a_program_that_has_changed() -> None:
    assert find_program_change([("f", "a"), ("g", "b"), ("f", "a")]) is None
    assert "a -> c" in str(find_program_change([("f", "a"), ("g", "b"), ("f", "c")]))


# Digests.


@pytest.fixture
def load_job(tmp_path: Path) -> Iterator[Any]:
    """Return a function that loads the class `Job` of a source text, always from the same file."""

    def load(source: str) -> type[BaseTrainer]:
        path = tmp_path / "edited_job.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("edited_job", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["edited_job"] = module
        exec(compile(source, path, "exec"), module.__dict__)  # a cached bytecode file may be of the text before
        return module.Job

    yield load
    sys.modules.pop("edited_job", None)


def compute_digest(job: BaseTrainer) -> str:
    """Return the digest of the program of a job's train step, without compiling it."""
    builder = job.setup_builder
    setup = builder.build(jax.devices())
    return compute_program_digest(setup.lower_train(builder.train_step, builder.list_layouts(setup)[0]))


def test_an_edit_changes_the_digest_if_and_only_if_it_changes_the_step(tmp_path: Path, load_job: Any) -> None:
    def digest(source: str) -> str:
        return compute_digest(make_gpt(tmp_path / "run", load_job(source), **BIGRAM_OPTIONS, **RATE))

    before = digest(SOURCE)
    for edit, ((old, new), changes_step) in EDITS.items():
        assert old in SOURCE
        assert (digest(SOURCE.replace(old, new)) != before) == changes_step, edit


def test_the_address_of_a_python_function_is_not_in_the_digest() -> None:
    def lower() -> Any:
        double = custom_partitioning(lambda x: x * 2)
        double.def_partition(None, infer_sharding_from_operands=lambda *_: None, sharding_rule="i -> i")
        sharding = NamedSharding(make_mesh({"data": 8}), PartitionSpec("data"))
        return jax.jit(double).lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding))

    one, other = lower(), lower()
    assert one.as_text() != other.as_text()
    assert compute_program_digest(one) == compute_program_digest(other)


@pytest.mark.soak
def test_lines_of_a_kernel_are_not_in_the_digest() -> None:
    found = libtpu.run_module("tests.train.kernel_digest")
    assert found["texts"] == 3
    assert found["digests"][0] == found["digests"][1] != found["digests"][2]


# Runs.


def list_changes(directory: Path) -> list[tuple[int, list[str], bool]]:
    return [
        (event["step"], event["changes"], event["expected"])
        for event in read_log(LocalStore(directory), "events")
        if event["event"] == "changed" and "program" in event
    ]


def read_record(directory: Path, step: int) -> dict[str, Any]:
    manifest = json.loads((directory / f"checkpoints/{step}/manifest.json").read_text())
    return manifest["topology"]["program"]


def test_a_run_tells_of_edited_code_and_counts_it(tmp_path: Path, load_job: Any, capsys: Any) -> None:
    run, options = tmp_path / "run", BIGRAM_OPTIONS | RATE | {"config.eval.every_steps": None}
    edited = SOURCE.replace(*EDITS["the loss"][0])
    commented = SOURCE.replace(*EDITS["a comment and blank lines"][0])
    sources = itertools.chain([SOURCE, commented, edited, edited, SOURCE])
    for step, source in enumerate(sources, 1):
        stop_after(make_gpt(run, load_job(source), **options), step)
    found = list_changes(run)
    assert [(step, changes[1], expected) for step, changes, expected in found] == [
        (2, "the code, since nothing else has changed", False),
        (4, "the code, since nothing else has changed", False),
    ]
    before, now = re.findall(r"[0-9a-f]{16}", found[0][1][0])
    assert f"{before} -> {now}" in capsys.readouterr().err
    assert [read_record(run, step)["changes"] for step in (3, 4, 5)] == [1, 1, 2]
    main(["lineage", str(run)])
    assert "the code of the train step has changed 2 times" in capsys.readouterr().out
    main(["status", str(run), "--json"])
    assert json.loads(capsys.readouterr().out)["program_changes"] == [2, 4]

    # Refused before the claim, so that a running attempt would go on.
    attempts = sorted(path.name for path in (run / "attempts").iterdir())
    options |= {"checkpoint.program": "refuse"}
    with pytest.raises(InvalidError, match=r"checkpoint\.program: is refuse, and .* set warn"):
        make_gpt(run, load_job(edited), **options)()
    assert sorted(path.name for path in (run / "attempts").iterdir()) == attempts
    stop_after(make_gpt(run, load_job(commented), **options), 6)
    assert len(list_changes(run)) == 2

    # A fork continues the step of its parent.
    fork = options | {"checkpoint.fork_from": {"run": str(run), "step": "newest", "changes": []}}
    with pytest.raises(InvalidError, match=r"checkpoint\.program"):
        make_gpt(tmp_path / "fork", load_job(edited), **fork)()
    assert not (tmp_path / "fork/attempts").exists()
    stop_after(make_gpt(tmp_path / "fork", load_job(edited), **fork | {"checkpoint.program": "warn"}), 7)
    assert [(step, expected) for step, _, expected in list_changes(tmp_path / "fork")] == [(6, False)]
    assert read_record(tmp_path / "fork", 7)["changes"] == 3


def test_another_mesh_spec_or_version_is_not_called_an_edit(
    tmp_path: Path, load_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    options = BIGRAM_OPTIONS | RATE | {"config.eval.every_steps": None, "checkpoint.program": "refuse"}
    changed = {"topology.mesh": {"data": 4, "fsdp": 2}, "config.metrics.norms": "parameters"}
    for step, changes in enumerate([{}, changed, {}], 1):
        stop_after(make_gpt(run, load_job(SOURCE), **options | changes), step)
    found = list_changes(run)
    # The first program is known, so the return to it is no change.
    assert [(step, expected) for step, _, expected in found] == [(1, True)]
    assert found[0][1][1] == "config.metrics"
    assert found[0][1][2].startswith("mesh ")
    assert read_record(run, 3)["changes"] == 0
    # A library of another version may lower the same code to another program, which is told with the versions.
    edited = load_job(SOURCE.replace(*EDITS["the loss"][0]))
    monkeypatch.setattr(program_history, "collect_versions", lambda: {"jax": "99"})
    with pytest.raises(InvalidError, match=r"checkpoint.program: .*jax \S+ -> 99; restore"):
        make_gpt(run, edited, **options)()
    stop_after(make_gpt(run, edited, **options | {"checkpoint.program": "warn"}), 4)
    assert [word for word in list_changes(run)[-1][1] if "code" in word] == []


def test_a_run_of_a_version_without_records_goes_on(
    tmp_path: Path, load_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BIGRAM_OPTIONS | RATE | {"config.eval.every_steps": None, "checkpoint.program": "refuse"}
    monkeypatch.setattr(ProgramHistory, "add", lambda self, program: {})
    stop_after(make_gpt(tmp_path / "run", load_job(SOURCE), **options), 1)
    monkeypatch.undo()
    stop_after(make_gpt(tmp_path / "run", load_job(SOURCE), **options), 2)
    assert list_changes(tmp_path / "run") == []
    assert read_record(tmp_path / "run", 2)["changes"] == 0


def test_a_job_without_a_program_has_nothing_to_compare(tmp_path: Path) -> None:
    for step in (2, 4):
        stop_after(make_counter(tmp_path / "run", **{"checkpoint.program": "refuse"}), step)
    assert list_changes(tmp_path / "run") == []
