"""From the directory of a run to its job, which is never run, and to the weights of one of its steps.

The job is made of `spec.yaml`, as it was resolved when the run began: whoever looks needs no spec of his own, and one
that has been edited since tells nothing of the run.
"""

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from runner.accelerator import add_deterministic_flags
from runner.checkpoint.manifest import CHECKPOINTS, read_committed
from runner.checkpoint.weights import find_checkpoint, open_checkpoint, read_document
from runner.errors import InvalidError, ResumeError
from runner.job import RestoreableJob
from runner.records import PARAMS
from runner.spec import load_job_class, validate_spec
from runner.storage import Store, open_store, parse_number
from runner.train.evaluators import cast_like
from runner.trainer import BaseTrainer

NEWEST, BEST = "newest", "best"


@dataclass(frozen=True)
class ReadOnlyRun:
    """A run that is looked at: its directory or URL, and its job, of which nothing is set up."""

    directory: str
    store: Store
    job: BaseTrainer

    def prepare_process(self) -> None:
        """Make programs be those of the run, and leave it the memory of its GPU. Before JAX is started."""
        if self.job.topology.deterministic:
            add_deterministic_flags(os.environ)
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        self.job.compile_cache.open()

    def list_steps(self) -> list[int]:
        """All committed steps, ascending. Raises `InvalidError` if there is none yet."""
        found = list(read_committed(self.store))
        if not found:
            raise InvalidError(f"{self.store.url}: no checkpoint is committed yet; run the job, or wait for its first")
        return found

    def get_checkpoint(self, step: int) -> str:
        """The checkpoint of a step, to be given to `weights`."""
        return f"{self.store.url}/{CHECKPOINTS}/{step}"

    def has_checkpoint(self, checkpoint: str) -> bool:
        """Whether the run has not deleted a checkpoint that was there."""
        return parse_step(checkpoint) in read_committed(self.store)

    def find_checkpoint(self, step: str) -> str:
        """The checkpoint that `newest`, `best` or a step's number names, to be given to `weights`. On one host.

        Raises `InvalidError`, naming the steps that are there.
        """
        steps = self.list_steps()
        if step not in (NEWEST, BEST) and parse_number(step) not in steps:
            known = ", ".join(map(str, steps))
            raise InvalidError(f"{self.store.url}: got step {step}, has {known}; needs one of them, {NEWEST} or {BEST}")
        return find_checkpoint(self.directory, step)[0] if step in (NEWEST, BEST) else self.get_checkpoint(int(step))

    def load_weights(self, checkpoint: str, abstract: Any, weights: str = PARAMS) -> Any:
        """The weights of a checkpoint as `abstract` describes them: shape, dtype, sharding. Called on every host.

        `weights` are those that `open_checkpoint` takes; averages come in the types of the parameters. Raises
        `InvalidError` if the checkpoint is not good, is of another model, or has no such weights.
        """
        try:
            if weights == PARAMS:
                return open_checkpoint(checkpoint, like=abstract)[0]
            like = abstract | {PARAMS: jax.tree.map(_in_float32, abstract[PARAMS])}
            found = open_checkpoint(checkpoint, like=like, weights=weights)[0]
            return found | {PARAMS: cast_like(found[PARAMS], abstract[PARAMS])}
        except ResumeError as error:
            one_line = "; ".join(line.strip() for line in str(error).splitlines())
            raise InvalidError(f"{self.store.url}: {one_line}") from error


def _in_float32(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)


def parse_step(checkpoint: str) -> int:
    """The step of a checkpoint that `find` has found."""
    return int(checkpoint.rpartition("/")[2])


def open_run(directory: str) -> ReadOnlyRun:
    """The run in a directory or at a URL. Reads `spec.yaml`, claims nothing.

    Raises `InvalidError` if no run has begun there, or if its job is no trainer.
    """
    store = open_store(directory)
    document = read_document(store)
    spec = validate_spec(document)
    job_class = load_job_class(document, RestoreableJob)
    if not issubclass(job_class, BaseTrainer):
        raise InvalidError(f"{store.url}: its job {spec.job} trains no model of tokens; needs a run of a BaseTrainer")
    config = {name: own for name, own in spec.config.items() if name != "adapter"}  # weights are opened merged
    alone = dataclasses.replace(document, data={**document.data, "config": config})
    spec = spec.model_copy(update={"directory": directory, "config": config})
    return ReadOnlyRun(directory, store, job_class(spec, alone))
