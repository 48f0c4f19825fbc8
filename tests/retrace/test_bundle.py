"""Bundles: a run is made again from its archive and compared, and other data, code or archives are found out."""

import contextlib
import io
import json
import os
import random
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

import runner
from runner.cli.app import run_command
from runner.cli.arguments import ReproduceArguments
from runner.cli.retrace import print_reproduction
from runner.errors import InvalidError, PreemptedError
from runner.metrics.file import read_rows as read_rows_of_store
from runner.retrace import bundle
from runner.retrace.bundle import RECORD_KEYS, list_commits, read_bundle, reproduce
from runner.storage import BackgroundWriter, JsonlLog, LocalStore, open_store, read_log
from tests.retrace.runs import DAILY, RUNS, SAVES
from tests.retrace.test_replay import Scaled
from tests.support.job_process import hash_tree
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket
from tests.support.object_stores import route_stores_to, start_backend
from tests.support.tiny_jobs import get_job_name, make_gpt, make_gpt_document, read_rows, start_python, wait_for_output

TRUST = ["--trust", "tests"]
OTHER_FLAX = "0.12.7"


@pytest.fixture(scope="module")
def bundle_of(run_of):
    """Return a function from a kind of run to its archive, made once; the run is beside it."""

    def get(kind: str) -> Path:
        directory = run_of(kind)
        path = directory.with_name("run.zip")
        if not path.exists():
            before = hash_tree(directory)
            assert run_command(["bundle", str(directory), "-o", str(path), *TRUST]) == 0
            assert hash_tree(directory) == before
        return path

    return get


def change(path: Path, target: Path, rows: Any = None, **changes: Any) -> Path:
    """Write a bundle with other values of its record, or other rows."""
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    members["bundle.json"] = json.dumps(json.loads(members["bundle.json"]) | changes).encode()
    if rows is not None:
        members["metrics.jsonl"] = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    with zipfile.ZipFile(target, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return target


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind in DAILY else pytest.mark.soak) for kind in RUNS])
def test_a_run_of_every_kind_is_made_again(kind, bundle_of, tmp_path, capfd):
    path = bundle_of(kind)
    assert run_command(["reproduce", str(path), "-o", str(tmp_path / "again"), "--json", *TRUST]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    steps = [row["step"] for row in read_rows(path.with_name("run"))]
    assert (found["verdict"], found["last_same_step"], found["loss_deviation"]) == ("identical", steps[-1], 0.0)
    assert found["num_compared"] > 1
    # A second call has nothing left to do.
    assert run_command(["reproduce", str(path), "-o", str(tmp_path / "again"), *TRUST]) == 0
    assert f"IDENTICAL to step {steps[-1]}" in capfd.readouterr().out


def test_a_bundle_names_what_the_run_was(bundle_of):
    found = read_bundle(str(bundle_of("killed")))
    assert found.record["job"] == "experiments.gpt:PretrainGPT"
    assert found.commits.keys() == {3, 4, 6, 8}
    assert found.record["environment"]["versions"]["jax"]
    assert "config.data" in found.record["identity"]
    assert [row["step"] for row in found.rows] == list(range(1, 9))


def test_another_result_is_found_at_its_first_save(bundle_of, tmp_path, capfd):
    path = bundle_of("killed")
    commits = read_bundle(str(path)).record["commits"]
    other = change(path, tmp_path / "other.zip", commits=commits | {"6": "0" * 32})
    assert run_command(["reproduce", str(other), "-o", str(tmp_path / "again")]) == 1
    shown = capfd.readouterr().out
    assert "DIFFERENT: the fingerprint of step 6 is another one, identical to step 3" in shown


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_the_job_stops_at_the_first_save_that_differs(place, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "_BUCKET_POLL_SECONDS", 0.0)
    store = LocalStore(tmp_path) if place == "disk" else make_memory_bucket(MemoryDriver())
    stop = bundle._ComparingStop(store, {3: "a", 6: "b"})
    background = BackgroundWriter()
    log = JsonlLog(store, "events", "000001.0", background)
    for step, fingerprint in ((3, "a"), (4, "x")):
        assert not stop.poll()
        log.append({"event": "commit", "step": step, "fingerprint": fingerprint})
        background.flush()
    assert not stop.poll()
    log.append({"event": "commit", "step": 6, "fingerprint": "other"})
    background.flush()
    assert stop.poll()
    assert stop.poll()


@pytest.mark.soak
def test_a_job_in_a_bucket_stops_at_the_first_save_that_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "_BUCKET_POLL_SECONDS", 0.2)
    options = SAVES | {"config.train.total_steps": 800, "config.eval.every_steps": 800, "checkpoint.every_steps": 50}
    make_gpt(tmp_path / "run", **options)()
    assert run_command(["bundle", str(tmp_path / "run"), "-o", str(tmp_path / "run.zip")]) == 0
    commits = read_bundle(str(tmp_path / "run.zip")).record["commits"]
    other = change(tmp_path / "run.zip", tmp_path / "other.zip", commits=commits | {"100": "0" * 32})
    with start_backend("gs") as backend:
        route_stores_to(monkeypatch, backend)
        url = backend.url("again")
        found = reproduce(str(other), url, (), False, ())
        assert (found.first_other_step, found.last_same_step) == (100, 50)
        assert read_rows_of_store(open_store(url))[-1]["step"] < 800
        assert reproduce(str(tmp_path / "run.zip"), url, (), False, ()).verdict == "identical"


