"""runner: a spec describes a job, a job is a class whose whole state is one pytree, and that pytree survives anything.

The map, in layers; a module imports only from those above it.

errors         what callers catch, and the exit code of each
terminal       lines for a person
spec           frozen models, strict YAML, overrides, errors with file and line; no jax
config         the config of trainers; no jax
accelerators   the chips known by name, and what engines call them; no jax
cadence        is it time?
notice         SIGTERM on any host becomes one agreed moment on all
metadata       the notice that a cloud machine gives of its own end
cluster        which of several processes this is, from what the engine has set
rendezvous     how the processes find each other, and who is missing
hosts          start-up, main host, agreement, loss of a peer
progress       what the training thread is at
straggler      which hosts come late to a step
watchdog       who is gone, who stands still; no wait without an end
storage        one interface over a disk and the buckets of three clouds
compile_cache  compiled programs, on this host's disk and in the run's directory
ledger         events.jsonl, attempts, the single-writer fence
topology       spec -> mesh, logical axis rules, batch arithmetic
data           tokens; a batch is a pure function of (seed, step)
metrics        rows of the surviving trajectory, and where they are shown
fingerprint    topology-free digest of a pytree, computed on device
manifest       what makes a directory a checkpoint, and what its files must look like
checkpoint     save, commit, restore, retain; the fast tier
job            RestoreableJob: restore or init, run, save on notice, exit clean
audit          list, verify and copy checkpoints from outside
state          the train state and its eval_shape-based sharded init
optimizer      optimizers and schedules by name
loss           token cross entropy
flops          what a train step computes, by formula and counted in a traced program
tracking       Weights & Biases, which never stops a run
step           pure train_step and val_step with accumulation
hlo            what a compiled step communicates, and its largest arrays, from its text
compilation    the compiled steps, and the micro-batch that fits a device
trainer        BaseTrainer: composes the above
plan           what a job would do on hardware that is not here: check, compile, size, search
verify         prove resume on this machine: kill the job again and again, compare bits
__main__       the command: parse, resolve the job class, map errors to exit codes
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.job import RestoreableJob
    from runner.spec import ExecutionSpec, Topology
    from runner.trainer import BaseTrainer

_HOMES = {
    "ExecutionSpec": "runner.spec",
    "Topology": "runner.spec",
    "RestoreableJob": "runner.job",
    "BaseTrainer": "runner.trainer",
}

__all__ = ["BaseTrainer", "ExecutionSpec", "RestoreableJob", "Topology"]


def __getattr__(name: str) -> Any:
    """Import a public class when it is first asked for, so that checking a spec does not wait for jax."""
    if name not in _HOMES:
        raise AttributeError(f"module 'runner' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
