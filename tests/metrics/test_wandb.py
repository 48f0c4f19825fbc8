"""W&B: one run over all attempts, offline and online; its failures do not affect training."""

import json
import sys
import time

import pytest
import yaml

from runner.attempts.layout import read_owner
from runner.metrics.wandb import upload_offline_runs
from runner.storage import LocalStore, parse_lines, read_json
from tests.support import wandb_file
from tests.support.memory_bucket import make_memory_bucket
from tests.support.tiny_jobs import make_gpt, make_gpt_document, start_python, wait_for_output
from tests.support.wandb_server import start_wandb

NO_KEY = {"WANDB_API_KEY": "", "NETRC": "/nonexistent"}
DEAD_SERVER = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
SMALL = {}

STOPPED_AT_4 = """
import os, sys
from runner.errors import PreemptedError
from tests.support.tiny_jobs import StopAfter, make_gpt
from pathlib import Path
job = make_gpt(Path(sys.argv[1]), **{"logging.wandb": "offline"})
try:
    job(stop=StopAfter(job, 4))
except PreemptedError:
    os._exit(0)
"""

# A program that trains, and hangs at the given step; 0 never hangs.
ONLINE = """
import sys, time
from pathlib import Path
from tests.support.tiny_jobs import StopAfter, make_gpt
changes = {"logging.wandb": "online", "logging.wandb_tags": ["one", "two"], "checkpoint.every_steps": 2}
job, step = make_gpt(Path(sys.argv[1]), **changes), int(sys.argv[2])

class Hang(StopAfter):
    def poll(self):
        if step and super().poll():
            time.sleep(3600)
        return False

job(stop=Hang(job, step))
"""


# The runner, which waits long for W&B at its end.
PATIENT = """
import sys
from runner.cli.app import main
from runner.metrics import writers
writers.CLOSE_SECONDS = 300.0
sys.exit(main(sys.argv[1:]))
"""


# A job in a process in which another run of W&B is active, of the user's own.
BESIDE = """
import json, sys, wandb
from pathlib import Path
from runner.metrics import writers
from tests.support.tiny_jobs import make_gpt
writers.CLOSE_SECONDS = 300.0
settings = wandb.Settings(silent=True, console="off")
own = wandb.init(project="own", id="own", dir=str(Path(sys.argv[1]).parent), settings=settings)
own.log({"mine": 1}, step=1)
make_gpt(Path(sys.argv[1]), **json.loads(sys.argv[2]))()
assert wandb.run is own
own.log({"mine": 2}, step=2)
own.finish()
"""


