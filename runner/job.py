"""RestoreableJob: a job whose complete state is one pytree, which the runner saves and restores.

A subclass initialises the state (`init`) and advances it in `run`, where it calls `save_or_stop` after every step.
`RestoreableJob.__call__` does the rest, in this order: stop if the job is done; check the spec and the directory; claim
the directory; restore or initialise the state; run; save the last state. The base class makes no assumption about what
the job computes. Every method is called on every host, unless its docstring says process 0 only.

The *trajectory* of a job is the sequence of its states. It is identified by the values of the keys that determine it
(`identity`), such as seed, model and data; a resumed job must have the same values.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

import jax

from runner.accelerator import add_deterministic_flags
from runner.checkpoint.policy import SaveKind
from runner.console import warn
from runner.distributed.agreement import Hosts
from runner.distributed.clock import Clock
from runner.distributed.preemption import StopNotice
from runner.errors import InvalidError, PhaseError, PreemptedError
from runner.lifecycle import Lifecycle, validate_step
from runner.metrics.meta import UnfitMetricsError, parse_metrics
from runner.nvidia import watch_plugins
from runner.process import add_cpu_threads
from runner.recipe import Recipe
from runner.spec import Document, ExecutionSpec, Topology, load_job_class

_METRIC_KEY = re.compile(r"(?!step$)[\w.-]+(/[\w.-]+)*")
_RESERVED_KEYS = ("perf/",)


class RestoreableJob(Recipe):
    """Base class of every job. Construct it with a spec, then call it.

    Attributes:
        lifecycle: life of the job in this process, which calls the methods of `Recipe`.
    """

    def __init__(self, spec: ExecutionSpec, document: Document | None = None):
        super().__init__(spec, document)
        self.lifecycle = Lifecycle(self)

    def __call__(self, hosts: Hosts | None = None, stop: StopNotice | None = None, clock: Clock | None = None) -> None:
        """Run the job to its end: restore or initialise, `run`, final save, `result.json`. A finished job does nothing.

        Args:
            hosts: all processes of the job; by default this one alone.
            stop: notice that the job was asked to stop.
            clock: accounting of the attempt's time.

        Raises:
            PreemptedError: the job was asked to stop; its state is saved.
            RunnerError: any other end, with its exit code.
        """
        self.lifecycle.run(hosts or Hosts.single_process(), stop or StopNotice(), clock or Clock())

    # Methods that `run` calls.

    def save_or_stop(self) -> None:
        """Save if a save is due. Called after every step.

        Raises:
            PreemptedError: the job was asked to stop; its state is saved and committed.
            PhaseError: the job is not running.
        """
        self.lifecycle.validate_running("save_or_stop")
        validate_step(self.spec.job, self.step, self.attempt.progress.step, self.total_steps)
        self.attempt.progress.report_step(self.step)
        # `poll` gives every host the same answer at the same step, so all of them save and stop together.
        is_stopping = self.attempt.stop.poll()
        self.checkpointer.raise_if_failing()
        if is_stopping:
            self.save()
            self.checkpointer.wait_until_committed(self.step)
            self.attempt.record("preempt", self.step, saved=True)
            # No host may leave while another still needs it.
            self.attempt.hosts.barrier()
            self.checkpointer.close()
            raise PreemptedError(f"stopped as asked; step {self.step} is saved; run the same command again")
        kind = self.checkpointer.find_due_save(self.step, self.total_steps)
        if kind is not None:
            self.state = self.checkpointer.save(self.state, self.step, self.lifecycle.collect_save_contents(), kind)
            if self.checkpointer.saved_step == self.step:
                self.attempt.stop_to_grow(self.step)

    def save(self, suffix: str | os.PathLike[str] | None = None) -> None:
        """Start saving the state as `checkpoints/<suffix>`, by default the step. It is durable once it is committed.

        A job resumes only from checkpoints that are named by their step, and only these count for retention. A
        checkpoint with another name is kept until someone deletes it.

        Raises:
            InvalidError: `suffix` cannot be the name of a checkpoint.
            PhaseError: the job is not running.
        """
        self.lifecycle.validate_running("save")
        validate_step(self.spec.job, self.step, self.attempt.progress.step, self.total_steps)
        name = None if suffix is None else _parse_name(suffix)
        contents = self.lifecycle.collect_save_contents()
        self.state = self.checkpointer.save(self.state, self.step, contents, SaveKind.REQUIRED, name)

    def load(self, suffix: str | os.PathLike[str]) -> None:
        """Replace state and step by those of `checkpoints/<suffix>` and continue from there. Called between steps.

        The effect is that of a restore at this step: later checkpoints are moved to `quarantine/`, and later rows are
        removed.

        Raises:
            InvalidError: no checkpoint can have that name.
            ResumeError: the checkpoint is damaged, or does not exist.
            PhaseError: the job is not running, or the call is not made between two steps on the job's thread.
        """
        self.lifecycle.validate_running("load")
        self.lifecycle.validate_between_steps("load")
        name = _parse_name(suffix)
        self.lifecycle.go_back(self.checkpointer.load(name), name)

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Write metrics of the current step into `metrics.jsonl` and its mirrors. Called on every host, inside `run`.

        A second call at the same step adds to its row. Rows are part of the trajectory: a resumed run has each step
        once. `checkpoint.keep_best` may name one of the metrics.

        Args:
            metrics: metrics by key, such as `accuracy` or `eval/accuracy`, of the kinds that an evaluator may return.
                If a row cannot hold one of them, a warning is printed and none of this call is written. Numbers that
                are not finite become null.

        Raises:
            PhaseError: the job is not running, or is a trainer, which writes the rows itself.
        """
        self.lifecycle.validate_running("log_metrics")
        if not self.writes_own_rows:
            raise PhaseError(
                f"{type(self).__name__}.log_metrics: a trainer writes its rows itself; return metrics from forward, or "
                "from an evaluator"
            )
        validate_step(self.spec.job, self.step, self.attempt.progress.step, self.total_steps)
        try:
            row, not_finite = parse_metrics(metrics, {}, _METRIC_KEY, _RESERVED_KEYS)
        except UnfitMetricsError as error:
            warn(f"log_metrics at step {self.step}: {error}; the row has no metric of this call")
            return
        if not_finite:
            warn(f"log_metrics at step {self.step}: {', '.join(not_finite)}: not finite; null in the row")
        self.lifecycle.row_log.add(self.step, row)