def test_a_bucket_that_does_not_answer_is_asked_again(monkeypatch):
    monkeypatch.setattr(bundle, "_BUCKET_POLL_SECONDS", 0.0)
    driver = MemoryDriver()
    store, background = make_memory_bucket(driver), BackgroundWriter()
    for step in (3, 6):
        log = JsonlLog(store, "events", f"00000{step}.0", background)
        log.append({"event": "commit", "step": step, "fingerprint": "other"})
    background.flush()
    stop = bundle._ComparingStop(store, {3: "a", 6: "other"})

    def fail(verb: str, key: str) -> None:
        if verb == "get" and "000006.0" in key:
            raise PermissionError(key)

    driver.before = fail
    assert not stop.poll()
    driver.before = lambda verb, key: None
    assert stop.poll()


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_each_event_is_read_once(place, tmp_path, monkeypatch):
    store = LocalStore(tmp_path) if place == "disk" else make_memory_bucket(MemoryDriver())
    seen: list[int] = []

    def record(events: Any, earlier: Any) -> dict[int, str]:
        found = [*events]
        seen.extend(event["step"] for event in found)
        return list_commits(found, earlier)

    monkeypatch.setattr(bundle, "list_commits", record)
    reader, background = bundle.CommitReader(store), BackgroundWriter()
    log = JsonlLog(store, "events", "000001.0", background)
    for step in range(5):
        log.append({"event": "commit", "step": step, "fingerprint": "a"})
        background.flush()
        assert {*reader.read()} == {*range(step + 1)}
    assert seen == [*range(5)]


def test_rows_that_a_run_does_not_have_are_found(bundle_of, tmp_path, capfd):
    rows = [row | {"train/loss": 0.001} for row in read_bundle(str(bundle_of("killed"))).rows]
    forged = change(bundle_of("killed"), tmp_path / "forged.zip", rows=[{"step": [1]}, {}, *rows])
    assert run_command(["reproduce", str(forged), "-o", str(tmp_path / "again")]) == 1
    shown = capfd.readouterr().out
    assert "DIFFERENT: 3 fingerprints are the same, but the rows of the bundle are others" in shown
    assert "first difference of a row: step 1, train/loss: the bundle has 0.001, this run 5.5" in shown


def test_the_run_itself_is_no_reproduction(bundle_of):
    path = bundle_of("killed")
    before = hash_tree(path.with_name("run"))
    with pytest.raises(InvalidError, match="holds the run of the bundle itself"):
        run_command(["reproduce", str(path), "-o", str(path.with_name("run"))])
    assert hash_tree(path.with_name("run")) == before


