"""Everything that can be wrong before a job is queued, found and listed at once. Writes nothing that stays."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.checkpoint.manifest import newest_manifest
from runner.errors import RunnerError
from runner.job import RestoreableJob
from runner.plan.figure import Section
from runner.spec import Document, ExecutionSpec, load_job_class, validate_config, validate_spec
from runner.trainer import BaseTrainer
from runner.weights.source import check_source


@dataclass
class Findings:
    """What keeps the job from running, and what a person should know, a line each."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Turn an error of the user's into problems."""
        try:
            yield
        except RunnerError as error:
            self.problems += [line for line in str(error).split("\n") if line not in self.problems]


def open_job(document: Document, findings: Findings) -> RestoreableJob | None:
    """The job of a spec: top level, class and config are each checked, whatever the others hold. None if one is bad."""
    spec: ExecutionSpec | None = None
    job_class: type[RestoreableJob] | None = None
    config = None
    with findings.collect():
        spec = validate_spec(document)
    with findings.collect():
        job_class = load_job_class(document, RestoreableJob)
    if job_class is not None:
        with findings.collect():
            config = validate_config(document, job_class.Config)
        if job_class.needs_topology and "topology" not in document.data:
            findings.problems.append(document.line((), f"missing key topology: {job_class.__name__} needs one"))
    if spec is None or job_class is None or config is None or findings.problems:
        return None
    with findings.collect():
        job = job_class(spec, document)
        if isinstance(job, BaseTrainer):
            job.design.refuse_unread_keys()
        return job
    return None


def check_directory(job: RestoreableJob, can_compare: bool, findings: Findings) -> Section:
    """Whose the directory is, whether it can be written, and what a start would resume.

    `can_compare` says whether the job knows all that defines its trajectory, its data included.
    """
    section = Section("directory")
    section.add("url", job.store.url, "text", "counted")
    done: bool | None = None
    with findings.collect():
        if job.store.root is not None:
            _check_writable(job, job.store.root)
        done = job.check_directory_and_ask_if_done()
    if done is None:
        return section
    manifest = None
    with findings.collect():
        manifest = newest_manifest(job.store)
        if manifest is not None and can_compare:
            job.refuse_other_checkpoints()
    if done:
        section.add("a start", "nothing: the run is done", "text", "counted")
    elif manifest is None:
        section.add("a start", "begins at step 0", "text", "counted")
    else:
        with findings.collect():  # a total in epochs needs the data
            section.add("a start", f"resumes step {manifest.step} of {job.total_steps}", "text", "counted")
    return section


def check_weights(job: RestoreableJob, abstract: Any, findings: Findings) -> None:
    """The weights that the run would begin with, against its state `abstract`, where it has no checkpoint yet."""
    with findings.collect():
        if newest_manifest(job.store) is None:
            check_source(job.document, job.spec.checkpoint.weights, job.family, lambda: job.weights(abstract))


def _check_writable(job: RestoreableJob, directory: Path) -> None:
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise job.document.error("directory", f"{job.store.url} cannot be written: {existing} does not allow it")


def check_grace(job: RestoreableJob, save_seconds: float, basis: str, findings: Findings) -> None:
    """Whether a save fits into the grace that the engine gives."""
    grace_seconds = job.spec.checkpoint.grace_seconds
    if grace_seconds is not None and save_seconds > grace_seconds:
        findings.warnings.append(
            job.document.line(
                ("checkpoint", "grace_seconds"),
                f"a save takes {save_seconds:.1f} s ({basis}), more than {grace_seconds:g}: a preemption may cost up "
                "to a save interval; give more grace, or add a fast tier (checkpoint.local_directory)",
            )
        )
