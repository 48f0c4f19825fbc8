"""Texts that are tokenised before the run, each by a job of its own (`config.data.tokenise`)."""

import copy
from collections.abc import Iterator

import jax

from runner.attempts.attempt import IncidentRecorder
from runner.attempts.layout import read_owner
from runner.attempts.logs import begin_next_log_file
from runner.checkpoint.fork import validate_known_changes
from runner.checkpoint.manifest import read_newest_manifest
from runner.config import DataConfig, TokenSource
from runner.console import say, silence, warn
from runner.data.open_source import RawText, restore_text, split_text
from runner.data.source_files import find_corpus, find_source
from runner.data.tokenizers import TOKENIZER_FILES
from runner.distributed.agreement import Hosts
from runner.distributed.clock import Clock
from runner.distributed.preemption import StopNotice
from runner.distributed.watchdog import Watchdog
from runner.errors import DataError, PreemptedError
from runner.job import RestoreableJob, TextJob
from runner.spec import (
    Document,
    ExecutionSpec,
    SpecLocation,
    compute_trajectory,
    is_class_path,
    load_job_class,
    validate_spec,
)
from runner.storage import JsonObject, Store
from runner.train.program import Programs
from runner.train.setup import TrainSetupBuilder


class TextsFirst:
    """Texts of a spec and the jobs that tokenise them, in order; empty without `config.data.tokenise`.

    Attributes:
        data: `config.data` as the user wrote it.
        document: the spec with the corpora in place of the texts.
    """

    def __init__(self, document: Document, spec: ExecutionSpec, data: DataConfig, store: Store, text_job: str):
        """Prepare the jobs, of the class `text_job` (`module:Class`); reads no text. `store` gets the corpora."""
        self.data, self._store, self._jobs = data, store, list[tuple[RawText, TextJob]]()
        self.document = document
        if data.tokenise is not None:
            self.document, texts = split_text(document, spec, store.url, text_job)
            for text in texts:
                job_class: type[TextJob] = load_job_class(text.document, TextJob)
                self._jobs.append((text, job_class(validate_spec(text.document), text.document)))

    def __iter__(self) -> Iterator[tuple[RawText, TextJob]]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def restore(self, config: JsonObject) -> JsonObject:
        """Return the config with the texts as the user wrote them in place of the corpora."""
        tokenise = self.data.tokenise
        return config if tokenise is None else restore_text(config, [text for text, _ in self._jobs], tokenise)

    def find_unfinished(self, run: RestoreableJob) -> list[str]:
        """Return the names of the texts whose corpus is not complete; none if the `run` is done. Process 0 only.

        Raises `SpecError` if a corpus was made with other keys, or from another text, than the spec has.
        """
        names = []
        for text, job in self._jobs:
            owner = read_owner(job.store)
            # A job that is not done makes the same checks itself.
            if owner is None or not job.done:
                names.append(text.name)
                continue
            identity = compute_trajectory(job.spec, job.config)
            changes = job.make_run_identity(identity).compare_values(owner.identity)
            # The text may be deleted by now, so it cannot be checked if it has only moved.
            for key in (f"config.{name}" for name in job.config.content_keys):
                saved, value = owner.identity.get(key), identity.get(key)
                # A tokenizer in another corpus of this run moves with the run.
                if saved != value and not str(value).startswith(f"{self._store.url}/"):
                    changes[key] = [saved, value]
            where = f"the corpus in {job.store.url} was made with"
            job.document.raise_problems(
                {
                    key: f"is {value!r}, and {where} {saved!r}; restore the key (the text is not read again), or use "
                    "another directory"
                    for key, (saved, value) in changes.items()
                }
            )
        # A run that is done needs no data.
        if names and run.lifecycle.validate_directory():
            return []
        fork = run.spec.checkpoint.fork_from
        if fork is not None and read_newest_manifest(run.store) is None:
            with run.document.errors_at("checkpoint.fork_from"):
                validate_known_changes(fork, run.lifecycle.make_run_identity(compute_trajectory(run.spec, run.config)))
        return names

    def run(self, run: RestoreableJob, programs: Programs, hosts: Hosts, stop: StopNotice, clock: Clock) -> None:
        """Tokenise the texts that are not tokenised yet, for `run`, which must be able to start. Called on every host.

        Raises `PreemptedError` if the job was asked to stop.
        """
        builder = programs.recipe.setup_builder
        incidents = IncidentRecorder()
        # Each job has a watchdog of its own, and these checks wait for process 0 and its storage too.
        with Watchdog(
            hosts, run.spec.deadlines, clock, incidents.on_diagnosis, incidents.on_straggler, incidents.on_progress
        ):
            names = hosts.run_on_main(lambda: self.find_unfinished(run))
            if not names:
                return
            # Checks that do not need the data come before tokenising, which may take hours.
            programs.validate_devices(run.spec, hosts)
            builder.validate_keys_read()
            builder.make_mesh(jax.devices())
            unfinished = [(text, job) for text, job in self._jobs if text.name in names]
            for _, job in unfinished:
                hosts.run_on_main(job.find_text)
        for text, job in unfinished:
            validate_vocabulary(builder, job)
            if hosts.is_main:
                say(f"{run.spec.name}: tokenises {text.source} first, in {job.store.url}")
            job.lifecycle.is_followed = True
            job(hosts, stop, clock)
            clock.begin_next_job()
            begin_next_log_file()
        if stop.poll():
            raise PreemptedError("stopped as asked; the text is tokenised; run the same command again to train on it")
        stop.begin_next_job()


