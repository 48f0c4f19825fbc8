"""Strict validation of specs: every problem is one line with file, line and the fix."""

import subprocess
import sys
from pathlib import Path

import pytest

import runner
from runner.errors import SpecError
from runner.spec import (
    ExecutionSpec,
    MeshConfig,
    Topology,
    load_document,
    make_document,
    parse_document,
    read_spec,
    validate_config,
)
from tests.spec.sample import SPEC, Config, Train, edit_spec, find_problems


def test_a_valid_spec_is_read_with_defaults(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(SPEC)
    spec = read_spec(path, ["logging.wandb=offline", "seed=8"])
    assert (spec.name, spec.project, spec.seed) == ("tiny", "general", 8)
    assert spec.topology == Topology(mesh=MeshConfig(data="auto", fsdp=1, tensor=1))
    assert (spec.checkpoint.every_steps, spec.checkpoint.keep_last) == (50, 3)
    assert spec.logging.wandb == "offline"
    assert spec.config == {"train": {"total_steps": 500, "rate": 0.001}}
    assert validate_config(load_document(path), Config).train.rate == 0.001


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (edit_spec("seed: 7", "sed: 7"), "specs/x.yaml:4: sed: unknown key; did you mean seed?"),
        (edit_spec("fsdp: 1", "fsdq: 1"), "specs/x.yaml:6: topology.mesh.fsdq: unknown key; did you mean fsdp?"),
        (
            edit_spec("every_steps: 50", "zzz: 50"),
            "specs/x.yaml:8: checkpoint.zzz: unknown key; choose from "
            "every_steps, every_minutes, every_epochs, every, mean_time_between_failures_hours, keep_last, "
            "keep_every_steps, keep_best, init_from, fork_from, local_directory, local_every_steps, local_replicas, "
            "grace_seconds, max_unsaved_minutes, program",
        ),
        (edit_spec("seed: 7", "seed: abc"), "specs/x.yaml:4: seed: got 'abc' (text), needs a whole number"),
        (edit_spec("seed: 7", "seed: '12'"), "specs/x.yaml:4: seed: got '12' (text), needs a whole number"),
        (edit_spec("seed: 7", "seed: true"), "specs/x.yaml:4: seed: got true, needs a whole number"),
        (edit_spec("seed: 7", "seed: 7.0"), "specs/x.yaml:4: seed: got 7.0, needs a whole number"),
        (edit_spec("seed: 7", "seed:"), "specs/x.yaml:4: seed: got null, needs a whole number"),
        (edit_spec("seed: 7", "seed: -1"), "specs/x.yaml:4: seed: got -1, needs a number of at least 0"),
        (
            edit_spec("seed: 7", "seed: 4294967296"),
            "specs/x.yaml:4: seed: got 4294967296, needs a number below 4294967296",
        ),
        (edit_spec("tiny", "5"), "specs/x.yaml:1: name: got 5, needs text"),
        (
            edit_spec("tiny", "a/b"),
            "specs/x.yaml:1: name: got 'a/b' (text), needs a file name of letters, digits, '.', '_' and '-'",
        ),
        (
            edit_spec(":PretrainGPT", ""),
            "specs/x.yaml:2: job: got 'experiments.gpt' (text), needs the form module.path:Class",
        ),
        (edit_spec("fsdp: 1", "fsdp: 0"), "specs/x.yaml:6: topology.mesh.fsdp: got 0, needs a number above 0 or auto"),
        (
            edit_spec("fsdp: 1", "fsdp: auto"),
            "specs/x.yaml:6: topology.mesh: axes data, fsdp are auto, but only one may be; give the others a size",
        ),
        (
            edit_spec("every_steps: 50", "every_steps: null"),
            "specs/x.yaml:7: checkpoint: every_steps, every_minutes and every_epochs are all null; "
            "give one of them",
        ),
        *(
            (edit_spec("every_steps: 50", f"init_from: {given}"), f"specs/x.yaml:8: checkpoint.init_from{message}")
            for given, message in {
                "5": ": got 5, needs text or a mapping",
                "{allow_missing: [a]}": ": missing key path",
                "{path: x, alow: [a]}": ".alow: unknown key; choose from path, weights, allow_missing, "
                "ignored_config_keys, rename",
                "{path: x, rename: {a: 3}}": ".rename.a: got 3, needs text",
                "{path: x, ignored_config_keys: a}": ".ignored_config_keys: got 'a' (text), needs a list",
            }.items()
        ),
        (edit_spec("mesh: {data: auto, fsdp: 1}", "mesh: 8"), "specs/x.yaml:6: topology.mesh: got 8, needs a mapping"),
        (edit_spec("directory: runs/tiny\n", ""), "specs/x.yaml:1: missing key directory"),
        (
            SPEC + "logging: {wandb: ofline}\n",
            "specs/x.yaml:13: logging.wandb: got 'ofline' (text), needs one of disabled, offline, online; "
            "did you mean offline?",
        ),
    ],
)  # fmt: skip
def test_a_problem_in_the_spec_gives_one_line_with_position_and_fix(text: str, line: str) -> None:
    assert find_problems(text) == [line]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            edit_spec("total_steps", "total_stepz"),
            "specs/x.yaml:11: config.train.total_stepz: unknown key; did you mean total_steps?",
        ),
        (edit_spec("    total_steps: 500\n", ""), "specs/x.yaml:10: config.train: missing key total_steps"),
        (edit_spec("train:", "trains:"), "specs/x.yaml:10: config.trains: unknown key; did you mean train?"),
        (edit_spec("1e-3", "fast"), "specs/x.yaml:12: config.train.rate: got 'fast' (text), needs a number"),
        (edit_spec("1e-3", "true"), "specs/x.yaml:12: config.train.rate: got true, needs a number"),
        (
            edit_spec("rate: 1e-3", "shape: cosin"),
            "specs/x.yaml:12: config.train.shape: got 'cosin' (text), needs one of constant, cosine; "
            "did you mean cosine?",
        ),
        (
            edit_spec("rate: 1e-3", "sizes: [1, x]"),
            "specs/x.yaml:12: config.train.sizes.1: got 'x' (text), needs a whole number",
        ),
        (
            SPEC + "  parts:\n  - {total_steps: 1, rte: 2}\n",
            "specs/x.yaml:14: config.parts.0.rte: unknown key; did you mean rate?",
        ),
    ],
)
def test_a_problem_in_the_config_is_reported_like_one_in_the_spec(text: str, line: str) -> None:
    assert line in find_problems(text, config=Config)


