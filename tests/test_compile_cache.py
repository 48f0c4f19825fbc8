"""Compiled programs stay on each host's own disk, whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import harness
from tests.harness import ROOT, Job

COMPILE = """
import os, resource, signal, sys
from runner.compile_cache import open_compile_cache
open_compile_cache()
import jax
from jax._src import lru_cache
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
if "die" in sys.argv:
    def half(path, content):
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    type(lru_cache.pathlib.Path("/")).write_bytes = half
if "full" in sys.argv:
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))
print(jax.jit(lambda x: x * 3 + 1)(jax.numpy.arange(5.0)))
"""
SHARDED = ("config.train.total_steps=22", "topology.mesh={data: 1, fsdp: auto, tensor: 1}")
MISS = "PERSISTENT COMPILATION CACHE MISS for 'jit_step'"


def compile_once(cache: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    variables = harness.environment(1, cache) | {"JAX_EXPLAIN_CACHE_MISSES": "1"}
    return subprocess.run(
        [sys.executable, "-c", COMPILE, *arguments],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def entries(cache: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (cache / "xla").iterdir()}


@pytest.mark.parametrize(("end", "code"), [("die", -9), ("full", 0)])
def test_half_an_entry_is_written_anew(end: str, code: int, tmp_path: Path) -> None:
    assert compile_once(tmp_path, end).returncode == code
    torn = {name: size for name, size in entries(tmp_path).items() if name.endswith("-cache")}
    assert torn
    assert compile_once(tmp_path).returncode == 0
    assert all(size > torn.get(name, 0) for name, size in entries(tmp_path).items())
    third = compile_once(tmp_path)
    assert third.returncode == 0
    assert "Error reading" not in third.stderr
    assert "PERSISTENT COMPILATION CACHE MISS" not in third.stderr


@pytest.mark.soak
def test_every_process_finds_its_programs_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(os.environ, "JAX_EXPLAIN_CACHE_MISSES", "1")
    for name, is_first in (("cold", True), ("warm", False)):
        job = Job("specs/gpt_nano.yaml", tmp_path / name, SHARDED, devices=2, cache=tmp_path / "cache")
        for attempt in job.start_processes(2):
            attempt.expect(0)
            assert (MISS in attempt.output) == is_first, attempt.output
