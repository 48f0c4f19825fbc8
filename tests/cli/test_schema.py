"""`python -m runner schema`: what an editor is told of a spec, the keys of the spec's own job among it."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from runner.cli.app import run_command
from runner.errors import InvalidError
from runner.spec import ExecutionSpec, load_document
from tests.support.job_process import ROOT, environment, run_runner

SPECS = sorted((ROOT / "specs").glob("*.yaml"))
NANO = str(ROOT / "specs" / "gpt_nano.yaml")
COUNTER = str(ROOT / "specs" / "counter.yaml")


def schema_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run_command(["schema", *arguments]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def problems(schema: dict[str, Any], data: dict[str, Any]) -> list[str]:
    errors = jsonschema.Draft202012Validator(schema).iter_errors(data)
    return [".".join(map(str, error.absolute_path)) for error in errors]


def section(schema: dict[str, Any], *path: str) -> dict[str, Any]:
    """The keys that stand at `path`, as an editor finds them."""
    for key in path:
        part = schema["properties"][key] if "properties" in schema else {}
        (ref,) = [form["$ref"] for form in part.get("anyOf", [part])]
        schema = {"$defs": schema["$defs"], **schema["$defs"][ref.rpartition("/")[2]]}
    return dict(schema["properties"])


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_shipped_spec_fits_the_schema_of_its_job(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(schema_of(capsys, str(path)), load_document(path).data) == []
    assert problems(schema_of(capsys), load_document(path).data) == []


def test_with_a_spec_the_keys_of_its_own_model_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    schema = schema_of(capsys, NANO)
    assert set(schema["properties"]) == set(ExecutionSpec.model_fields)
    model = section(schema, "config", "model")
    assert {"layers", "heads", "width"} <= set(model)
    assert model["heads"]["description"].startswith("Attention heads; must divide width.")
    assert set(section(schema_of(capsys, COUNTER), "config")) == {"total_steps", "width", "step_seconds"}


def test_with_a_spec_an_unknown_key_in_config_is_a_problem_and_without_one_it_may_be_another_jobs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = load_document(NANO, ["config.model.widht=3"]).data
    assert problems(schema_of(capsys, NANO), data)[0].startswith("config")
    assert problems(schema_of(capsys), data) == []


def test_a_spec_that_only_names_its_job_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new.yaml"
    path.write_text("name: new\njob: experiments.gpt:PretrainGPT\ndirectory: runs/new\n")
    assert "layers" in section(schema_of(capsys, str(path)), "config", "model")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the spec"),
        ("name: [", "unreadable YAML"),
        ("name: new\ndirectory: runs/new\n", "missing key job"),
        ("name: new\njob: experiments.gtp:PretrainGPT\ndirectory: runs/new\n", "did you mean experiments.gpt?"),
    ],
    ids=["not there", "not YAML", "without a job", "of a job that is not there"],
)
def test_a_spec_that_cannot_be_loaded_is_one_line(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidError) as caught:
        run_command(["schema", str(path)])
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_command_ends_with_2_and_the_line() -> None:
    code, output = run_runner(environment(1), "schema", "specs/none.yaml")
    assert (code, output) == (2, "specs/none.yaml: cannot read the spec: No such file or directory\n")
    code, output = run_runner(environment(1), "schema", "specs/gpt_nano.yaml", "more")
    assert code == 2
    assert "unexpected extra argument(s) (more)" in output
