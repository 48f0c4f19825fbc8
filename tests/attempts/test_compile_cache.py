"""Compilation cache of each host, and on request of the run directory."""

import contextlib
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runner.attempts import compile_cache
from runner.attempts.compile_cache import CompileCache
from runner.errors import FencedError
from runner.process import find_free_port
from runner.storage import Store
from tests.support import job_process
from tests.support.cloud_job import CloudJob, assert_same_outcome, make_unique_name
from tests.support.job_process import (
    ROOT,
    SMALL_GPT_OPTIONS,
    WHOLE_RUN_DEADLINE_SECONDS,
    Attempt,
    Job,
    kill_all_when,
    make_uninterrupted_counter_run,
    make_uninterrupted_run,
)
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket
from tests.support.object_stores import start_backend

COMPILE = """
import os, resource, signal, stat, sys
from runner.attempts.compile_cache import CompileCache
CompileCache().open()
import jax
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
if "die" in sys.argv:
    from runner.storage import local
    # In the middle of a file, not when its directory is made.
    local.os.fsync = lambda file: stat.S_ISREG(os.fstat(file).st_mode) and os.kill(os.getpid(), signal.SIGKILL)
if "full" in sys.argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))
print(jax.jit(lambda x: x * 3 + 1)(jax.numpy.arange(5.0)))
"""
SHARED = "topology.compile_cache=directory"
NANO = (
    *SMALL_GPT_OPTIONS,
    "config.train.total_steps=40",
    "checkpoint.every_steps=4",
    "logging.every_steps=5",
    "config.eval.every_steps=20",
)
LONG = (
    *NANO,
    "config.train.total_steps=200",
    "checkpoint.every_steps=25",
    "topology.mesh={data: 1, fsdp: auto, tensor: 1}",
)
STEPS = ("jit_step", "jit_val_step")
COUNTER = ("checkpoint.every_steps=20", "config.total_steps=200", "config.step_seconds=0.05")
FAST = "config.step_seconds=0"
MISS = re.compile(r"PERSISTENT COMPILATION CACHE MISS for '\S+' with key '(\S+)-([0-9a-f]{64})'")
KEY = f"jit_step-{'0' * 64}"
OTHER_KEY = f"jit_step-{'1' * 64}"
NAME = f"run/compiled/0.{KEY}"


# Cache on the host's disk.


