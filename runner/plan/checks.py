"""Checks of a spec, its data and its directory, all reported at once. They leave no files behind.

The data are opened as the job would open them: each source is reached, and its tokens are compared with the budget.
"""

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from runner.attempts.environment import has_wandb_key
from runner.attempts.take_over import describe_running_attempt
from runner.checkpoint.manifest import read_newest_manifest
from runner.data import Dataset
from runner.data.packing import describe_fields
from runner.distributed.agreement import Hosts
from runner.errors import RunnerError, StorageError
from runner.huggingface.load import validate_init_from
from runner.job import RestoreableJob, complete_topology
from runner.plan.figures import Section
from runner.spec import Document, ExecutionSpec, load_job_class, validate_config, validate_spec
from runner.storage import JsonObject
from runner.train.setup import TrainSetupBuilder
from runner.train.text_first import validate_vocabulary
from runner.trainer import BaseTrainer


@dataclass
class Findings:
    """Problems that keep the job from running, as one line each with indented lines of advice, and warnings."""

    problems: list[str] = field(default_factory=list)
    # Those of `problems` that another machine may not have: with its files and packages, its network or credentials.
    local_problems: list[str] = field(default_factory=list)
    service_problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> JsonObject:
        """Return the lines by kind."""
        return dataclasses.asdict(self)

    @contextlib.contextmanager
    def collect(self, *, is_local: bool = False) -> Iterator[None]:
        """Turn a `RunnerError` into problems and continue. With `is_local` they concern files of this machine."""
        try:
            yield
        except RunnerError as error:
            found = re.split(r"\n(?! )", str(error))  # an indented line belongs to the problem before it
            lines = [line for line in map(str.strip, found) if line not in self.problems]
            self.problems += lines
            if isinstance(error, StorageError) or isinstance(error.__cause__, PermissionError):
                self.service_problems += lines
            elif is_local or _is_package_missing(error):
                self.local_problems += lines


