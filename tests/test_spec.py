"""A spec is read strictly, and every problem in it is one line that names file, line and what to write instead."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import yaml
from pydantic import Field, ValidationError

from runner import spec as spec_module
from runner.errors import SpecError
from runner.spec import (
    Checkpoint,
    ExecutionSpec,
    JobConfig,
    Mesh,
    Topology,
    document_of,
    dump_spec,
    hash_of,
    json_schema,
    load_document,
    load_job_class,
    parse_document,
    read_spec,
    trajectory,
    validate_config,
    validate_spec,
)

SPEC = """\
name: tiny
job: experiments.gpt:PretrainGPT
directory: runs/tiny
seed: 7
topology:
  mesh: {data: auto, fsdp: 1}
checkpoint:
  every_steps: 50
config:
  train:
    total_steps: 500
    rate: 1e-3
"""


class Train(JobConfig):
    total_steps: int
    rate: float = 0.1
    shape: Literal["constant", "cosine"] = "cosine"
    sizes: tuple[int, ...] = (1, 2)


class Config(JobConfig):
    free_keys: ClassVar[frozenset[str]] = frozenset({"train.shape"})
    train: Train
    parts: list[Train] = Field(default=[])


def problems(text: str, *overrides: str, config: type[JobConfig] | None = None) -> list[str]:
    def read() -> None:
        document = parse_document(text, "specs/x.yaml", overrides)
        validate_spec(document)
        validate_config(document, config or JobConfig)

    with pytest.raises(SpecError) as caught:
        read()
    return str(caught.value).split("\n")


def replaced(old: str, new: str) -> str:
    assert old in SPEC
    return SPEC.replace(old, new)


def test_a_good_spec_is_read_with_defaults_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(SPEC)
    spec = read_spec(path, ["logging.wandb=offline", "seed=8"])
    assert (spec.name, spec.project, spec.seed) == ("tiny", "general", 8)
    assert spec.topology == Topology(mesh=Mesh(data="auto", fsdp=1, tensor=1))
    assert (spec.checkpoint.every_steps, spec.checkpoint.keep_last) == (50, 3)
    assert spec.logging.wandb == "offline"
    assert spec.config == {"train": {"total_steps": 500, "rate": 0.001}}
    assert validate_config(load_document(path), Config).train.rate == 0.001


def test_a_spec_made_in_python_needs_no_topology_and_cannot_be_changed() -> None:
    spec = ExecutionSpec(name="tiny", job="a:B", directory="runs")
    assert spec.topology is None
    with pytest.raises(ValidationError):
        spec.seed = 1
    with pytest.raises(ValidationError, match="at most one"):
        Mesh(data="auto", tensor="auto")
    with pytest.raises(ValidationError, match="both null"):
        Checkpoint(every_steps=None)


def test_plain_scalars_mean_what_they_look_like() -> None:
    text = "{a: 1e-3, b: 1_000, c: on, d: 012, e: 1:30, f: 2024-01-01, g: ~, h: true, i: -1.5E+3, j: .5, on: '1'}"
    assert parse_document(text, "x").data == {
        "a": 0.001, "b": 1000, "c": "on", "d": "012", "e": "1:30", "f": "2024-01-01", "g": None, "h": True,
        "i": -1500.0, "j": 0.5, "on": "1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (replaced("seed: 7", "sed: 7"), "specs/x.yaml:4: sed: unknown key; did you mean seed?"),
        (replaced("fsdp: 1", "fsdq: 1"), "specs/x.yaml:6: topology.mesh.fsdq: unknown key; did you mean fsdp?"),
        (
            replaced("every_steps: 50", "zzz: 50"),
            "specs/x.yaml:8: checkpoint.zzz: unknown key; choose from "
            "every_steps, every_minutes, keep_last, keep_every_steps, init_from",
        ),
        (replaced("seed: 7", "seed: abc"), "specs/x.yaml:4: seed: got 'abc' (text), needs a whole number"),
        (replaced("seed: 7", "seed: '12'"), "specs/x.yaml:4: seed: got '12' (text), needs a whole number"),
        (replaced("seed: 7", "seed: true"), "specs/x.yaml:4: seed: got true, needs a whole number"),
        (replaced("seed: 7", "seed: 7.0"), "specs/x.yaml:4: seed: got 7.0, needs a whole number"),
        (replaced("seed: 7", "seed:"), "specs/x.yaml:4: seed: got null, needs a whole number"),
        (replaced("seed: 7", "seed: -1"), "specs/x.yaml:4: seed: got -1, needs a number of at least 0"),
        (
            replaced("seed: 7", "seed: 4294967296"),
            "specs/x.yaml:4: seed: got 4294967296, needs a number below 4294967296",
        ),
        (replaced("tiny", "5"), "specs/x.yaml:1: name: got 5, needs text"),
        (
            replaced("tiny", "a/b"),
            "specs/x.yaml:1: name: got 'a/b' (text), needs a file name of letters, digits, '.', '_' and '-'",
        ),
        (
            replaced(":PretrainGPT", ""),
            "specs/x.yaml:2: job: got 'experiments.gpt' (text), needs the form module.path:Class",
        ),
        (replaced("fsdp: 1", "fsdp: 0"), "specs/x.yaml:6: topology.mesh.fsdp: got 0, needs a number above 0 or auto"),
        (
            replaced("fsdp: 1", "fsdp: auto"),
            "specs/x.yaml:6: topology.mesh: axes data, fsdp are auto; at most one can be, give the others a size",
        ),
        (
            replaced("every_steps: 50", "every_steps: null"),
            "specs/x.yaml:7: checkpoint: every_steps and every_minutes are both null; "
            "a restorable job needs one of them",
        ),
        (replaced("mesh: {data: auto, fsdp: 1}", "mesh: 8"), "specs/x.yaml:6: topology.mesh: got 8, needs a mapping"),
        (replaced("directory: runs/tiny\n", ""), "specs/x.yaml:1: missing key directory"),
        (
            SPEC + "logging: {wandb: ofline}\n",
            "specs/x.yaml:13: logging.wandb: got 'ofline' (text), needs one of disabled, offline, online; "
            "did you mean offline?",
        ),
    ],
)  # fmt: skip
def test_a_problem_in_the_spec_is_one_line_with_its_place_and_the_way_out(text: str, line: str) -> None:
    assert problems(text) == [line]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            replaced("total_steps", "total_stepz"),
            "specs/x.yaml:11: config.train.total_stepz: unknown key; did you mean total_steps?",
        ),
        (replaced("    total_steps: 500\n", ""), "specs/x.yaml:10: config.train: missing key total_steps"),
        (replaced("train:", "trains:"), "specs/x.yaml:10: config.trains: unknown key; did you mean train?"),
        (replaced("1e-3", "fast"), "specs/x.yaml:12: config.train.rate: got 'fast' (text), needs a number"),
        (replaced("1e-3", "true"), "specs/x.yaml:12: config.train.rate: got true, needs a number"),
        (
            replaced("rate: 1e-3", "shape: cosin"),
            "specs/x.yaml:12: config.train.shape: got 'cosin' (text), needs one of constant, cosine; "
            "did you mean cosine?",
        ),
        (
            replaced("rate: 1e-3", "sizes: [1, x]"),
            "specs/x.yaml:12: config.train.sizes.1: got 'x' (text), needs a whole number",
        ),
        (
            SPEC + "  parts:\n  - {total_steps: 1, rte: 2}\n",
            "specs/x.yaml:14: config.parts.0.rte: unknown key; did you mean rate?",
        ),
    ],
)
def test_a_problem_in_the_config_reads_like_one_in_the_spec(text: str, line: str) -> None:
    assert line in problems(text, config=Config)


def test_a_whole_number_serves_as_a_number_and_a_list_as_a_tuple() -> None:
    document = parse_document(replaced("1e-3", "1\n    sizes: [3, 4]"), "x")
    assert validate_config(document, Config).train == Train(total_steps=500, rate=1.0, sizes=(3, 4))


def test_all_problems_of_one_pass_are_listed_by_line() -> None:
    text = replaced("seed: 7", "sed: 7").replace("every_steps: 50", "every_steps: x").replace("tiny", "[]", 1)
    assert problems(text, "topology.mesh.fsdp=-1") == [
        "--set topology.mesh.fsdp=-1: got -1, needs a number above 0 or auto",
        "specs/x.yaml:1: name: got a list, needs text",
        "specs/x.yaml:4: sed: unknown key; did you mean seed?",
        "specs/x.yaml:8: checkpoint.every_steps: got 'x' (text), needs a whole number",
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "config.train.total_stepz=5",
            "--set config.train.total_stepz=5: unknown key; did you mean config.train.total_steps?",
        ),
        (
            "config.train={total_steps: 1, rte: 2}",
            "--set config.train={total_steps: 1, rte: 2}: config.train.rte: "
            "unknown key; did you mean config.train.rate?",
        ),
        ("config.train={}", "--set config.train={}: missing key total_steps"),
        ("logging.every_stps=5", "--set logging.every_stps=5: unknown key; did you mean logging.every_steps?"),
        ("sed=5", "--set sed=5: unknown key; did you mean seed?"),
        ("seed=abc", "--set seed=abc: got 'abc' (text), needs a whole number"),
        ("seed=", "--set seed=: got null, needs a whole number"),
        ("seed.x=1", "--set seed.x=1: seed is 7, so it has no keys"),
        ("seed", "--set seed: needs the form dotted.key=value"),
        ("a..b=1", "--set a..b=1: needs the form dotted.key=value"),
        ("=1", "--set =1: needs the form dotted.key=value"),
        ("seed=a: b: c", "--set seed=a: b: c: unreadable YAML: mapping values are not allowed here"),
    ],
)  # fmt: skip
def test_a_bad_override_is_named_like_a_line_of_the_file(override: str, line: str) -> None:
    assert problems(SPEC, override, config=Config) == [line]


def test_all_malformed_overrides_are_listed() -> None:
    assert len(problems(SPEC, "seed", "name", "seed.x=1")) == 3


def test_an_override_creates_the_sections_that_the_file_leaves_out() -> None:
    document = parse_document(SPEC, "x", ["logging.every_steps=3", "topology.mesh.tensor=2", "topology.mesh.data=4"])
    spec = validate_spec(document)
    assert spec.logging.every_steps == 3
    assert spec.topology is not None
    assert spec.topology.mesh == Mesh(data=4, fsdp=1, tensor=2)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: 2\na: 3", "specs/x.yaml:3: a: duplicate key, first given at specs/x.yaml:1"),
        ("a:\n  b: 1\n  b: 2", "specs/x.yaml:3: a.b: duplicate key, first given at specs/x.yaml:2"),
        ("", "specs/x.yaml:1: got nothing, needs a mapping with name, job and directory"),
        ("- 1", "specs/x.yaml:1: got a list, needs a mapping with name, job and directory"),
        ("a: 1\nb: [", "specs/x.yaml:2: unreadable YAML: while parsing a flow node, expected the node content, "
         "but found '<stream end>'"),
        ("a: 1\nb: &x 2", "specs/x.yaml:2: unreadable YAML: anchors, aliases and tags are refused"),
        ("a: !!python/name:os.system 1", "specs/x.yaml:1: unreadable YAML: anchors, aliases and tags are refused"),
        ("a: 1\n---\nb: 1", "specs/x.yaml:2: unreadable YAML: expected a single document in the stream, "
         "but found another document"),
        ("a: 1\nb: \x00", "specs/x.yaml:2: unreadable YAML: special characters are not allowed"),
        ("[a]: 1", "specs/x.yaml:1: a key must be text, not a list or a mapping"),
        ("a: 1e999", "specs/x.yaml:1: a: 1e999 is too large a number"),
        ("a: " + "9" * 5000, "specs/x.yaml:1: a: 99999999999999999999 is too large a number"),
        ("[" * 5000, "specs/x.yaml:1: unreadable YAML: nested too deeply"),
    ],
)  # fmt: skip
def test_unreadable_yaml_is_one_line(text: str, line: str) -> None:
    assert problems(text) == [line]


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: x\njob: \xff\xfe")
    for path, reason in (
        (tmp_path / "absent.yaml", ": cannot read the spec: No such file or directory"),
        (tmp_path, ": cannot read the spec: Is a directory"),
        (binary, ":2: not UTF-8 text: byte 0xff"),
    ):
        with pytest.raises(SpecError) as caught:
            load_document(path)
        assert str(caught.value) == f"{path}{reason}"


def test_a_later_stage_blames_a_key_at_its_line() -> None:
    document = parse_document(SPEC, "specs/x.yaml", ["config.train.rate=2"])
    for key, line in (
        ("topology.mesh", "specs/x.yaml:6: topology.mesh: 3 > 2"),
        ("topology.mesh.tensor", "specs/x.yaml:6: topology.mesh.tensor: 3 > 2"),
        ("logging.wandb", "specs/x.yaml:1: logging.wandb: 3 > 2"),
        ("config.train.rate", "--set config.train.rate=2: 3 > 2"),
        ("", "specs/x.yaml:1: 3 > 2"),
    ):
        assert str(document.error(key, "3 > 2")) == line


def test_the_config_of_a_spec_made_in_python_is_checked_without_lines() -> None:
    spec = ExecutionSpec(name="x", job="a:B", directory="runs", config={"train": {"total_stepz": 1, "total_steps": 1}})
    with pytest.raises(SpecError) as caught:
        validate_config(document_of(spec), Config)
    assert str(caught.value) == "ExecutionSpec: config.train.total_stepz: unknown key; did you mean total_steps?"


MODULES = {
    "good": "class Base: pass\nclass Train(Base): pass\nclass Other: pass\nvalue = 3\n",
    "broken": "x = 1\nx / 0\n",
    "quits": "import sys\nsys.exit(3)\n",
    "garbled": "x = (\n",
    "needy": "import no_such_library\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's checkout, with a package of job modules in the current directory."""
    root = tmp_path / "checkout_jobs"
    root.mkdir()
    for name, text in {"__init__": "", **MODULES}.items():
        (root / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield root
    for name in [name for name in sys.modules if name.split(".")[0] == root.name]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("checkout_job.good:Train", "no module checkout_job; did you mean checkout_jobs?"),
        ("checkout_jobs.god:Train", "no module checkout_jobs.god; did you mean checkout_jobs.good?"),
        ("checkout_jobs.zzz:Train", "no module checkout_jobs.zzz"),
        ("checkout_jobs.good.x:Train", "no module checkout_jobs.good.x"),
        ("checkout_jobs.good:Trian", "module checkout_jobs.good has no Trian; did you mean Train?"),
        ("checkout_jobs.good:Other", "checkout_jobs.good:Other is not a subclass of Base"),
        ("checkout_jobs.good:value", "checkout_jobs.good:value is not a subclass of Base"),
        (
            "checkout_jobs.broken:Train",
            "importing checkout_jobs.broken raised ZeroDivisionError: division by zero (at {root}/broken.py:2)",
        ),
        ("checkout_jobs.quits:Train", "importing checkout_jobs.quits raised SystemExit: 3 (at {root}/quits.py:2)"),
        (
            "checkout_jobs.garbled:Train",
            "importing checkout_jobs.garbled raised SyntaxError: '(' was never closed (at {root}/garbled.py:1)",
        ),
        (
            "checkout_jobs.needy:Train",
            "importing checkout_jobs.needy raised ModuleNotFoundError: No module named 'no_such_library' "
            "(at {root}/needy.py:1)",
        ),
    ],
)
def test_a_job_that_does_not_load_is_one_line(package: Path, job: str, message: str) -> None:
    base = load_job_class(parse_document("job: checkout_jobs.good:Base", "x"), object)
    document = parse_document(f"name: x\njob: {job}", "specs/x.yaml")
    with pytest.raises(SpecError) as caught:
        load_job_class(document, base)
    assert str(caught.value) == f"specs/x.yaml:2: job: {message.format(root=package)}"