def compile_once(cache: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    variables = job_process.environment(1, cache) | {"JAX_EXPLAIN_CACHE_MISSES": "1"}
    return subprocess.run(
        [sys.executable, "-c", COMPILE, *arguments],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=600,
    )


def list_entries(cache: Path) -> set[str]:
    return {path.name for path in (cache / "compiled").iterdir() if not path.name.startswith(".")}


@pytest.mark.soak
@pytest.mark.parametrize(("end", "code"), [("die", -9), ("full", 0)])
def test_a_partial_entry_is_never_read(end: str, code: int, tmp_path: Path) -> None:
    first = compile_once(tmp_path, end)
    assert first.returncode == code
    assert not list_entries(tmp_path)
    assert (end == "full") == (not list((tmp_path / "compiled").iterdir())), "partial entries fill a full disk"
    assert compile_once(tmp_path).returncode == 0
    assert list_entries(tmp_path)
    third = compile_once(tmp_path)
    assert third.returncode == 0
    assert "Error reading" not in third.stderr
    assert MISS.search(first.stderr)
    assert not MISS.search(third.stderr)


# Shared cache in the run directory, for one process.


class Host:
    """A process of a job on its own machine."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch, shared: Store | None, process: int = 0):
        monkeypatch.setenv("RUNNER_CACHE", str(cache))
        self.process = process
        self.cache = CompileCache(shared)

    def publish(self, raise_if_fenced: Callable[[], None] = lambda: None) -> None:
        """Publish all used programs and wait."""
        self.cache.publish(raise_if_fenced, self.process)
        while self.process != 0 and self.cache._unpublished:
            time.sleep(0.01)
        self.cache.close(20)


@pytest.fixture
def make_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Host]:
    monkeypatch.setattr(compile_cache, "_HEAD_START_SECONDS", 0.0)
    numbers = iter(range(100))
    return lambda shared, process=0: Host(tmp_path / str(next(numbers)), monkeypatch, shared, process)


def test_a_program_is_shared_with_the_next_machine_and_then_cached_there(make_host) -> None:
    driver = MemoryDriver()
    first, second = make_host(make_memory_bucket(driver)), make_host(make_memory_bucket(driver))
    assert first.cache.get(KEY) is None
    first.cache.put(KEY, b"program")
    first.publish()
    assert list(driver.objects) == [NAME]
    assert second.cache.get(KEY) == b"program"
    driver.objects.clear()
    assert second.cache.get(KEY) == b"program"


def test_nothing_is_shared_without_opting_in(make_host) -> None:
    host = make_host(None)
    host.cache.put(KEY, b"program")
    host.publish()
    assert host.cache.get(KEY) == b"program"
    assert host.cache.get(OTHER_KEY) is None


DAMAGES = {
    "a flipped bit": lambda content: content[:-3] + bytes([content[-3] ^ 4]) + content[-2:],
    "a flipped bit of the digest": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "longer": lambda content: content + b"\0",
    "another's": lambda content: compile_cache._seal(OTHER_KEY, b"program"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_shared_entry_is_a_miss_and_is_replaced(damage, make_host, capsys) -> None:
    driver = MemoryDriver()
    first = make_host(make_memory_bucket(driver))
    first.cache.put(KEY, b"program")
    first.publish()
    driver.put(NAME, damage(driver.objects[NAME][0]), None)
    second, third = make_host(make_memory_bucket(driver), process=1), make_host(make_memory_bucket(driver))
    assert second.cache.get(KEY) is None
    assert f"0.{KEY} is damaged; the program is compiled again" in capsys.readouterr().err
    second.cache.put(KEY, b"new program")
    second.publish()
    assert list(driver.objects) == [NAME]
    assert third.cache.get(KEY) == b"new program"


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_entry_on_this_disk_is_a_miss_and_is_replaced(damage, make_host) -> None:
    host = make_host(None)
    host.cache.put(KEY, b"program")
    (path,) = host.cache._host.root.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert host.cache.get(KEY) is None
    host.cache.put(KEY, b"program")
    assert host.cache.get(KEY) == b"program"


def test_an_entry_is_published_once(make_host) -> None:
    driver = MemoryDriver()
    hosts = [make_host(make_memory_bucket(driver), process) for process in (0, 1, 0)]
    for number, host in enumerate(hosts):
        host.cache.put(KEY, f"program {number}".encode())
        host.publish()
    hosts[1].cache = CompileCache(make_memory_bucket(driver))
    hosts[1].cache.put(OTHER_KEY, b"of process 1 alone")
    hosts[1].publish()
    assert sorted(driver.objects) == [NAME, f"run/compiled/1.{OTHER_KEY}"]
    assert driver.objects[NAME][0].endswith(b"program 0")


def test_the_first_of_two_concurrent_publishers_wins(make_host) -> None:
    driver = MemoryDriver()
    sealed = compile_cache._seal(KEY, b"of the other attempt")

    def be_first(verb: str, key: str) -> None:
        if verb == "put":
            driver.before = lambda verb, key: None
            driver.put(NAME, sealed, None)

    driver.before = be_first
    host = make_host(make_memory_bucket(driver))
    host.cache.put(KEY, b"program")
    host.publish()
    assert driver.objects[NAME][0] == sealed


def test_a_fenced_attempt_publishes_nothing(make_host) -> None:
    def raise_if_fenced() -> None:
        raise FencedError("attempt 2 has taken over")

    driver = MemoryDriver()
    host = make_host(make_memory_bucket(driver))
    host.cache.put(KEY, b"program")
    host.publish(raise_if_fenced)
    assert not driver.objects


@pytest.fixture
def logged_warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(compile_cache, "warn", lines.append)
    return lines


def test_programs_are_published_after_an_outage_of_the_bucket(make_host, logged_warnings, monkeypatch) -> None:
    monkeypatch.setattr(compile_cache, "_PERIOD_SECONDS", 0.0)
    monkeypatch.setattr(compile_cache, "_RETRY_SECONDS", 0.0)
    driver, refused = MemoryDriver(), []

    def refuse(verb: str, key: str) -> None:
        if verb == "put" and len(refused) < 5:
            refused.append(key)
            raise OSError("down")

    driver.before = refuse
    host = make_host(make_memory_bucket(driver))
    host.cache.put(KEY, b"program")
    host.cache.publish(lambda: None, 0)
    deadline = time.monotonic() + job_process.DEADLINE_SECONDS
    while not driver.objects and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(driver.objects) == [NAME]
    assert logged_warnings == ["compiled programs cannot be published, will be tried again: down"]


@pytest.mark.parametrize("verb", ["list", "get"])
def test_an_unreadable_bucket_is_a_warning_and_a_compilation(verb, make_host, logged_warnings) -> None:
    driver = MemoryDriver()
    first, second = make_host(make_memory_bucket(driver)), make_host(make_memory_bucket(driver))
    for key in (KEY, OTHER_KEY):
        first.cache.put(key, b"program")
    first.publish()

    def refuse(asked: str, key: str) -> None:
        if asked == verb:
            raise OSError("down")

    driver.before = refuse
    assert [second.cache.get(key) for key in (KEY, OTHER_KEY)] == [None, None]
    assert logged_warnings == ["compiled programs cannot be read and are compiled again: down"]


def test_a_long_attempt_prunes_many_unused_entries(make_host, monkeypatch) -> None:
    monkeypatch.setattr(compile_cache, "_PRUNE_SECONDS", -1.0)
    monkeypatch.setattr(compile_cache, "_MOST_ENTRIES", 3)
    driver = MemoryDriver()
    keys = [f"jit_step-{number:064}" for number in range(4)]
    names = [f"run/compiled/0.{key}" for key in keys]
    for process, some in ((1, keys[:1]), (0, keys[1:3])):
        host = make_host(make_memory_bucket(driver), process)
        for key in some:
            host.cache.put(key, b"program")
        host.publish()
    host = make_host(make_memory_bucket(driver))
    assert host.cache.get(keys[1]) == b"program"
    host.publish()
    assert set(names[1:3]) < set(driver.objects), "deletes few entries"
    driver.put("run/compiled/.0.torn.tmp", b"", None)
    host = make_host(make_memory_bucket(driver))
    assert host.cache.get(keys[1]) == b"program"
    host.cache.put(keys[3], b"program")
    host.publish()
    assert sorted(driver.objects) == [names[1], names[3], f"run/compiled/1.{keys[0]}"]


def test_nothing_is_shared_if_the_environment_sets_a_cache_directory(make_host, logged_warnings, monkeypatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    driver = MemoryDriver()
    host = make_host(make_memory_bucket(driver))
    host.cache.put(KEY, b"program")
    host.publish()
    assert not driver.objects
    (line,) = logged_warnings
    assert "JAX_COMPILATION_CACHE_DIR is /elsewhere" in line
    assert "none is shared" in line


# Whole jobs; every attempt has its own empty cache, like a new machine.


@pytest.fixture
def explain_cache_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_EXPLAIN_CACHE_MISSES", "1")


@pytest.fixture
def keep_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep also programs with short compile times."""
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def find_misses(attempt: Attempt) -> dict[str, str]:
    """Return the names of the programs that an attempt compiled, by key."""
    return {f"{name}-{digest}": name for name, digest in MISS.findall(attempt.output)}


def find_recompilations(attempt: Attempt, there: list[str]) -> list[str]:
    """Return the programs an attempt compiled although their key, or another program of that name, was published."""
    keys = {name.partition(".")[2] for name in there}
    return [key for key, name in find_misses(attempt).items() if key in keys or name in (*STEPS, "jit_advance")]


def contain_all(names: list[str], wanted: list[str]) -> bool:
    return all(any(re.fullmatch(f"{name}-[0-9a-f]{{64}}", there) for there in names) for name in wanted)


def list_published(job: Job) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(job.directory / "compiled")
    return []


@pytest.mark.soak
@pytest.mark.usefixtures("explain_cache_misses", "keep_all_programs")
def test_a_killed_job_recompiles_nothing_on_a_new_machine(tmp_path: Path) -> None:
    first = Job("specs/gpt_nano.yaml", tmp_path / "run", (*NANO, SHARED), cache=tmp_path / "first machine")
    attempt = first.start()

    def has_published_all() -> bool:
        keys = {name.partition(".")[2] for name in list_published(first)}
        return (
            contain_all(list_published(first), ["0.jit_step", "0.jit_val_step"]) and find_misses(attempt).keys() <= keys
        )

    attempt.wait_until(lambda: first.newest() and has_published_all(), "a commit and the programs")
    attempt.kill()
    there = list_published(first)
    assert set(STEPS) <= set(find_misses(attempt).values())
    assert attempt.events("prepare")[0]["compiled"] >= 1
    second = replace(first, cache=tmp_path / "second machine").finish()
    assert not find_recompilations(second, there)
    (prepared,) = second.events("prepare")
    assert (prepared["compiled"], prepared["from_cache"] >= 1) == (0, True)
    whole = replace(first, directory=tmp_path / "whole")
    whole.finish()
    assert first.outcome() == whole.outcome()


@pytest.mark.soak
@pytest.mark.usefixtures("explain_cache_misses", "keep_all_programs")
def test_damaged_programs_are_compiled_again_and_replaced(tmp_path: Path) -> None:
    first = Job("specs/counter.yaml", tmp_path / "run", (*COUNTER, SHARED), cache=tmp_path / "first machine")
    attempt = first.start()
    attempt.wait_until(
        lambda: first.newest() and contain_all(list_published(first), ["0.jit_advance"]), "a commit and the program"
    )
    attempt.kill()
    damages = dict(zip(sorted(list_published(first)), itertools.cycle(DAMAGES.values()), strict=False))
    for name, damage in damages.items():
        path = first.directory / "compiled" / name
        path.write_bytes(damage(path.read_bytes()))
    second = replace(first.with_options(FAST), cache=tmp_path / "second machine").finish()
    asked = [name for name in damages if name.removeprefix("0.") in find_misses(second)]
    assert contain_all(asked, ["0.jit_advance", "0.jit__digest_shards"])
    for name in asked:
        assert f"{name} is damaged; the program is compiled again" in second.output
        content = (first.directory / "compiled" / name).read_bytes()
        assert compile_cache._unseal(name.removeprefix("0."), content), f"{name} was not replaced"
    assert first.outcome() == make_uninterrupted_counter_run(COUNTER).outcome()


@pytest.mark.soak
@pytest.mark.usefixtures("keep_all_programs")
def test_a_job_continues_if_no_program_can_be_read_or_published(tmp_path: Path) -> None:
    job = Job("specs/counter.yaml", tmp_path / "run", (*COUNTER, FAST, SHARED), cache=tmp_path / "machine")
    job.directory.mkdir()
    (job.directory / "compiled").write_text("in the way")
    attempt = job.finish()
    for word in ("read and are compiled again", "published, will be tried again"):
        assert attempt.output.count(f"compiled programs cannot be {word}") == 1, attempt.output
    assert job.outcome() == make_uninterrupted_counter_run(COUNTER).outcome()


@pytest.mark.soak
@pytest.mark.usefixtures("explain_cache_misses", "keep_all_programs")
def test_two_processes_recompile_nothing_on_new_machines_with_a_bucket(tmp_path: Path) -> None:
    with start_backend("s3") as backend:
        job = CloudJob(backend, make_unique_name("compiled"), "specs/counter.yaml", (*COUNTER, SHARED))
        place = ["--coordinator", "127.0.0.1:{}", "--num-processes", "2", "--process-id"]

        def start(job: CloudJob, name: str) -> list[Attempt]:
            words = [word.format(find_free_port()) for word in place]
            return [replace(job, cache=tmp_path / f"{name} {k}").start(*words, str(k)) for k in range(2)]

        def names() -> list[str]:
            return [name.removeprefix("compiled/") for name in job.files("compiled/")]

        wanted = ["0.jit_advance", "1.jit_advance"]
        first = start(job, "first")
        kill_all_when(first, lambda: job.newest() and contain_all(names(), wanted), "a commit and the programs")
        there = names()
        assert all(find_misses(attempt) for attempt in first)
        for attempt in start(job.with_options(FAST), "second"):
            attempt.expect(0)
            assert not find_recompilations(attempt, there)
        assert_same_outcome(job, make_uninterrupted_counter_run(COUNTER))


@pytest.mark.soak
@pytest.mark.usefixtures("explain_cache_misses")
def test_two_processes_with_sharded_matrices_recompile_nothing_on_new_machines(tmp_path: Path) -> None:
    job = Job("specs/gpt_nano.yaml", tmp_path / "run", (*LONG, SHARED), devices=2)
    place = ["--coordinator", "127.0.0.1:{}", "--num-processes", "2", "--process-id"]

    def start(name: str) -> list[Attempt]:
        words = [word.format(find_free_port()) for word in place]
        arguments = ["runner", *job.arguments, *words]
        return [Attempt(replace(job, cache=tmp_path / f"{name} {k}"), [*arguments, str(k)], 2) for k in range(2)]

    wanted = [f"{k}.{name}" for k in range(2) for name in STEPS]
    first = start("first")
    kill_all_when(first, lambda: job.newest() and contain_all(list_published(job), wanted), "a commit and the programs")
    there = list_published(job)
    for attempt in start("second"):
        attempt.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
        assert not find_recompilations(attempt, there)
    assert job.outcome() == make_uninterrupted_run("specs/gpt_nano.yaml", LONG, 2, 2).outcome()
