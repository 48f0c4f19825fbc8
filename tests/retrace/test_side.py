"""Runs compared with different code: directories of modules, and commits of a repository."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from runner.cli.app import run_command
from runner.errors import InvalidError
from runner.retrace.against import RunReplay
from runner.retrace.side import read_arrays, write_arrays
from runner.spec.document import dump_yaml
from runner.storage import JsonObject
from tests.retrace.test_against import LAYERS, PLANTED, SMALL, list_differences
from tests.support.job_process import hash_tree
from tests.support.tiny_jobs import environment, make_gpt_document, wait_for_output

ROOT = Path(__file__).parents[2]
JOB = "compared_job"
# Text of the module of the job by the name of its directory.
CODES = {
    "former": "from experiments.gpt import PretrainGPT as Job\n",
    "same": "from experiments import gpt\n\n\nclass Job(gpt.PretrainGPT):\n    pass\n",
    "planted": "from tests.retrace.test_against import PlantedGPT as Job\n",
    "broken": "raise ValueError('this code is broken')\n",
    "wider": """
import dataclasses

import flax.linen as nn

from experiments.gpt import GPT, PretrainGPT


class WiderGPT(GPT):
    @nn.compact
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) * self.param("added_scale", nn.initializers.ones, ())


class Job(PretrainGPT):
    def model(self):
        model = super().model()
        names = [field.name for field in dataclasses.fields(model) if field.name not in ("parent", "name")]
        return WiderGPT(**{name: getattr(model, name) for name in names})
""",
}


def start(directory: Path, *words: str, **variables: str) -> "subprocess.Popen[str]":
    """Start the runner in a directory, whose modules come first. Its standard error is a pipe of its own."""
    path = os.pathsep.join([str(directory), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, "-m", "runner", *words],
        env=environment(8, PYTHONPATH=path, **variables),
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a directory with one module for each code, and a run of the former one."""
    root = tmp_path_factory.mktemp("side")
    for name, text in CODES.items():
        (root / name).mkdir()
        (root / name / f"{JOB}.py").write_text(text)
    (root / "empty").mkdir()
    (root / "spec.yaml").write_text(dump_yaml(make_gpt_document(root / "run", **SMALL | {"job": f"{JOB}:Job"})))
    wait_for_output(start(root / "former", str(root / "spec.yaml")))
    return root


def compare(root: Path, where: Path, *words: str, **variables: str) -> tuple[int, JsonObject, str]:
    """Compare the run with itself in a process, and return its exit code, result and errors."""
    run = str(root / "run")
    before = hash_tree(root / "run")
    process = start(
        where, "replay", run, "--step", "5", "--against", run, "--json", "--trust", JOB, *words, **variables
    )
    output, problems = process.communicate(timeout=300)
    assert hash_tree(root / "run") == before
    assert output, problems
    return process.returncode, json.loads(output), problems


def is_planted(found: JsonObject) -> bool:
    array = list_differences(found)["activations without dropout"]
    return (array["layer"], array["name"], array["num_different"]) == (PLANTED, "blocks.attention_out", 1)


