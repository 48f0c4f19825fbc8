"""`python -m runner schema`: JSON Schema of a spec for editors, including the config keys of its job."""

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


def print_schema(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run_command(["schema", *arguments]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def find_problems(schema: dict[str, Any], data: dict[str, Any]) -> list[str]:
    errors = jsonschema.Draft202012Validator(schema).iter_errors(data)
    return [".".join(map(str, error.absolute_path)) for error in errors]


def get_section(schema: dict[str, Any], *path: str) -> dict[str, Any]:
    """Return the keys at `path`, resolved like an editor does."""
    for key in path:
        part = schema["properties"][key] if "properties" in schema else {}
        (ref,) = [form["$ref"] for form in part.get("anyOf", [part])]
        schema = {"$defs": schema["$defs"], **schema["$defs"][ref.rpartition("/")[2]]}
    return dict(schema["properties"])


def test_every_shipped_spec_is_valid_under_the_schema_of_its_job(capsys: pytest.CaptureFixture[str]) -> None:
    documents = {path: load_document(path).data for path in SPECS}
    first_specs = {data["job"]: path for path, data in reversed(documents.items())}
    schemas = {job: print_schema(capsys, str(path)) for job, path in first_specs.items()}
    problems = {path: find_problems(schemas[data["job"]], data) for path, data in documents.items()}
    assert problems == {path: [] for path in SPECS}


def test_every_shipped_spec_is_valid_under_the_schema_of_all_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    schema = print_schema(capsys)
    assert {path: problems for path in SPECS if (problems := find_problems(schema, load_document(path).data))} == {}


def test_the_schema_of_a_spec_describes_the_keys_of_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    schema = print_schema(capsys, NANO)
    assert set(schema["properties"]) == set(ExecutionSpec.model_fields)
    model = get_section(schema, "config", "model")
    assert {"layers", "heads", "width"} <= set(model)
    assert model["heads"]["description"].startswith("Attention heads; must divide width.")
    assert set(get_section(print_schema(capsys, COUNTER), "config")) == {"total_steps", "width", "step_seconds"}


def test_unknown_config_keys_are_invalid_only_in_the_schema_of_a_spec(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = load_document(NANO, ["config.model.widht=3"]).data
    assert find_problems(print_schema(capsys, NANO), data)[0].startswith("config")
    assert find_problems(print_schema(capsys), data) == []


def test_a_spec_with_only_a_job_is_sufficient(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new.yaml"
    path.write_text("name: new\njob: experiments.gpt:PretrainGPT\ndirectory: runs/new\n")
    assert "layers" in get_section(print_schema(capsys, str(path)), "config", "model")


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
def test_a_spec_that_cannot_be_loaded_gives_one_line(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidError) as caught:
        run_command(["schema", str(path)])
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_command_exits_with_2_and_one_line() -> None:
    code, output = run_runner(environment(1), "schema", "specs/none.yaml")
    assert (code, output) == (2, "specs/none.yaml: cannot read the spec: No such file or directory\n")
    code, output = run_runner(environment(1), "schema", "specs/gpt_nano.yaml", "more")
    assert code == 2
    assert "unexpected extra argument(s) (more)" in output