def test_the_differences_from_a_commit_can_be_applied(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *words], cwd=tmp_path, check=True)

    code = tmp_path / "own_code_of_a_bundle.py"
    code.write_text("class Own:\n    pass\n\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "x")
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tmp_path, text=True).strip()
    code.write_bytes(b"class Own:\n    pass\n\n# \xe9\n\n")
    git("commit", "-qam", "later")
    monkeypatch.setattr(bundle.inspect, "getfile", lambda _: str(code))
    assert bundle.read_diff(object, "HEAD; rm -rf x") == ""
    assert "# \ufffd" in bundle.read_diff(object, commit)
    code.write_text("class Own:\n    pass\n\n# plain\n\n")
    patch = bundle.read_diff(object, commit)
    git("checkout", "-q", commit, ".")
    (tmp_path / "x.diff").write_text(patch)
    git("apply", "--check", "x.diff")


def test_an_interrupted_reproduction_goes_on(bundle_of, tmp_path, monkeypatch):
    path = bundle_of("stages")

    class Stop(bundle._ComparingStop):
        num_polls = 0

        def poll(self) -> bool:
            Stop.num_polls += 1
            return super().poll() or Stop.num_polls >= 5

    with monkeypatch.context() as patch:
        patch.setattr(bundle, "_ComparingStop", Stop)
        with pytest.raises(PreemptedError):
            reproduce(str(path), str(tmp_path / "again"), (), False, ())
    found = reproduce(str(path), str(tmp_path / "again"), (), False, ())
    assert found.verdict == "identical"
    assert {event["attempt"] for event in read_log(LocalStore(tmp_path / "again"), "events")} == {1, 2}


def test_data_with_one_other_byte_are_refused_by_name(tmp_path):
    make_gpt(tmp_path / "run", **SAVES)()
    assert run_command(["bundle", str(tmp_path / "run"), "-o", str(tmp_path / "run.zip")]) == 0
    text = tmp_path / "text.txt"
    content = bytearray(text.read_bytes())
    content[9999] ^= 1
    text.write_bytes(content)
    with pytest.raises(InvalidError) as caught:
        run_command(["reproduce", str(tmp_path / "run.zip"), "-o", str(tmp_path / "again")])
    assert "config.data: the run had" in str(caught.value)
    assert f"the data are not those of the run: {text}" in str(caught.value)
    assert not (tmp_path / "again").exists()


def test_other_devices_are_named_and_differ_by_rounding(bundle_of, tmp_path):
    mesh = ("topology.mesh={data: 2, fsdp: 4}",)
    found = reproduce(str(bundle_of("killed")), str(tmp_path / "again"), mesh, False, ())
    assert (found.verdict, found.first_other_step) == ("within rounding", 3)
    assert 0 <= found.loss_deviation < 1e-5
    assert any(change.startswith("mesh") for change in found.changes)


def test_other_code_is_different(tmp_path, monkeypatch):
    make_gpt(tmp_path / "run", Scaled, **SAVES | {"job": get_job_name(Scaled)})()
    assert run_command(["bundle", str(tmp_path / "run"), "-o", str(tmp_path / "run.zip"), *TRUST]) == 0
    with pytest.raises(InvalidError, match="comes from module tests"):
        run_command(["reproduce", str(tmp_path / "run.zip"), "-o", str(tmp_path / "again")])
    monkeypatch.setattr(Scaled, "factor", 2.0)
    assert run_command(["reproduce", str(tmp_path / "run.zip"), "-o", str(tmp_path / "again"), *TRUST]) == 1


def with_versions(path: Path, output: Path, **versions: str) -> Path:
    environment = read_bundle(str(path)).record["environment"]
    return change(path, output, environment=environment | {"versions": bundle.collect_versions() | versions})