def test_a_job_in_the_current_directory_loads(package: Path) -> None:
    base = load_job_class(parse_document("job: checkout_jobs.good:Base", "x"), object)
    job_class = load_job_class(parse_document("job: checkout_jobs.good:Train", "x"), base)
    assert job_class.__name__ == "Train"
    assert issubclass(job_class, base)


def test_a_dumped_spec_reads_back_as_itself_in_declared_order() -> None:
    config = {"text": ["1e-3", "12", "on", "null", "a: b", "", "é\n"], "rate": 1e-05, "large": 1e22, "none": None}
    spec = ExecutionSpec(name="x", job="a:B", directory="gs://b/x", topology=Topology(), config=config)
    text = dump_spec(spec)
    assert validate_spec(parse_document(text, "x")) == spec
    assert list(yaml.safe_load(text)) == list(ExecutionSpec.model_fields)


def test_the_schema_describes_every_key_and_lets_other_jobs_have_other_configs() -> None:
    schema = json_schema(Config)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert list(schema["properties"]) == list(ExecutionSpec.model_fields)
    assert all("description" in part or "$ref" in part for part in schema["properties"].values())
    assert schema["required"] == ["name", "job", "directory"]
    form, anything = schema["properties"]["config"]["anyOf"]
    assert anything == {"type": "object"}
    assert set(schema["$defs"][form["$ref"].split("/")[-1]]["properties"]) == {"train", "parts"}
    assert json_schema()["properties"]["config"]["type"] == "object"


