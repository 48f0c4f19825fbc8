"""Functions for notebooks and scripts: run a job in this process, and look at runs. `import runner` offers them.

`run` neither executes the process again nor ends it. `open_run` only reads: it claims no attempt, and may be used
beside the job that trains. Every function raises a `RunnerError` with the message that the command line would print.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from runner.accelerator import platform_errors
from runner.attempts.layout import RESULT
from runner.checkpoint.inspect import read_document
from runner.checkpoint.manifest import read_committed
from runner.cli.status import find_run, open_run_store
from runner.distributed.agreement import Hosts
from runner.distributed.clock import Clock
from runner.distributed.preemption import StopNotice
from runner.errors import error_from_exit
from runner.evaluation.generation import Sampler
from runner.history.reader import HistoryReader
from runner.history.records import History
from runner.inference.open_run import NEWEST, LoadedModel, ReadOnlyRun, SampleRequest, load_model
from runner.inference.open_run import open_run as open_read_only
from runner.inference.open_run import sample as sample_pieces
from runner.job import make_job, prepare_process
from runner.metrics.file import read_rows
from runner.nvidia import gpu_errors
from runner.spec import PARAMS, Document, ExecutionSpec, load_document, parse_document, validate_spec
from runner.spec.document import dump_yaml, format_overrides
from runner.storage import JsonObject, read_json

SpecSource = str | os.PathLike[str] | Mapping[str, Any]


def load_spec(spec: SpecSource, set: Mapping[str, Any] | None = None) -> ExecutionSpec:
    """Return the validated top level of a spec; its `config` belongs to the job class, which checks it when it runs.

    Args:
        spec: path of a YAML file, or its content as a mapping.
        set: values by dotted key, which replace those of the spec, as `--set` does.

    Raises:
        SpecError: the spec is wrong; one line for each problem.
    """
    return validate_spec(_load_document(spec, set))


def _load_document(spec: SpecSource, set: Mapping[str, Any] | None) -> Document:
    overrides = format_overrides(set or {})
    if isinstance(spec, Mapping):
        return parse_document(dump_yaml(dict(spec)), "spec", overrides)
    return load_document(Path(spec), overrides)


def run(spec: SpecSource, set: Mapping[str, Any] | None = None) -> JsonObject:
    """Run the job of a spec in this process, or resume it, and return its result; a finished job returns it at once.

    The job has this process alone, with all of its devices; for several hosts use `python -m runner`. A job that hangs
    is reported, and does not end the process.

    The first Ctrl-C, or the stop button of a notebook, saves the state and raises `PreemptedError`: call `run` again to
    go on. A second one interrupts at once.

    Args:
        spec: path of a YAML file, or its content as a mapping.
        set: values by dotted key, which replace those of the spec, as `--set` does.

    Returns:
        The content of `result.json`: step, tokens, losses and the fingerprint of the state.

    Raises:
        PreemptedError: the job was interrupted; its state is saved.
        RunnerError: any other end. A `SystemExit` of the job's own code is a `FailedError`.
    """
    document = _load_document(spec, set)
    job = make_job(document, validate_spec(document))
    prepare_process(job)
    stop = StopNotice()
    with platform_errors(), gpu_errors(), _stop_at_interrupt(stop):
        try:
            job.lifecycle.run(Hosts.single_process(), stop, Clock(), ends_process=False)
        except SystemExit as error:
            raise error_from_exit(error) from error
    return dict(read_json(job.store, RESULT))


@contextlib.contextmanager
def _stop_at_interrupt(stop: StopNotice) -> Iterator[None]:
    """Stop the job at its next step when SIGINT comes. Only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.getsignal(signal.SIGINT) or signal.default_int_handler

    def handle(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, former)
        # Before the first step there is nothing to save.
        if not stop.has_begun:
            raise KeyboardInterrupt
        stop.request_stop("interrupted")

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def open_run(where: str | os.PathLike[str], trust: Sequence[str] = ()) -> "Run":
    """Open a run, to read it.

    Args:
        where: its directory or URL, or its spec.
        trust: modules whose classes the run's `spec.yaml` may name, besides those of this project. They are needed only
            to load the model.

    Raises:
        InvalidError: there is no run.
    """
    return Run(os.fspath(where), trust)


class Run:
    """A run's directory, which is only read. Made by `open_run`.

    Attributes:
        url: path or URL of the directory.
    """

    def __init__(self, where: str, trust: Sequence[str] = ()):
        self._where, self._trust = where, trust
        self._store = open_run_store(where)
        self._reader = HistoryReader(self._store)
        self.url = self._store.url

    def __repr__(self) -> str:
        return f"open_run({self.url!r})"

    @cached_property
    def _read_only(self) -> ReadOnlyRun:
        found = open_read_only(*find_run(self._where, self._trust))
        found.prepare_process()
        return found

    @property
    def spec(self) -> ExecutionSpec:
        """Spec of the run, as it was resolved when the run began."""
        return validate_spec(read_document(self._store))

    @property
    def checkpoints(self) -> list[int]:
        """Committed steps, ascending."""
        return list(read_committed(self._store))

    def status(self) -> History:
        """Return the state of the run, its attempts, and where its time went."""
        return self._reader.read()

    def metrics(self) -> Any:
        """Return the rows of metrics: a `pandas.DataFrame` if pandas is installed, else one array for each key.

        A value that a row does not have is NaN; columns with other values than numbers are arrays of objects.
        """
        rows = read_rows(self._store)
        columns = dict.fromkeys(key for row in rows for key in row)
        arrays = {key: _make_column([row.get(key) for row in rows]) for key in columns}
        if find_spec("pandas") is None:
            return arrays
        import pandas  # noqa: PLC0415  an optional dependency of the user

        return pandas.DataFrame(arrays)

    def load(self, step: int | str = NEWEST, weights: str = PARAMS) -> LoadedModel:
        """Return the model of a step with its weights: `loaded.model.apply(loaded.variables, ids, deterministic=True)`.

        Args:
            step: a committed step, `newest` or `best`.
            weights: the trained ones (`params`), or an average such as `ema_0.999`.

        Raises:
            InvalidError: the run trains no model, has no such step or weights, or the checkpoint is damaged.
        """
        return load_model(self._read_only, str(step), weights)

    def sample(
        self,
        prompt: str = "",
        tokens: int = 200,
        *,
        step: int | str = NEWEST,
        temperature: float = 0.8,
        top_p: float = 1.0,
        seed: int = 0,
        weights: str = PARAMS,
        chat: bool = False,
    ) -> str:
        """Return the prompt and the text that the model adds to it; with `chat` its answer alone.

        The arguments are the options of `python -m runner sample`. Raises `InvalidError` as `load` does.
        """
        sampler = Sampler(temperature, top_p, seed)
        request = SampleRequest(prompt, str(step), tokens, sampler, weights, is_chat=chat)
        return "".join(sample_pieces(self._read_only, request))


def _make_column(values: list[Any]) -> np.ndarray:
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return np.array(values)
    if all(value is None or isinstance(value, int | float) for value in values):
        return np.array([np.nan if value is None else value for value in values], np.float64)
    column = np.empty(len(values), object)
    column[:] = values
    return column
