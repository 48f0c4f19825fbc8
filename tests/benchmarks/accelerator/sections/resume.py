"""Section `theorems`: the guarantees of a resumed run, checked on this device.

A run that is killed and resumed ends bit-identical to an uninterrupted one, and the fingerprints that the device
computes equal those that the host computes.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.accelerator.config import ResumeSizes, SectionConfig
from tests.benchmarks.accelerator.result import Figure
from tests.benchmarks.accelerator.worker import CommandError, run_module
from tests.benchmarks.restart import kill, list_committed_steps, spawn

SPEC = "specs/gpt_nano.yaml"


def measure(config: SectionConfig) -> Iterator[Figure]:
    """Compare an uninterrupted and a killed run, verify the checkpoints on the host, and run `verify-resume`."""
    sizes, scratch = config.sizes.resume, Path(config.scratch)
    settings = {"config.train.total_steps": sizes.total_steps, "checkpoint.every_steps": sizes.every_steps}
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    whole, killed = scratch / "whole", scratch / "killed"
    expected = _run_to_end(whole, options)
    step = _kill_once(killed, scratch, options)
    found = _run_to_end(killed, options)
    note = f"kill -9 at step {step} of {sizes.total_steps}, then the same command: {found}, undisturbed {expected}"
    yield Figure("killed and undisturbed end in the same bits", found == expected, "", note)
    yield _verify_on_host(killed, found)
    yield _verify_resume(sizes)


def _run_to_end(directory: Path, options: list[str]) -> str:
    """Run the job until it ends; return the fingerprint of its result."""
    run_module("runner", SPEC, "--set", f"directory={directory}", *options)
    return str(json.loads((directory / "result.json").read_text())["fingerprint"])


def _kill_once(directory: Path, scratch: Path, options: list[str]) -> int:
    """Start the job and kill it (kill -9) right after its first commit; return the newest committed step.

    Raises:
        CommandError: the job ended before it could be killed.
    """
    processes = spawn(SPEC, directory, Path(os.environ.get("RUNNER_CACHE", scratch / "cache")), 1, options)
    while not list_committed_steps(directory):
        if processes[0].poll() is not None:
            raise CommandError(f"the run to be killed ended by itself with {processes[0].returncode}")
    kill(processes)
    if (directory / "result.json").exists():
        raise CommandError("the run ended before it could be killed")
    return list_committed_steps(directory)[-1]


def _verify_on_host(directory: Path, fingerprint: str) -> Figure:
    """Recompute the fingerprint of every leaf of every checkpoint, in a process without the device."""
    words = ("runner", "checkpoints", str(directory), "--verify", "--deep")
    code, output = run_module(*words, codes=(0, 1), changes={"JAX_PLATFORMS": "cpu"})
    last = output.strip().splitlines()[-1]
    note = f"every checkpoint read back on the host: {last.strip()}"
    return Figure("fingerprints of the device are the host's", code == 0 and fingerprint in last, "", note)


def _verify_resume(sizes: ResumeSizes) -> Figure:
    words = ("runner", "verify-resume", SPEC, "--steps", str(sizes.verify_steps), "--kills", str(sizes.kills))
    code, output = run_module(*words, codes=(0, 1))
    return Figure("verify-resume", code == 0, "", output.strip().splitlines()[-1])