def test_the_versions_of_a_bundle_are_installed_beside_it(bundle_of, tmp_path, monkeypatch):
    """Once; the command then goes on there."""
    commands: list[list[str]] = []
    run_command_line = subprocess.run

    def run(command, **options):
        if command[0] == "git":
            return run_command_line(command, **options)
        commands.append(command)
        (tmp_path / "other.venv").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, len(commands) == 5, "no such version")

    class ReplacedError(Exception):
        """Another program has replaced the process."""

    def replace(path, words):
        raise ReplacedError(words)

    monkeypatch.setattr(bundle.subprocess, "run", run)
    monkeypatch.setattr(os, "execv", replace)
    same = with_versions(bundle_of("killed"), tmp_path / "same.zip", python="3.1.0", unknown="1")
    assert bundle.install_environment(str(same)) is None
    path = with_versions(bundle_of("killed"), tmp_path / "other.zip", jax="0.1.2", numpy="1; rm -rf ~")
    words = ["reproduce", str(path), "-o", "again", "--install", "--json"]
    monkeypatch.setattr("sys.argv", ["runner", *words])
    python = str(tmp_path / "other.venv/bin/python")
    for _ in range(2):
        with pytest.raises(ReplacedError) as caught:
            print_reproduction(ReproduceArguments(bundle=str(path), directory="again", is_installing=True))
        assert caught.value.args[0] == [python, "-m", "runner", "reproduce", str(path), "-o", "again", "--json"]
    assert [command[1:3] for command in commands] == [["-m", "venv"], ["-m", "pip"]]
    assert "jax==0.1.2" in commands[1]
    assert f"flax=={bundle.collect_versions()['flax']}" in commands[1]
    assert not any("rm" in word for word in commands[1])
    path = with_versions(bundle_of("killed"), tmp_path / "other.zip", jax="0.1.3")
    commands += [[]]
    with pytest.raises(InvalidError, match=r"cannot be installed:\nno such version"):
        bundle.install_environment(str(path))