def run_spec(directory, mode):
    path = directory.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(make_gpt_document(directory, **{"logging.wandb": mode}, **SMALL)))
    return "-m", "runner", str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the outputs of an offline job with two attempts, and of an online job with a dead server."""
    base = tmp_path_factory.mktemp("wandb")
    make_gpt(base / "plain", **SMALL)()
    dead = start_python(*run_spec(base / "dead", "online"), **DEAD_SERVER)
    outputs = {"first": wait_for_output(start_python("-c", STOPPED_AT_4, str(base / "offline"), **NO_KEY))}
    outputs["second"] = wait_for_output(start_python(*run_spec(base / "offline", "offline"), **NO_KEY))
    outputs["dead"] = wait_for_output(dead)
    return base, outputs


@pytest.mark.soak
def test_an_offline_run_holds_the_rows_of_killed_attempts(runs):
    base, outputs = runs
    (path,) = (base / "offline").rglob("*run-*.wandb")
    assert wandb_file.read_history(path) == parse_lines((base / "offline/metrics.jsonl").read_bytes())
    assert "is switched off" not in outputs["first"] + outputs["second"]


def test_offline_files_of_a_bucket_run_are_uploaded(tmp_path):
    store, folder = make_memory_bucket(), tmp_path / "wandb" / "wandb"
    for earlier in ("offline-run-0-x", "offline-run-0-y"):
        store.write(f"wandb/wandb/{earlier}/run.wandb", b"of an attempt on another machine")
    for name in ("offline-run-1-x/run-x.wandb", "offline-run-1-x/files/requirements.txt", "run-2-x/run-x.wandb"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    for _ in range(2):
        upload_offline_runs(tmp_path, store, 10.0)
    names = [f"wandb/offline-run-1-x/{name}" for name in ("files/requirements.txt", "run-x.wandb")]
    assert sorted(store.list_sizes("wandb")) == ["wandb/offline-run-0-y/run.wandb", *names]
    assert store.read(f"wandb/{names[1]}") == b"offline-run-1-x/run-x.wandb"


@pytest.mark.soak
@pytest.mark.parametrize("name", ["offline", "dead"])
def test_wandb_changes_neither_weights_nor_rows(runs, name):
    base, outputs = runs
    assert read_json(LocalStore(base / name), "result.json") == read_json(LocalStore(base / "plain"), "result.json")
    steps = [row["step"] for row in parse_lines((base / name / "metrics.jsonl").read_bytes())]
    assert steps == list(range(1, 9))
    assert "Traceback" not in outputs.get(name, "")


@pytest.mark.soak
def test_the_online_server_holds_only_the_surviving_trajectory(tmp_path):
    """The client delays each row until the next one, so the server has five of six."""
    directory = tmp_path / "run"
    with start_wandb() as server:
        online = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40}
        with start_python("-c", ONLINE, str(directory), "6", **online) as first:
            while not (server.runs and len(server.history(server.runs[0])) == 5):
                assert first.poll() is None, first.communicate()[0]
                time.sleep(0.05)
            first.kill()
        (run,) = server.runs
        lost = server.history(run)
        wait_for_output(start_python("-c", ONLINE, str(directory), "0", **online))
        assert server.runs == [run]
        rows = parse_lines((directory / "metrics.jsonl").read_bytes())
        assert server.history(run) == rows
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["perf/attempt"] for row in lost] == [1, 1, 1, 1, 1]
    num_kept = [row["perf/attempt"] for row in rows].index(2)
    assert 0 < num_kept < 5, "the server has rows that were computed again"
    begun = server.upserts[0]
    config = {key: held["value"] for key, held in json.loads(begun["config"]).items()}
    assert (begun["displayName"], begun["tags"], config["seed"]) == ("tiny", ["one", "two"], 0)
    assert "jax" in config["environment"]["versions"]


@pytest.mark.soak
@pytest.mark.parametrize("status", [None, 200, 400])
def test_a_fork_is_a_fork_on_a_server_that_offers_it_and_else_costs_a_line(tmp_path, status):
    """Status 200 is a refusal too: an error in the response of GraphQL."""
    make_gpt(tmp_path / "parent", **SMALL, **{"checkpoint.every_steps": 3})()
    parent = read_owner(LocalStore(tmp_path / "parent"))
    path = tmp_path / "fork.yaml"
    changes = {"logging.wandb": "online", "checkpoint.fork_from": {"run": str(tmp_path / "parent"), "step": 3}}
    path.write_text(yaml.safe_dump(make_gpt_document(tmp_path / "fork", **changes, **SMALL)))
    with start_wandb() as server:
        server.fork_status = status
        online = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40}
        output = wait_for_output(start_python("-c", PATIENT, str(path), **online))
        (run,) = server.runs
        configs = [json.loads(upsert["config"]) for upsert in server.upserts if upsert.get("config")]
        assert server.history(run) == parse_lines((tmp_path / "fork/metrics.jsonl").read_bytes())
    assert read_json(LocalStore(tmp_path / "fork"), "result.json") == read_json(
        LocalStore(tmp_path / "parent"), "result.json"
    )
    begun = {"run_id": parent.id, "step": 3}
    assert configs[0]["_wandb"]["value"].get("branch_point") == (begun if status is None else None)
    assert configs[0]["lineage"]["value"]["id"] == parent.id
    lines = [line for line in output.splitlines() if "fork of" in line]
    assert len(lines) == (status is not None)
    assert status is None or "forks are not offered here" in lines[0]
    assert "Traceback" not in output


@pytest.mark.soak
@pytest.mark.parametrize("status", [None, 400])
def test_another_run_in_the_process_gets_no_row_and_is_not_ended(tmp_path, status):
    changes = {"logging.wandb": "online", **SMALL}
    if status is not None:
        make_gpt(tmp_path / "parent", **SMALL, **{"checkpoint.every_steps": 3})()
        changes["checkpoint.fork_from"] = {"run": str(tmp_path / "parent"), "step": 3}
    with start_wandb() as server:
        server.fork_status = status
        online = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40}
        output = wait_for_output(start_python("-c", BESIDE, str(tmp_path / "run"), json.dumps(changes), **online))
        own, run = server.runs
        assert server.history(own) == [{"step": 1, "mine": 1}, {"step": 2, "mine": 2}]
        assert server.history(run) == parse_lines((tmp_path / "run/metrics.jsonl").read_bytes())
    assert "Traceback" not in output


@pytest.mark.soak
def test_an_offline_fork_is_a_run_of_its_own(tmp_path):
    make_gpt(tmp_path / "parent", **SMALL, **{"checkpoint.every_steps": 3})()
    path = tmp_path / "fork.yaml"
    changes = {"logging.wandb": "offline", "checkpoint.fork_from": {"run": str(tmp_path / "parent"), "step": 3}}
    path.write_text(yaml.safe_dump(make_gpt_document(tmp_path / "fork", **changes, **SMALL)))
    wait_for_output(start_python("-m", "runner", str(path), **NO_KEY))
    (written,) = (tmp_path / "fork").rglob("*run-*.wandb")
    assert wandb_file.read_history(written) == parse_lines((tmp_path / "fork/metrics.jsonl").read_bytes())
    config = wandb_file.read_config(written)
    assert "branch_point" not in config["_wandb"]
    assert config["lineage"]["step"] == 3


def test_wandb_is_not_imported_if_disabled(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "runner.metrics.wandb", raising=False)
    make_gpt(tmp_path / "run", **SMALL)()
    assert not (tmp_path / "run" / "wandb").exists()
    assert "runner.metrics.wandb" not in sys.modules