def test_only_what_moves_the_bits_is_part_of_the_trajectory() -> None:
    def digest(*overrides: str) -> str:
        document = parse_document(SPEC, "x", overrides)
        return hash_of(trajectory(validate_spec(document), validate_config(document, Config)))

    free = ("name=b", "directory=b", "project=b", "group=b", "topology.mesh.fsdp=4", "checkpoint.every_steps=5")
    for override in (*free, "logging.every_steps=1", "config.train.shape=constant", "config.train.rate=0.001"):
        assert digest(override) == digest()
    for override in ("seed=8", "job=a:B", "config.train.rate=0.002", "config.train.sizes=[1]"):
        assert digest(override) != digest()


def test_the_trajectory_is_flat_and_holds_defaults() -> None:
    document = parse_document(SPEC, "x")
    assert trajectory(validate_spec(document), validate_config(document, Config)) == {
        "job": "experiments.gpt:PretrainGPT",
        "seed": 7,
        "config.train.total_steps": 500,
        "config.train.rate": 0.001,
        "config.train.sizes": [1, 2],
        "config.parts": [],
    }


def test_reading_a_spec_imports_no_array_library() -> None:
    code = "import sys, runner.config; print({'jax', 'flax', 'numpy'} & set(sys.modules))"
    root = Path(spec_module.__file__).parent.parent
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True).stdout
    assert printed == "set()\n"
