"""Everything that can be wrong before a job is queued, found and listed at once. Writes nothing that stays.

The data of a job, looked for as the job would: each source reached, its tokens against what the run takes of it.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.checkpoint.manifest import read_newest_manifest
from runner.data import Dataset
from runner.errors import RunnerError
from runner.huggingface.load import validate_init_from
from runner.job import RestoreableJob
from runner.plan.figures import Section
from runner.spec import Document, ExecutionSpec, load_job_class, validate_config, validate_spec
from runner.train.setup import TrainSetupBuilder
from runner.trainer import BaseTrainer


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
            findings.problems.append(
                document.format_problem((), f"missing key topology: {job_class.__name__} needs one")
            )
    if spec is None or job_class is None or config is None or findings.problems:
        return None
    with findings.collect():
        job = job_class(spec, document)
        if isinstance(job, BaseTrainer):
            job.setup_builder.validate_keys_read()
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
        done = job.validate_directory()
    if done is None:
        return section
    manifest = None
    with findings.collect():
        manifest = read_newest_manifest(job.store)
        if manifest is not None and can_compare:
            job.validate_checkpoints()
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
        if read_newest_manifest(job.store) is None:
            validate_init_from(
                job.document, job.spec.checkpoint.initial_weights, job.family, lambda: job.weights(abstract)
            )


def _check_writable(job: RestoreableJob, directory: Path) -> None:
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise job.document.error("directory", f"{job.store.url} cannot be written: {existing} does not allow it")


def check_grace(job: RestoreableJob, save_seconds: float, basis: str, findings: Findings) -> None:
    """Whether a save fits into the grace that the engine gives."""
    grace_seconds = job.spec.checkpoint.grace_seconds
    if grace_seconds is not None and save_seconds > grace_seconds:
        findings.warnings.append(
            job.document.format_problem(
                ("checkpoint", "grace_seconds"),
                f"a save takes {save_seconds:.1f} s ({basis}), more than {grace_seconds:g}: a preemption may cost up "
                "to a save interval; give more grace, or add a fast tier (checkpoint.local_directory)",
            )
        )


@dataclass(frozen=True)
class DataCheck:
    """What is known of the data of a job after looking for them."""

    section: Section
    is_found: bool
    can_draw: bool  # what the train step is made of is known, if the data was needed for it


def load_data(setup_builder: TrainSetupBuilder, findings: Findings) -> tuple[Dataset | None, bool]:
    """The data as the job would load them, None if they cannot be; and whether the vocabulary is known and fits.

    Where the total is in epochs, they are counted: data that do not serve that cannot be used either.
    """
    with findings.collect():
        found, _ = setup_builder.dataset, setup_builder.config_in_steps
        with findings.collect():
            found.validate_vocabulary(setup_builder.vocabulary_size)
            return found, True
        return found, False
    return None, not setup_builder.needs_data


def check_data(setup_builder: TrainSetupBuilder, findings: Findings, num_hosts: int) -> DataCheck:
    """Load the data, as each of `num_hosts` would: its tokens against what the run takes, its first batch."""
    section = Section("data")
    began = time.perf_counter()
    found, can_draw = load_data(setup_builder, findings)
    if found is None:
        return DataCheck(section, False, can_draw)
    batch, is_read = setup_builder.config.train.global_batch_examples, False
    with findings.collect():
        found.read("train", 0, -(-batch // num_hosts))
        is_read = True
    seconds = time.perf_counter() - began
    _describe(section, found, setup_builder.config_in_steps.total_steps * batch)
    if is_read:
        section.add("first batch", seconds, "seconds", "measured", "the data opened and a host's part read, from here")
    return DataCheck(section, is_read, can_draw)


def _describe(section: Section, found: Dataset, num_examples: int) -> None:
    """What each source holds, and what it gives to the run."""
    section.add("fingerprint", found.fingerprint, "text", "counted")
    shares = found.shares(num_examples)
    for part, share in zip(found.parts, shares, strict=True):
        of = f" of {part.name}" if len(shares) > 1 else ""
        section.add(f"source{of}", part.label.partition("=")[2], "text", "counted", "reached")
        section.add(f"training examples{of}", part.examples.num_examples, "", "counted", "of sequence_length tokens")
        section.add(f"training tokens{of}", part.num_tokens, "", "counted")
        section.add(f"epochs{of}", share.epochs, "", "counted", f"{share.tokens:,} tokens of the run")
    for name, examples in found.validation.items():
        section.add(
            f"{name} examples" if name == "validation" else f"validation examples of {name}",
            examples.num_examples,
            "",
            "counted",
        )
    if fetched := sum(share.bytes_fetched for share in shares):
        section.add("fetched from buckets", fetched, "bytes", "counted", "by all hosts together, if none is cached")
    if copied := sum(part.source.bytes_copied for part in found.parts):
        section.add("copied from buckets", copied, "bytes", "counted", "by each host, whole, at its first start")
