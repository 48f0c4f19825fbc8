"""runner: a spec describes a job, a job is a class whose whole state is one pytree, and that pytree survives anything.

The map, in layers; each imports only from those above it, and the same holds inside each folder.

errors       what callers catch, and the exit code of each
terminal     lines for a person
process      the processes of one job on this machine, on faked devices where asked for
huge_pages   memory in larger pages, asked for as the command starts
periodic     is it time?
record       the keys of the files that a run leaves
spec         frozen models, strict YAML, overrides, errors with file and line; no jax
recipe       optimizers and schedules by name: their keys, defaults and sources; no jax
config       the config of trainers; no jax
accelerator  the chips known by name, and what engines call them; no jax
storage      one interface over a disk and the buckets of three clouds
hosts        many processes as one: who is where, agreement, preemption, no wait without an end
attempt      one start of a job in its directory: the fence, the ledger, compiled programs
checkpoint   save, commit, restore, retain, look at, copy
data         tokens; a batch is a pure function of (seed, step)
train        mesh, state, step, loss, optimizer, compilation, metrics
weights      weights in the form that others read, in and out
judge        what judges weights beside their loss: their texts, their answers to questions
job          RestoreableJob: restore or init, run, save on notice, exit clean
hook         what looks at a run's rows and weights, and may save, evaluate or stop it
trainer      BaseTrainer: composes the above; `run` is the training loop
inference    a run's weights at work, for whoever only looks: text from them, and their loss on data
history      what a run's directory tells whoever only looks: how it went, where the time went; no jax
hub          an export on the Hugging Face Hub: its model card, its upload
page         runs in pictures: a page in one file, a server that can only be read; no jax
plan         what a job would do on hardware that is not here: check, compile, size, search
command      one module a command of `python -m runner`
__main__     the command: parse, resolve the job class, map errors to exit codes
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.checkpoint.weights import open_checkpoint
    from runner.job import RestoreableJob
    from runner.spec import ExecutionSpec, Topology
    from runner.trainer import BaseTrainer

_HOMES = {
    "ExecutionSpec": "runner.spec",
    "Topology": "runner.spec",
    "RestoreableJob": "runner.job",
    "BaseTrainer": "runner.trainer",
    "open_checkpoint": "runner.checkpoint.weights",
}

__all__ = ["BaseTrainer", "ExecutionSpec", "RestoreableJob", "Topology", "open_checkpoint"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that checking a spec does not wait for jax."""
    if name not in _HOMES:
        raise AttributeError(f"module 'runner' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
