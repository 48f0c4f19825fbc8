"""Compiled programs stay on each host's own disk, whole."""

import os
import subprocess
import sys
from pathlib import Path

from tests import harness
from tests.harness import ROOT, Job

COMPILE = """
import os, signal, sys
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


def test_half_an_entry_is_written_anew(tmp_path: Path) -> None:
    assert compile_once(tmp_path, "die").returncode == -9
    (torn,) = [name for name in entries(tmp_path) if name.endswith("-cache")]
    half_bytes = entries(tmp_path)[torn]
    again = compile_once(tmp_path)
    assert again.returncode == 0
    assert "Error reading" not in again.stderr
    assert half_bytes < entries(tmp_path)[torn] <= 2 * half_bytes + 1
    assert all(name.endswith("-cache") for name in entries(tmp_path))


def test_every_process_finds_its_programs_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(os.environ, "JAX_EXPLAIN_CACHE_MISSES", "1")
    for name, is_first in (("cold", True), ("warm", False)):
        job = Job("specs/gpt_nano.yaml", tmp_path / name, SHARDED, devices=2, cache=tmp_path / "cache")
        for attempt in job.start_processes(2):
            attempt.expect(0)
            assert (MISS in attempt.output) == is_first, attempt.output
