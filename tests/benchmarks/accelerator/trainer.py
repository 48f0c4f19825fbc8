"""The runner's own loop as a player: `python -m tests.benchmarks.accelerator.trainer SPEC [--set KEY=VALUE ...]`.

It steps as a run does, with its data, rows and checks; what it waits for between two turns is not timed.
"""

import argparse
import contextlib
import os

import jax

from runner import BaseTrainer
from runner.__main__ import restart_with_huge_pages
from runner.accelerator import add_deterministic_flags
from runner.checkpoint.fingerprint import compute_fingerprint
from runner.parallel.mesh import read_peak_memory_bytes
from runner.spec import load_document, load_job_class, validate_spec
from tests.benchmarks.accelerator.turn import Ending, Ready, Seat, Turn
from tests.benchmarks.slices import Slices
from tests.support.attempt import start


class OverError(Exception):
    """No turn comes any more."""


def make_job(spec: str, overrides: list[str]) -> Slices:
    """The job that the spec describes, one that takes turns. Before JAX is started."""
    document = load_document(spec, overrides)
    job_class: type[BaseTrainer] = load_job_class(document, BaseTrainer)
    sliced = type(job_class.__name__, (Slices, job_class), {"__module__": job_class.__module__})
    job: Slices = sliced(validate_spec(document), document)
    if job.topology.deterministic:
        add_deterministic_flags(os.environ)
    job.compile_cache.open()
    return job


def play(job: Slices, seat: Seat) -> None:
    """Tell that all is compiled, run by turns, and tell how it ended."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(job.state.params))
    flops = job.flops_per_token(job.train_setup).per_token
    seat.tell(Ready(parameters, job.compiled.memory.needed, flops))
    num_steps = seat.ask()
    if num_steps is not None:
        job.take_turns(num_steps, lambda seconds: _next_turn(seat, seconds))
        with contextlib.suppress(OverError):
            job.run()
    seat.tell(Ending(read_peak_memory_bytes(), compute_fingerprint(job.state)))


def _next_turn(seat: Seat, seconds: float) -> int:
    seat.tell(Turn(seconds))
    num_steps = seat.ask()
    if num_steps is None:
        raise OverError
    return num_steps


def main() -> None:
    restart_with_huge_pages()
    seat = Seat()
    parser = argparse.ArgumentParser()
    parser.add_argument("spec")
    parser.add_argument("--set", action="append", default=[])
    parsed = parser.parse_args()
    job = start(make_job(parsed.spec, parsed.set))
    play(job, seat)
    job.checkpointer.wait_until_finished()


if __name__ == "__main__":
    main()