def test_integers_are_accepted_as_floats_and_lists_as_tuples() -> None:
    document = parse_document(edit_spec("1e-3", "1\n    sizes: [3, 4]"), "x")
    assert validate_config(document, Config).train == Train(total_steps=500, rate=1.0, sizes=(3, 4))


def test_all_problems_of_one_pass_are_listed_by_line() -> None:
    text = edit_spec("seed: 7", "sed: 7").replace("every_steps: 50", "every_steps: x").replace("tiny", "[]", 1)
    assert find_problems(text, "topology.mesh.fsdp=-1") == [
        "--set topology.mesh.fsdp=-1: got -1, needs a number above 0 or auto",
        "specs/x.yaml:1: name: got a list, needs text",
        "specs/x.yaml:4: sed: unknown key; did you mean seed?",
        "specs/x.yaml:8: checkpoint.every_steps: got 'x' (text), needs a whole number",
    ]


def test_the_config_of_a_spec_constructed_in_python_is_validated_without_lines() -> None:
    spec = ExecutionSpec(name="x", job="a:B", directory="runs", config={"train": {"total_stepz": 1, "total_steps": 1}})
    with pytest.raises(SpecError) as caught:
        validate_config(make_document(spec), Config)
    assert str(caught.value) == "ExecutionSpec: config.train.total_stepz: unknown key; did you mean total_steps?"


def test_reading_a_spec_imports_no_array_library() -> None:
    code = "import sys, runner.config; print({'jax', 'flax', 'numpy'} & set(sys.modules))"
    root = Path(runner.__file__).parents[1]
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True).stdout
    assert printed == "set()\n"
