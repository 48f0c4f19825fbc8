"""Restorable job runner for cluster pretraining.

A spec describes a job, a job is a class whose complete state is one pytree, and the runner makes sure that this pytree
survives preemptions, crashes and hangs.

Modules and packages, in layers: each imports only from those above it, and the same holds within each package.

errors        exceptions and the exit code of each
command_line  command lines declared as dataclasses, parsed by Typer; no jax
console       lines on the terminal and in logs
process       processes of one job on this machine, with simulated CPU devices on request
spec          frozen models, strict YAML with positions, overrides, validation; no jax
accelerator   catalogue of chips; no jax
jax_internals  parts of JAX that are not public, each with a check
nvidia        GPUs of NVIDIA on this host: their driver, who holds their memory, and what their errors mean
storage       one interface over local disks and the buckets of three clouds; JSON files and their keys
distributed   launch environment, rendezvous, agreement, preemption, health
attempts      one attempt in its run directory: layout, fence, event ledger, compile cache
checkpoint    save, commit, restore, retention, inspection
parallel      device mesh, gradient reduction, context parallelism
optim         optimizers, schedules and parameter groups
config        public config models of trainers; no jax
data          from files or buckets to the batch of a step
metrics       rows of metrics.jsonl and where they are written
history       read-only view of a run directory: attempts, goodput; no jax
huggingface   import and export of weights in Hugging Face's formats
recipe        Recipe: what a job says about its state, its steps and its identity
lifecycle     check, claim, restore or initialise, run, finish: the life of every job
job           RestoreableJob: a recipe with its lifecycle, and the methods that its `run` calls
train         train state, step, compilation, validation, report
evaluation    evaluators: generation, likelihood, multiple choice
hook          hooks: protocol, dispatch and built-in hooks
train_recipe  TrainRecipe: what a training job says about its model, loss, optimizer, data and evaluation
session       the training of one attempt: batches, rows, evaluations, hooks, contents of saves
trainer       BaseTrainer: a recipe with its session; `run` is the training loop
inference     sampling and evaluation of a run's weights, read-only
retrace       steps of a run looked at again, and computed again, beside it
dashboard     report page and live dashboard, read-only; no jax
plan          preflight for hardware that need not be present: check, compile, forecast, search
cli           commands of `python -m runner`
api           functions for notebooks and scripts
__main__      entry point of `python -m runner`
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.api import Run, load_spec, open_run, run
    from runner.checkpoint.inspect import open_checkpoint
    from runner.errors import PreemptedError, RunnerError
    from runner.job import RestoreableJob
    from runner.spec import ExecutionSpec, Topology
    from runner.trainer import BaseTrainer

_HOMES = {
    "BaseTrainer": "runner.trainer",
    "ExecutionSpec": "runner.spec",
    "PreemptedError": "runner.errors",
    "RestoreableJob": "runner.job",
    "Run": "runner.api",
    "RunnerError": "runner.errors",
    "Topology": "runner.spec",
    "load_spec": "runner.api",
    "open_checkpoint": "runner.checkpoint.inspect",
    "open_run": "runner.api",
    "run": "runner.api",
}

__all__ = [
    "BaseTrainer",
    "ExecutionSpec",
    "PreemptedError",
    "RestoreableJob",
    "Run",
    "RunnerError",
    "Topology",
    "__version__",
    "load_spec",
    "open_checkpoint",
    "open_run",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that validating a spec does not import jax."""
    if name == "__version__":
        # It imports much, which a file in the working directory may hide.
        from importlib.metadata import version  # noqa: PLC0415

        return version("runner")
    if name not in _HOMES:
        raise AttributeError(f"module 'runner' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
