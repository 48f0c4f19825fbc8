"""Environments of starts are recorded, and changes are reported."""

import contextlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.attempts import environment
from runner.checkpoint.manifest import seal
from runner.errors import InvalidError
from runner.storage import LocalStore, read_log
from tests.support.tiny_jobs import make_counter, stop_after

BEFORE = {
    "versions": {"jax": "0.10.2", "python": "3.11.2"},
    "commit": "a" * 40,
    "dirty": False,
    "hosts": ["a", "b"],
    "cpus": 2,
    "options": {"XLA_FLAGS": "--a --b"},
}


def run_git(directory: Path, *words: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    result = subprocess.run(
        ["git", "-C", str(directory), *identity, *words], check=True, capture_output=True, text=True
    )
    return result.stdout.strip()


def make_job_class(path: Path) -> type:
    """Return a class that is defined in the file at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("class Job:\n    pass\n")
    spec = importlib.util.spec_from_file_location(f"job_{abs(hash(path))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Job


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    run_git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("installed\n")
    (tmp_path / "file").write_text("as it was committed")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def test_versions_are_the_installed_ones() -> None:
    found = environment.collect_versions()
    assert {"python", "jax", "jaxlib"} <= set(found) <= {"python", "jax", "jaxlib", "runner", "libtpu", "flax", "optax"}
    assert all(isinstance(version, str) and version for version in found.values())


SAME = {"python": "3.12.1", "jax": "0.11.2", "runner": "0.9.0"}


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        ([SAME], ""),
        ([SAME, dict(reversed(SAME.items())), SAME], ""),
        ([SAME, SAME, SAME | {"jax": "0.11.1"}], "process 2 on h2 has jax 0.11.1, process 0 on h0 has 0.11.2"),
        ([SAME, SAME | {"python": "3.12.2"}], "process 1 on h1 has python 3.12.2, process 0 on h0 has 3.12.1"),
        ([SAME, SAME | {"libtpu": "0.0.9"}], "process 1 on h1 has libtpu 0.0.9, process 0 on h0 has none"),
        ([SAME, {"python": "3.12.1", "jax": "0.11.2"}], "process 1 on h1 has runner none, process 0 on h0 has 0.9.0"),
    ],
)
def test_processes_with_other_versions_are_refused(versions: list[dict[str, str]], problem: str) -> None:
    places = [(f"h{process}", each) for process, each in enumerate(versions)]
    with pytest.raises(InvalidError, match=re.escape(problem)) if problem else contextlib.nullcontext():
        environment.validate_versions(places)


def test_the_commit_is_that_of_the_jobs_checkout(checkout: Path) -> None:
    job_class = make_job_class(checkout / "inner" / "job.py")
    commit = run_git(checkout, "rev-parse", "HEAD")
    assert environment.find_commit(job_class) == {"commit": commit, "dirty": False}
    (checkout / "file").write_text("changed")
    assert environment.find_commit(job_class) == {"commit": commit, "dirty": True}


def test_a_package_installed_below_a_checkout_has_no_commit(checkout: Path) -> None:
    assert environment.find_commit(make_job_class(checkout / "installed" / "job.py")) == {}


def remove_repository(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(directory.parent))


def remove_git(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(directory))


def slow_down_git(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "git").write_text("#!/bin/sh\nexec sleep 1000\n")
    (directory / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.setattr(environment, "_GIT_SECONDS", 0.1)


@pytest.mark.parametrize("lack", [remove_repository, remove_git, slow_down_git])
def test_a_failing_git_gives_no_commit_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: Any) -> None:
    job_class = make_job_class(tmp_path / "job.py")
    lack(tmp_path, monkeypatch)
    assert environment.find_commit(job_class) == {}


def test_a_class_without_a_file_has_no_commit() -> None:
    assert environment.find_commit(int) == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"versions": {"jax": "0.10.3", "python": "3.11.2"}}, ["jax 0.10.2 -> 0.10.3"]),
        ({"versions": {"jax": "0.10.2", "libtpu": "0.1"}}, []),
        ({"commit": "b" * 40}, ["commit aaaaaaaaaaaa -> bbbbbbbbbbbb"]),
        ({"dirty": True}, ["uncommitted changes now"]),
        ({"cpus": 1}, ["cpus 2 -> 1"]),
        ({"options": {"XLA_FLAGS": "--b --a"}}, []),
        ({"options": {"XLA_FLAGS": "--a --c"}}, ["XLA_FLAGS --b -> --c"]),
        ({"options": {}}, ["XLA_FLAGS --a --b -> none"]),
        (
            {"options": {"XLA_FLAGS": "--a --b", "JAX_ENABLE_X64": "1"}},
            ["JAX_ENABLE_X64 none -> 1"],
        ),
        ({"hosts": ["b", "a"]}, []),
        ({"hosts": ["a", "c"]}, ["hosts a, b -> a, c"]),
        ({"hosts": [f"n{number}" for number in range(1000)]}, ["hosts a, b -> (1000 of them)"]),
    ],
)
def test_a_change_is_described_in_a_few_words(change: dict[str, Any], words: list[str]) -> None:
    assert environment.compare_environments(BEFORE, BEFORE | change) == words
    assert bool(environment.compare_environments(BEFORE | change, BEFORE)) == bool(words)


def test_options_are_recorded_without_flags_that_change_no_bit() -> None:
    flags = "--xla_force_host_platform_device_count=4 --xla_dump_to=/tmp/x"
    harmless = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": "/x", "JAX_TRANSFER_GUARD": "log", "JAX": "1"}
    assert environment.collect_options({"XLA_FLAGS": flags} | harmless) == {}
    offset = {"JAX_RANDOM_SEED_OFFSET": "7", "JAX_OPTIMIZATION_LEVEL": "O0"}
    assert environment.collect_options(offset) == dict(sorted(offset.items()))
    found = environment.collect_options(
        {"XLA_FLAGS": f"{flags} --xla_cpu_enable_fast_math=true", "JAX_ENABLE_X64": "1"}
    )
    assert found == {"JAX_ENABLE_X64": "1", "XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}


def test_a_missing_key_is_no_change() -> None:
    for key in BEFORE:
        some = {other: value for other, value in BEFORE.items() if other != key}
        assert environment.compare_environments(some, BEFORE) == []
        assert environment.compare_environments(BEFORE, some) == []


def test_the_environment_is_recorded_and_a_resume_reports_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop_at(step: int) -> None:
        job = make_counter(tmp_path / "run")
        stop_after(job, step)

    def list_events(name: str) -> list[dict[str, Any]]:
        return [event for event in read_log(LocalStore(tmp_path / "run"), "events") if event["event"] == name]

    stop_at(3)
    manifest = json.loads((tmp_path / "run/checkpoints/3/manifest.json").read_text())
    (start,) = list_events("start")
    assert start["versions"] == manifest["environment"]["versions"] == environment.collect_versions()
    assert start["cpus"] == manifest["environment"]["cpus"] == environment.count_xla_threads()
    assert start["hosts"] == manifest["environment"]["hosts"] == [socket.gethostname()]
    stop_at(6)
    assert list_events("changed") == []
    assert "changed since" not in capsys.readouterr().out
    monkeypatch.setattr(environment, "collect_versions", lambda: {"jax": "99"})
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    stop_at(9)
    (changed,) = list_events("changed")
    assert changed["step"] == 6
    assert len(changed["changes"]) == 2
    assert changed["changes"][0].endswith("-> 99")
    assert changed["changes"][1] == "NVIDIA_TF32_OVERRIDE none -> 0"
    assert f"changed since step 6 was saved: {'; '.join(changed['changes'])}\n" in capsys.readouterr().out
    path = tmp_path / "run/checkpoints/9/manifest.json"
    earlier = {
        key: value for key, value in json.loads(path.read_text()).items() if key not in ("environment", "digest")
    }
    path.write_bytes(seal(earlier))
    stop_at(12)
    assert len(list_events("changed")) == 1, "manifests of earlier versions have none"