def make_job(document: Document, spec: ExecutionSpec) -> RestoreableJob:
    """Make the job of a spec, whose top level is valid. Validates the whole `config`; raises `SpecError`."""
    job_class: type[RestoreableJob] = load_job_class(document, RestoreableJob)
    return job_class(complete_topology(job_class, spec), document)


def complete_topology(job_class: type[RestoreableJob], spec: ExecutionSpec) -> ExecutionSpec:
    """Return the spec of a job with the default topology, any devices, if it needs one and the spec has none."""
    if job_class.needs_topology and spec.topology is None:
        return spec.model_copy(update={"topology": Topology()})
    return spec


def prepare_process(job: RestoreableJob) -> None:
    """Set what XLA reads when JAX starts, and open the compile cache. Call it before anything is compiled."""
    if job.spec.topology is None or job.spec.topology.deterministic:
        add_deterministic_flags(os.environ)
    add_cpu_threads(os.environ, jax.config.values["jax_num_cpu_devices"])
    job.compile_cache.open()
    watch_plugins()


class TextJob(RestoreableJob):
    """Job that tokenises text to `corpus` in its directory, for a trainer whose spec has `data.tokenise`."""

    @property
    def vocabulary_size(self) -> int:
        """Vocabulary size of the corpus, or an upper bound of it."""
        raise NotImplementedError

    @property
    def least_vocabulary_size(self) -> int:
        """Lower bound of the vocabulary size; below `vocabulary_size` if the text decides."""
        raise NotImplementedError

    def find_text(self) -> None:
        """Raise `InvalidError` if there is no such text. Needs neither the tokenizer nor other hosts."""
        raise NotImplementedError


def _parse_name(suffix: str | os.PathLike[str]) -> str:
    """Return the name of a checkpoint. Raises `InvalidError` if it is neither a string nor a path."""
    if not isinstance(suffix, str | os.PathLike):
        raise InvalidError(f"got {suffix!r} as the name of a checkpoint, needs a string such as '5'")
    return os.fspath(suffix)
