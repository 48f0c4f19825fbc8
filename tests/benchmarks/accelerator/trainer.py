"""Worker that trains a job with the runner's own loop.

    python -m tests.benchmarks.accelerator.trainer SPEC [--set KEY=VALUE ...]

The loop includes everything that belongs to a run: data, rows of metrics and checks. The wait between two slices is not
timed.
"""

import argparse
import contextlib
import os

import jax

from runner import BaseTrainer
from runner.__main__ import restart_with_allocator_options
from runner.accelerator import add_deterministic_flags
from runner.checkpoint.fingerprint import compute_fingerprint
from runner.parallel.mesh import read_peak_memory_bytes
from runner.spec import load_document, load_job_class, validate_spec
from tests.benchmarks.accelerator.worker import Finished, Ready, SliceDone, WorkerConnection
from tests.benchmarks.slices import SlicedTrainer
from tests.support.attempt import start


class _LastSliceError(Exception):
    """Raised inside the loop to end it, when no further slice is requested."""


def make_job(spec: str, overrides: list[str]) -> SlicedTrainer:
    """Return the job of a spec, with a loop that runs in slices. Must be called before JAX initialises its devices."""
    document = load_document(spec, overrides)
    job_class: type[BaseTrainer] = load_job_class(document, BaseTrainer)
    sliced_class = type(job_class.__name__, (SlicedTrainer, job_class), {"__module__": job_class.__module__})
    job: SlicedTrainer = sliced_class(validate_spec(document), document)
    if job.topology.deterministic:
        add_deterministic_flags(os.environ)
    job.compile_cache.open()
    return job


def serve(job: SlicedTrainer, connection: WorkerConnection) -> None:
    """Run the slices that are requested, with a message before the first and after the last one."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(job.state.params))
    flops = job.flops_per_token(job.train_setup).per_token
    connection.send(Ready(parameters, job.compiled.memory.needed, flops))

    def finish_slice(seconds: float) -> int:
        connection.send(SliceDone(seconds))
        num_steps = connection.wait_for_slice()
        if num_steps is None:
            raise _LastSliceError
        return num_steps

    num_steps = connection.wait_for_slice()
    if num_steps is not None:
        job.start_slices(num_steps, finish_slice)
        with contextlib.suppress(_LastSliceError):
            job.run()
    connection.send(Finished(read_peak_memory_bytes(), compute_fingerprint(job.state)))


def main() -> None:
    restart_with_allocator_options()
    connection = WorkerConnection()
    parser = argparse.ArgumentParser()
    parser.add_argument("spec")
    parser.add_argument("--set", action="append", default=[])
    parsed = parser.parse_args()
    job = start(make_job(parsed.spec, parsed.set))
    serve(job, connection)
    job.checkpointer.wait_until_finished()


if __name__ == "__main__":
    main()