def _is_package_missing(error: BaseException | None) -> bool:
    """Return True if an error was caused by a package that this machine lacks, and hosts may have."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:  # an error that was raised from itself is its own cause
        if isinstance(error, ModuleNotFoundError):
            return True
        seen.append(error)
        error = error.__cause__
    return False


def open_job(document: Document, findings: Findings) -> RestoreableJob | None:
    """Return the job of a spec, None if there are problems.

    Top level, class and config are checked independently of each other.
    """
    # Each check runs even if the previous one failed, so that the user sees all problems at once.
    spec: ExecutionSpec | None = None
    job_class: type[RestoreableJob] | None = None
    config = None
    with findings.collect():
        spec = validate_spec(document)
    if isinstance(document.data.get("job"), str):  # else it is one of the problems
        with findings.collect():
            job_class = load_job_class(document, RestoreableJob)
    if job_class is not None:
        with findings.collect():
            if spec is not None:
                document = job_class.complete_document(document, spec)
            config = validate_config(document, job_class.Config)
    if spec is None or job_class is None or config is None or findings.problems:
        return None
    with findings.collect():
        job = job_class(complete_topology(job_class, spec), document)
        if isinstance(job, BaseTrainer):
            job.setup_builder.validate_keys_read()
        return job
    return None


def check_directory(job: RestoreableJob, can_compare: bool, findings: Findings) -> Section:
    """Check that the directory is writable and belongs to this job, and report what a start would resume.

    `can_compare` is True if everything that defines the trajectory is known, including the data.
    """
    section = Section("directory")
    section.add("url", job.store.url, "text", "counted")
    done: bool | None = None
    is_local = job.store.root is not None
    with findings.collect(is_local=is_local):
        if (directory := job.store.root) is not None:
            # The directory itself may not exist yet; its nearest existing parent must then be writable.
            existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
            if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
                raise job.document.error(
                    "directory", f"{job.store.url} cannot be written: {existing} is not a writable directory"
                )
        done = job.lifecycle.validate_directory()
    if done is None:
        return section
    with contextlib.suppress(OSError):
        if (other := describe_running_attempt(job.store)) is not None:
            message = f"in use by {other}; a start takes it over, and that attempt stops"
            findings.warnings.append(job.document.format_problem(("directory",), message))
    manifest = None
    with findings.collect(is_local=is_local):
        # The trajectory of a checkpoint includes the fingerprint of the data, so it is compared only if they are known.
        manifest = read_newest_manifest(job.store)
        if manifest is not None and can_compare:
            job.lifecycle.validate_checkpoints()
    label = "next start"
    if done:
        section.add("a start", "nothing: the run is done", "text", "counted", label=label)
    elif manifest is None:
        fork = job.spec.checkpoint.fork_from
        text = "begins at step 0" if fork is None else f"begins as a fork of {fork.run} at step {fork.step}"
        section.add("a start", text, "text", "counted", label=label)
    else:
        # A total in epochs is known only if the data can be read.
        with findings.collect():
            text = f"resumes step {manifest.step} of {job.total_steps}"
            section.add("a start", text, "text", "counted", label=label)
    return section


def check_weights(job: RestoreableJob, abstract_state: Any, findings: Findings) -> None:
    """Check the weights, or the fork, that the run would start from against its state, if it has no checkpoint yet."""
    if job.store.root is None and any(job.store.url in line for line in findings.service_problems):
        return  # a bucket that cannot be reached was reported
    with findings.collect(is_local=True):
        # A checkpoint of the run itself takes precedence over initial weights.
        if read_newest_manifest(job.store) is not None:
            return
        if job.spec.checkpoint.fork_from is not None:
            job.lifecycle.validate_checkpoints(abstract_state)
        else:
            initial = job.spec.checkpoint.initial_weights
            validate_init_from(job.document, initial, job.family, lambda: job.weights(abstract_state))


def check_tracking(job: RestoreableJob, findings: Findings) -> None:
    """Warn if the job would log to W&B online and this machine has no key, as the hosts may have none either."""
    if job.spec.logging.wandb == "online" and not has_wandb_key():
        message = (
            "online, and this machine has no key of W&B (WANDB_API_KEY, or wandb login); without one on process 0 the "
            "run is logged offline"
        )
        findings.warnings.append(job.document.format_problem(("logging", "wandb"), message))


def check_grace(job: RestoreableJob, save_seconds: float, basis: str, findings: Findings) -> None:
    """Warn if a save does not fit into the grace period that the cluster gives before it stops a job."""
    grace_seconds = job.spec.checkpoint.grace_seconds
    if grace_seconds is not None and save_seconds > grace_seconds:
        message = (
            f"a save takes {save_seconds:.1f} s ({basis}), more than the grace period of {grace_seconds:g} s: a "
            "preemption may lose up to a save interval; extend it, or add a fast tier (checkpoint.local_directory)"
        )
        findings.warnings.append(job.document.format_problem(("checkpoint", "grace_seconds"), message))


def check_text(job: BaseTrainer, findings: Findings) -> list[str]:
    """Check the text that the job would tokenise first, and return the names of what is not tokenised yet.

    If the model's vocabulary size is that of the data, it is set to the tokenizer's upper bound.
    """
    names: list[str] = []
    with findings.collect(is_local=job.store.root is not None):
        names = job.texts.find_unfinished(job)
    unfinished = [text_job for text, text_job in job.texts if text.name in names]
    for text_job in unfinished:
        with findings.collect(is_local=True):
            text_job.find_text()
    with findings.collect(is_local=True):
        for text_job in unfinished[:1]:
            builder, size = job.setup_builder, text_job.vocabulary_size
            validate_vocabulary(builder, text_job)
            if not builder.has_vocabulary_size:
                model = builder.config.model.model_copy(update={"vocabulary_size": size})
                config = builder.config.model_copy(update={"model": model})
                job.setup_builder = dataclasses.replace(builder, config=config)
            text_job.setup(Hosts.single_process())
    if names:
        message = (
            f"the text of {', '.join(names)} is tokenised at the first start; its number of tokens is not known yet"
        )
        findings.warnings.append(job.document.format_problem(("config", "data"), message))
    return names


@dataclass(frozen=True)
class DataCheck:
    """Result of checking the data of a job: whether they can be read, and whether the train step can be built.

    The step cannot be built if it needs the vocabulary size of data that are missing.
    """

    section: Section
    is_found: bool
    can_build_step: bool


def load_data(setup_builder: TrainSetupBuilder, findings: Findings) -> tuple[Dataset | None, bool]:
    """Load the data as the job would, and return (data set, True if the step can be built).

    A total in epochs is converted to steps too, and data that are too few for it count as a problem. The data set is
    None if it cannot be loaded. The step can then be built only if it does not depend on the data, otherwise if the
    vocabulary fits.
    """
    is_local = setup_builder.config.data.is_on_this_machine
    with findings.collect(is_local=is_local):
        dataset, _ = setup_builder.dataset, setup_builder.config_in_steps
        with findings.collect(is_local=is_local):
            # A vocabulary that does not fit leaves the data usable for the other checks.
            dataset.validate_vocabulary(setup_builder.vocabulary_size)
            return dataset, True
        return dataset, False
    return None, not setup_builder.needs_data


def check_data(job: BaseTrainer, findings: Findings, num_hosts: int) -> DataCheck:
    """Check the data: load them, compare their size with the budget, and read one host's part of the first batch."""
    section = Section("data")
    if names := check_text(job, findings):
        for text, _ in job.texts:
            if text.name in names:
                section.add(f"text of {text.name}", text.source, "text", "counted")
        return DataCheck(section, False, not job.setup_builder.needs_data)
    setup_builder, began = job.setup_builder, time.perf_counter()
    dataset, can_build_step = load_data(setup_builder, findings)
    if dataset is None:
        return DataCheck(section, False, can_build_step)
    batch, is_read = setup_builder.config.train.global_batch_examples, False
    with findings.collect(is_local=setup_builder.config.data.is_on_this_machine):
        # A host reads only its part of the global batch.
        dataset.read("train", 0, -(-batch // num_hosts))
        is_read = True
        findings.warnings += dataset.list_warnings(batch)
    seconds = time.perf_counter() - began

    section.add("fingerprint", dataset.fingerprint, "text", "counted")
    num_steps = (
        setup_builder.config_in_steps.total_steps if setup_builder.stage is None else setup_builder.stage.num_steps
    )
    taken_by = "the run takes" if setup_builder.stage is None else "the steps before the first stage take"
    shares = dataset.compute_shares(*setup_builder.data_position.count_examples(num_steps, batch))
    for part, share in zip(dataset.train_sources, shares, strict=True):
        of = f" of {part.name}" if len(shares) > 1 else ""
        section.add(f"source{of}", part.label.partition("=")[2], "text", "counted", "reached")
        has_tokens = dataset.unit == "tokens"
        note = "of sequence_length tokens" if has_tokens else describe_fields(dataset.fields)
        section.add(f"training examples{of}", part.examples.num_examples, "", "counted", note)
        if has_tokens:
            section.add(f"training tokens{of}", part.num_units, "", "counted")
        section.add(f"epochs{of}", share.epochs, "", "counted", f"{taken_by} {share.units:,} {dataset.unit}")
    for name, examples in dataset.validation.items():
        title = f"{name} examples" if name == "validation" else f"validation examples of {name}"
        section.add(title, examples.num_examples, "", "counted")
    # Traffic from buckets costs money, so it is shown where there is any.
    if fetched := sum(share.bytes_fetched for share in shares):
        note = "by all hosts together, with empty caches"
        section.add("fetched from buckets", fetched, "bytes", "counted", note)
    if copied := sum(part.source.bytes_copied for part in dataset.train_sources):
        note = "by each host, whole, at its first start"
        section.add("copied from buckets", copied, "bytes", "counted", note)
    if is_read:
        note = "time to open the data and read one host's part, from this machine"
        section.add("first batch", seconds, "seconds", "measured", note)
    return DataCheck(section, is_read, can_build_step)