def test_a_layer_that_a_former_commit_computes_differently_is_named(root, tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in ("planted", "former"):
        (repository / f"{JOB}.py").write_text(CODES[name])
        for words in (
            ["init", "-q"],
            ["add", "."],
            ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"],
        ):
            subprocess.run(["git", *words], cwd=repository, check=True)
    before = hash_tree(repository)
    # Python itself would write compiled modules beside those of the repository.
    variables = {"TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    code, found, problems = compare(root, repository, "--against-commit", "HEAD~1", **variables)
    assert (code, found["verdict"], found["first_step"], found["from_steps"]) == (1, "different", 4, [3, 3]), problems
    assert is_planted(found)
    kinds = {each["kind"]: each for each in found["arrays"]}
    assert kinds["batch"]["different"] == kinds["parameters before the step"]["different"] == 0
    assert kinds["parameters before the step"]["compared"] > 7 * LAYERS
    assert "the second run has the code of commit " in found["notes"][0]
    assert hash_tree(repository) == before
    assert [*tmp_path.glob("runner-retrace-*")] == []


@pytest.mark.soak
def test_each_run_has_code_of_its_own(root):
    words = ["--code", "../former", "--against-code", "."]
    code, found, problems = compare(root, root / "planted", *words)
    assert (code, found["verdict"], found["first_step"], found["from_steps"]) == (1, "different", 4, [3, 3]), problems
    assert is_planted(found)
    assert found["notes"] == [f"the second run has the code of {root / 'planted'}"]


@pytest.mark.soak
def test_code_that_computes_the_same_is_told(root):
    code, found, problems = compare(root, root / "former", "--against-code", "../same")
    assert (code, found["verdict"], found["compared_to_step"]) == (0, "same bits", 5), problems


@pytest.mark.soak
def test_code_that_cannot_go_on_from_a_checkpoint_begins_at_the_beginning(root):
    code, found, problems = compare(root, root / "former", "--against-code", "../wider")
    assert (code, found["from_steps"]) == (1, [0, 0]), problems
    assert "cannot have this code at a checkpoint" in found["notes"][1]
    assert any("added_scale" in name for each in found["arrays"] for name in each["uncompared"])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("code", "problem"), [("empty", "imports no module of this code"), ("broken", "this code is broken")]
)
def test_code_that_is_not_used_or_fails_is_refused(code, problem, root):
    run = str(root / "run")
    words = ["replay", run, "--step", "5", "--against", run, "--trust", JOB, "--against-code", str(root / code)]
    process = start(root / "former", *words)
    assert problem in process.communicate(timeout=300)[1]
    assert process.returncode == 2


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_that_is_killed_leaves_nothing(number, root, tmp_path):
    run = str(root / "run")
    words = ["replay", run, "--step", "5", "--against", run, "--trust", JOB, "--against-code", str(root / "same")]
    process = start(root / "former", *words, TMPDIR=str(tmp_path))
    while not [*tmp_path.glob("runner-retrace-*/run/events.jsonl")]:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=60)  # which the other process ends too, because it has the same standard error
    assert process.returncode == (-number if number == signal.SIGKILL else 75)
    if number == signal.SIGKILL:
        assert [*tmp_path.glob("runner-retrace-*")]
        wait_for_output(start(root / "former", "replay", run, "--step", "5", "--trust", JOB, TMPDIR=str(tmp_path)))
    assert [*tmp_path.glob("runner-retrace-*")] == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--against-code", "."], "--against-code needs --against RUN2"),
        (["--against-commit", "HEAD"], "--against-commit needs --against RUN2"),
        (["--against", "{}", "--against-code", ".", "--against-commit", "HEAD"], "needs one of --against-code and"),
        (["--against", "{}", "--against-code", "{}/none"], "none: needs a directory"),
        (["--against", "{}", "--against-commit", "no-such-branch"], "no commit of the repository"),
        (["--against", "{}", "--against-commit=--help"], "no commit of the repository"),
    ],
)
def test_a_wrong_request_is_refused(words, problem, run_of):
    run = str(run_of("whole"))
    with pytest.raises(InvalidError) as caught:
        run_command(["replay", run, "--step", "5", *(word.format(run) for word in words)])
    assert problem in str(caught.value)


def test_arrays_come_back_from_their_file(tmp_path):
    arrays: dict[str, dict[Any, np.ndarray]] = {
        "batch": {("x", None): np.arange(6, dtype=np.int32).reshape(2, 3).T, ("mask", None): np.array(True)},
        "nothing": {},
        "activations": {
            ("blocks", layer): np.asarray(jnp.arange(4.0) + layer, dtype) for layer, dtype in enumerate(TYPES)
        }
        | {("empty", None): np.zeros((0, 3), np.float64)},
    }
    found = read_arrays(tmp_path / "arrays.bin", json.loads(json.dumps(write_arrays(tmp_path / "arrays.bin", arrays))))
    assert [*found] == [*arrays]
    for kind, group in arrays.items():
        assert [*found[kind]] == [*group]
        for place, values in group.items():
            assert (found[kind][place].dtype, found[kind][place].shape) == (values.dtype, values.shape)
            assert found[kind][place].tobytes() == values.tobytes()


TYPES = [jnp.bfloat16, jnp.float16, jnp.float32, np.float64, jnp.float8_e4m3fn, jnp.int4, np.uint8]


def test_a_replay_comes_back_from_json():
    replay = RunReplay(
        3, 8, {4: {"step": 4, "train/loss": 1.5}}, {"params": "w"}, {3: {"params": "a"}, 4: {"params": "b"}}
    )
    assert RunReplay.from_json(json.loads(json.dumps(replay.to_json()))) == replay
