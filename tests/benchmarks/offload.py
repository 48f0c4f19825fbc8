"""Step time, device memory and bits of a GPT with `memory.offload_optimizer`, relative to without.

Each run is a separate process with one save in the middle, because a save reads the moments in host memory while the
next steps replace them. The script prints the compiler's figure for the memory of the step (arguments, temporaries and
outputs on the device) and the peak that the device reports, which includes the start of the run.

    python -m tests.benchmarks.offload [--layers 12] [--width 768] [--examples 32] [--length 1024] [--steps 24]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from experiments.gpt import PretrainGPT
from runner import ExecutionSpec
from runner.accelerator import add_deterministic_flags
from runner.checkpoint.leaves import is_on_host
from runner.parallel.mesh import read_peak_memory_bytes

VOCABULARY_SIZE = 50_304
SETTINGS = {"on the device": False, "offloaded": True}


def make_document(directory: Path, is_offloaded: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Return the spec of one run, with the flags that make separately compiled programs bit-identical."""
    return {
        "name": "offload",
        "job": "experiments.gpt:PretrainGPT",
        "directory": str(directory),
        "topology": {"accelerator": "any", "mesh": {"data": "auto"}, "deterministic": True},
        "checkpoint": {"every_steps": options.steps // 2, "keep_last": 1},
        "logging": {"every_steps": 1},
        "config": {
            "model": {
                "layers": options.layers,
                "heads": max(1, options.width // 64),
                "width": options.width,
                "vocabulary_size": VOCABULARY_SIZE,
            },
            "data": {"source": "python-stdlib", "tokenizer": "bytes", "sequence_length": options.length},
            "optimizer": {"learning_rate": 3.0e-4},
            "schedule": {"name": "constant"},
            "train": {"total_steps": options.steps, "global_batch_examples": options.examples},
            "memory": {"offload_optimizer": is_offloaded},
            "precision": {"params": "float32", "compute": "bfloat16"},
        },
    }


def run(directory: Path, is_offloaded: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Run the job and return its measurements.

    Must be called in a new process, because the device counts its peak from the start of the process.
    """
    add_deterministic_flags(os.environ)  # before JAX initialises its devices
    job = PretrainGPT(ExecutionSpec.model_validate(make_document(directory, is_offloaded, options)))
    job()
    rows, events = (
        [json.loads(line) for line in (directory / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "events.jsonl")
    )
    # The first steps and those during a save are slower.
    seconds = [row["perf/step_seconds_median"] for row in rows[3 : options.steps // 2 - 1]]
    memory = job.compiled.memory
    return {
        "device": jax.devices()[0].device_kind,
        "step seconds": statistics.median(seconds),
        "MiB of the step by its compiler": memory.needed / 2**20,
        "of them arguments, temporaries": [
            job.compiled.memory.arguments / 2**20,
            job.compiled.memory.temporaries / 2**20,
        ],
        "MiB at the peak": (read_peak_memory_bytes() or 0) / 2**20,
        "leaves in host memory": sum(map(is_on_host, jax.tree.leaves(job.state))),
        "seconds that saves blocked": [event["blocked_seconds"] for event in events if event["event"] == "save"],
        "commits": sum(event["event"] == "commit" for event in events),
        "loss": rows[-1]["train/loss"],
        "fingerprint": json.loads((directory / "result.json").read_text())["fingerprint"],
    }


def main() -> None:
    """Print the measurements of both runs, and whether they ended bit-identical."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"layers": 12, "width": 768, "examples": 32, "length": 1024, "steps": 24}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", choices=SETTINGS, help=argparse.SUPPRESS)  # used for the subprocess of each run
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if options.only is not None:
            print(json.dumps(run(Path(directory) / "run", SETTINGS[options.only], options)))
            return
    fingerprints = []
    for name in SETTINGS:
        began = time.perf_counter()
        command = [sys.executable, "-m", "tests.benchmarks.offload", *sys.argv[1:], "--only", name]
        done = subprocess.run(command, capture_output=True, text=True)
        measured = {"code": done.returncode, "seconds in all": time.perf_counter() - began}
        if done.returncode:
            measured["says"] = (done.stdout + done.stderr)[-3000:]
        else:
            measured |= json.loads(done.stdout.splitlines()[-1])
        fingerprints.append(measured.get("fingerprint"))
        print(f"{name}: {json.dumps(measured, indent=1)}", flush=True)
    print(f"the same bits: {fingerprints[0] is not None and fingerprints[0] == fingerprints[1]}")


if __name__ == "__main__":
    main()