def is_tokenised_like(texts: TextsFirst, source: TokenSource) -> bool:
    """Return True if a source is text that must be tokenised as the texts of a run were."""
    if not texts or is_class_path(source.source) or find_corpus(source.source) is not None:
        return False
    try:
        return not find_source(source.source).holds_tokens
    except DataError:  # text that is only read by the job that tokenises
        return True


def tokenise_like(texts: TextsFirst, source: TokenSource, directory: str) -> TokenSource:
    """Tokenise a source in `directory` with the tokenizer and the keys of a run's first text, and return the corpus.

    Called in a single process.
    """
    first = next(iter(texts))[0]
    data = copy.deepcopy(first.document.data)
    config = data["config"]
    config |= {"source": source.source, **source.options}
    kind = config.get("tokenizer", {}).get("kind")
    if (trained := {"bpe": "hf"}.get(kind, kind)) in TOKENIZER_FILES:
        # The corpus of the run has a copy of the tokenizer, which is there even if the file of the spec is not.
        kept = {} if kind == "bpe" else config["tokenizer"]
        config["tokenizer"] = kept | {"kind": trained, "file": f"{first.corpus}/{TOKENIZER_FILES[trained]}"}
    place = SpecLocation(f"--data {source.source}", key="config.source")
    document = Document(data | {"directory": directory}, {(): place})
    job: TextJob = load_job_class(document, TextJob)(validate_spec(document), document)
    warn(f"tokenises {source.source} as the run has tokenised {first.source}")
    with silence():
        job()
    return source.model_copy(update={"source": f"{directory}/corpus", "options": {}})


def validate_vocabulary(builder: TrainSetupBuilder, job: TextJob) -> None:
    """Raise `SpecError` if the tokenizer of a text has more ids than the model.

    One that is trained may yield fewer ids than it asks for, as it has in a run whose resolved spec this may be. Then
    the ids of the corpus are checked.
    """
    if not builder.has_vocabulary_size or job.vocabulary_size <= builder.vocabulary_size:
        return
    asked, vocabulary = job.vocabulary_size, builder.vocabulary_size
    advice = "use a vocabulary of at least that, or auto"
    if vocabulary < job.least_vocabulary_size:
        message = f"is {vocabulary:,}, and data.tokenise.tokenizer has {asked:,} ids; {advice}"
        raise builder.document.error("config.model.vocabulary_size", message)
    warn(
        f"config.model.vocabulary_size: is {vocabulary:,}, and data.tokenise.tokenizer may have up to {asked:,} ids; "
        f"if the text yields more than {vocabulary:,}, the run ends before its first step: {advice}"
    )