def test_code_that_is_in_no_commit_is_named(tmp_path, monkeypatch, capfd):
    (tmp_path / "own_bundled_job.py").write_text(
        "from experiments.gpt import PretrainGPT as Job\n\n\nclass Own(Job):\n    x = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "spec.yaml").write_text(
        json.dumps(make_gpt_document(tmp_path / "run", **SAVES, job="own_bundled_job:Own"))
    )
    runner.run(str(tmp_path / "spec.yaml"))
    capfd.readouterr()
    words = ["bundle", str(tmp_path / "run"), "-o", str(tmp_path / "x.zip"), "--trust", "own_bundled_job"]
    assert run_command(words) == 0
    output = "".join(capfd.readouterr())
    assert f"{tmp_path}/own_bundled_job.py is in no commit, and not in the bundle" in output
    assert f"reproduce {tmp_path}/x.zip -o DIRECTORY --trust own_bundled_job" in output
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y"]
    for command in (["init", "-q"], ["add", "own_bundled_job.py"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    assert run_command(words) == 0
    assert "is in no commit" not in "".join(capfd.readouterr())


@pytest.mark.soak
def test_a_bundle_is_reproduced_with_other_versions(bundle_of, tmp_path):
    """Needs a package index: an earlier version of flax, with the same layers."""
    path = with_versions(bundle_of("killed"), tmp_path / "other.zip", flax=OTHER_FLAX)
    process = start_python("-m", "runner", "reproduce", str(path), "-o", str(tmp_path / "again"), "--install")
    output = wait_for_output(process)
    assert f"flax=={OTHER_FLAX}" in output
    assert "IDENTICAL to step 8" in output
    python = tmp_path / "other.venv/bin/python"
    code = "from importlib import metadata; print(metadata.version('flax'))"
    assert subprocess.check_output([python, "-c", code], text=True).strip() == OTHER_FLAX
    assert read_log(LocalStore(tmp_path / "again"), "events")


def test_versions_that_differ_are_named_with_a_command():
    environment = {"versions": bundle.collect_versions() | {"jax": "0.1.2", "python": "3.1.0"}}
    lines = bundle.list_changes(environment)
    assert any(line.endswith("not 0.1.2 (pip install jax==0.1.2)") for line in lines)
    assert any(line.endswith("not 3.1.0") for line in lines)
    assert len(lines) == 2
    # What is no version, or of no package that is known, may be a command.
    hostile = {"jax": "1; rm -rf ~", "flax": "1\nIDENTICAL", "jax; rm -rf ~ #": "1", "optax": [1], "evil": "1"}
    for versions in (hostile, "x", None, [1]):
        assert bundle.list_changes({"versions": versions}) == []


def test_steps_of_any_form_are_no_error():
    commits = {"9" * 5000: "x", "-3": "x", "007": "x", "x": "y", "4": 5, "6": "z", "": "x"}
    found = bundle.Bundle({"commits": commits}, "", []).commits
    assert {step: each for step, each in found.items() if step < 10**15} == {6: "z"}


def test_saves_that_a_run_has_discarded_are_left_out():
    def event(name, step, fingerprint=None):
        return {"event": name, "step": step, "fingerprint": fingerprint}

    events = [event("commit", 3, "a"), event("commit", 5, "b"), event("restore", 3), event("commit", 4, "c")]
    assert list_commits(iter(events)) == {3: "a", 4: "c"}
    assert list_commits(iter([*events, event("load", 3), event("commit", 6, "d")])) == {3: "a", 6: "d"}
    fast = {"event": "commit", "step": 9, "tier": "fast"}
    assert list_commits(iter([*events, fast, {"event": "commit"}])) == {3: "a", 4: "c"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no such file"),
        (b"", "is no bundle of a run"),
        (b"PK\x03\x04" + b"\0" * 99, "is no bundle of a run"),
        (b"\0" * 99, "is no bundle of a run"),
        ({}, "is no bundle of a run: .*bundle.json"),
        ({"bundle.json": "{"}, "is no bundle of a run"),
        ({"bundle.json": "[]"}, "is no bundle of a run: not a JSON object"),
        ({"bundle.json": '{"format": 2}'}, "its format is 2, this runner reads 1"),
        ({"bundle.json": '{"format": 1}'}, "the key name is missing"),
    ],
)
def test_what_is_no_bundle_is_refused(content, problem, tmp_path):
    path = tmp_path / "x.zip"
    if isinstance(content, dict):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            for name, text in content.items():
                file.writestr(name, text)
        content = buffer.getvalue()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidError, match=problem):
        run_command(["reproduce", str(path), "-o", str(tmp_path / "again")])
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("key", ["commits", "identity", "environment", "hardware", "name", "job"])
@pytest.mark.parametrize("value", [None, 7, [], "x", {"a": "b"}])
def test_a_bundle_with_any_wrong_value_ends_with_one_line(key, value, bundle_of, tmp_path):
    path = change(bundle_of("killed"), tmp_path / "x.zip", **{key: value})
    kind = next(each.type for each in RECORD_KEYS if each.name == key)
    if isinstance(value, kind):
        assert read_bundle(str(path)).commits.keys() <= {3, 4, 6, 8}
    else:
        with pytest.raises(InvalidError, match=f"is no bundle of a run: .*{key}"):
            read_bundle(str(path))


def test_a_spec_in_a_bundle_may_not_be_a_path_out_of_it(bundle_of, tmp_path):
    """Members are read by their names, and nothing is extracted."""
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("../evil", "x")
    with pytest.raises(InvalidError, match="is no bundle"):
        read_bundle(str(path))
    assert not (tmp_path.parent / "evil").exists()


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_bundle_with_damaged_bytes_is_read_or_refused(compression, bundle_of, tmp_path):
    with zipfile.ZipFile(bundle_of("killed")) as file:
        members = {name: file.read(name) for name in file.namelist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    chance = random.Random(compression)
    for _ in range(60):
        damaged = bytearray(buffer.getvalue())
        for _ in range(8):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        (tmp_path / "x.zip").write_bytes(damaged)
        with contextlib.suppress(InvalidError):
            assert read_bundle(str(tmp_path / "x.zip")).commits is not None
