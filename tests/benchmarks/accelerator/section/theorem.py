"""The promise itself, on this device: killed or not the same bits, and the device's fingerprints are the host's."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.accelerator.process import CommandError, run_module
from tests.benchmarks.accelerator.result import Figure
from tests.benchmarks.accelerator.size import Setting, Theorem
from tests.benchmarks.restart import committed, kill, spawn

SPEC = "specs/gpt_nano.yaml"


def measure(setting: Setting) -> Iterator[Figure]:
    """A run and its killed twin, every checkpoint read back by the host, then `verify-resume`."""
    theorem, scratch = setting.sizes.theorem, Path(setting.scratch)
    options = _options(theorem)
    whole, killed = scratch / "whole", scratch / "killed"
    expected = _run(whole, options)
    at_step = _kill_once(killed, scratch, options)
    found = _run(killed, options)
    about = (
        f"kill -9 at step {at_step} of {theorem.total_steps}, then the same command: {found}, undisturbed {expected}"
    )
    yield Figure("killed and undisturbed end in the same bits", found == expected, "", about)
    yield _of_host(killed, found)
    yield _verify(theorem)


def _options(theorem: Theorem) -> list[str]:
    settings = {"config.train.total_steps": theorem.total_steps, "checkpoint.every_steps": theorem.every_steps}
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def _run(directory: Path, options: list[str]) -> str:
    """Run to the end; the fingerprint of the result."""
    run_module("runner", SPEC, "--set", f"directory={directory}", *options)
    return str(json.loads((directory / "result.json").read_text())["fingerprint"])


def _kill_once(directory: Path, scratch: Path, options: list[str]) -> int:
    """kill -9 right after the first commit; the step that was committed."""
    processes = spawn(SPEC, directory, Path(os.environ.get("RUNNER_CACHE", scratch / "cache")), 1, options)
    while not committed(directory):
        if processes[0].poll() is not None:
            raise CommandError(f"the run that is to be killed ended with {processes[0].returncode} by itself")
    kill(processes)
    if (directory / "result.json").exists():
        raise CommandError("the run was over before it could be killed")
    return committed(directory)[-1]


def _of_host(directory: Path, fingerprint: str) -> Figure:
    """Have a process without the device compute the fingerprint of every leaf of every checkpoint anew."""
    words = ("runner", "checkpoints", str(directory), "--verify", "--deep")
    code, output = run_module(*words, codes=(0, 1), changes={"JAX_PLATFORMS": "cpu"})
    last = output.strip().splitlines()[-1]
    about = f"every checkpoint read back on the host: {last.strip()}"
    return Figure("fingerprints of the device are the host's", code == 0 and fingerprint in last, "", about)


def _verify(theorem: Theorem) -> Figure:
    words = ("runner", "verify-resume", SPEC, "--steps", str(theorem.verify_steps), "--kills", str(theorem.kills))
    code, output = run_module(*words, codes=(0, 1))
    return Figure("verify-resume", code == 0, "", output.strip().splitlines()[-1])
