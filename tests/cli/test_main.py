"""The command line, the schema, and the exit code of every kind of error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from runner import errors
from runner.__main__ import _parse
from runner.errors import InvalidError
from runner.spec import ExecutionSpec

ROOT = Path(__file__).parents[2]


def run(*arguments):
    command = [sys.executable, "-m", "runner", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_a_command_line_is_parsed():
    parsed = _parse(["x.yaml", "--set", "a=1", "--set", "b.c=2"])
    assert (parsed.spec, parsed.set, parsed.coordinator) == ("x.yaml", ["a=1", "b.c=2"], None)
    place = ["--coordinator", "h:1", "--num-processes", "4", "--process-id", "3"]
    parsed = _parse(["x.yaml", *place])
    assert (parsed.coordinator, parsed.num_processes, parsed.process_id) == ("h:1", 4, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: SPEC"),
        (["x.yaml", "--sett", "a=1"], "unrecognized arguments"),
        (["x.yaml", "y.yaml"], "unrecognized arguments: y.yaml"),
        (["x.yaml", "--coordinator", "h:1"], "give all three or none"),
        (["x.yaml", "--process-id", "0"], "give all three or none"),
        (["x.yaml", "--coordinator", "h:1", "--num-processes", "2"], "give all three or none"),
        (["x.yaml", "--coordinator", "h:1", "--num-processes", "2", "--process-id", "2"], "2 is not in 0 .. 1"),
        (["x.yaml", "--coordinator", "h:1", "--num-processes", "2", "--process-id", "-1"], "-1 is not in 0 .. 1"),
        (["x.yaml", "--coordinator", "h:1", "--num-processes", "two", "--process-id", "0"], "invalid int value"),
    ],
)
def test_a_bad_command_line_is_invalid(arguments, message):
    with pytest.raises(InvalidError, match=message):
        _parse(arguments)


def test_a_bad_command_line_ends_with_2_and_the_usage():
    result = run("x.yaml", "--nonsense")
    assert result.returncode == 2
    assert "usage: python -m runner SPEC" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_spec_ends_with_2_and_one_line():
    result = run("specs/none.yaml")
    assert result.returncode == 2
    assert result.stderr.splitlines() == ["specs/none.yaml: cannot read the spec: No such file or directory"]


def test_a_trainer_without_topology_ends_with_2_and_one_line(tmp_path):
    text = (ROOT / "specs" / "gpt_nano.yaml").read_text().splitlines()
    start = text.index("topology:")
    path = tmp_path / "x.yaml"
    path.write_text("\n".join(text[:start] + text[start + 3 :]))
    result = run(str(path))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "topology" in result.stderr


def test_the_schema_is_the_json_schema_of_the_spec():
    result = run("schema")
    assert result.returncode == 0
    schema = json.loads(result.stdout)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(schema["properties"]) == set(ExecutionSpec.model_fields)
    assert schema["required"] == ["name", "job", "directory"]
    assert schema["additionalProperties"] is False
    assert "learning_rate" in json.dumps(schema["$defs"])
    assert issubclass(ExecutionSpec, BaseModel)


def test_every_error_has_the_exit_code_of_its_kind():
    kinds = {
        1: ["RunnerError", "FailedError", "DivergedError", "FencedError", "HookError", "MiscountError", "StateError"],
        2: ["InvalidError", "SpecError", "DataError", "ResumeError", "RemovedError", "NewerFormatError"],
        75: ["PreemptedError"],
        76: ["RetryableError", "PeerLostError", "StorageError"],
    }
    found = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    assert sorted(found) == sorted(name for names in kinds.values() for name in names)
    for code, names in kinds.items():
        assert {getattr(errors, name).exit_code for name in names} == {code}


def test_a_users_error_is_a_value_error_and_a_lost_peer_a_connection_error():
    assert issubclass(errors.InvalidError, ValueError)
    assert issubclass(errors.PeerLostError, ConnectionError)
    assert issubclass(errors.StorageError, OSError)


def test_a_bug_in_a_job_ends_with_1_and_its_traceback(tmp_path):
    (tmp_path / "broken.py").write_text(
        "from experiments.counter import Counter\n"
        "class Broken(Counter):\n    def run(self):\n        raise KeyError('here')\n"
    )
    (tmp_path / "x.yaml").write_text(
        f"name: x\njob: broken:Broken\ndirectory: {tmp_path}/run\nconfig: {{total_steps: 3}}\n"
    )
    command = [sys.executable, "-m", "runner", "x.yaml"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=None)
    assert result.returncode == 1
    assert "KeyError: 'here'" in result.stderr
