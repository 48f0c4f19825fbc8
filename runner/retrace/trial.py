"""Paired trial of a change: a run is forked twice, without and with the change, and both make the same steps.

Both forks are ordinary runs, in `old` and `new` below the directory of the trial, as `old.yaml` and `new.yaml` describe
them. So a trial that was interrupted goes on, and the forks may as well be run by hand, on other machines.
"""

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runner.attempts.fence import Advice
from runner.attempts.layout import read_owner
from runner.checkpoint.inspect import SPEC
from runner.checkpoint.manifest import read_committed
from runner.console import format_duration, say
from runner.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INVALID,
    EXIT_PREEMPTED,
    FailedError,
    InvalidError,
    RetryableError,
)
from runner.history.ledger import get_float
from runner.job import make_job
from runner.metrics.file import MetricsTail
from runner.metrics.rows import Row
from runner.process import make_code_environment, start_process
from runner.retrace.judge import CRITERIA, MIN_STEPS, NUM_BLOCKS, Comparison, Criterion, compare_paired
from runner.retrace.replay import compare_rows
from runner.retrace.scratch import QUIET, make_document, open_job
from runner.spec import Trust, parse_document, validate_spec
from runner.spec.document import dump_yaml
from runner.storage import JsonObject, LocalStore, open_store
from runner.trainer import BaseTrainer

OLD, NEW = "old", "new"
_PLACE = ("directory", "checkpoint.fork_from")  # keys in which the specs of both forks always differ
_SAVES = 4  # of a fork, after the first
_POLL_SECONDS = 0.2
_SAY_SECONDS = 15.0
_STOP_SECONDS = 4.0  # for a fork to end when the command is interrupted; it goes on to save in the background
_MAX_RETRIES = 3
_TAIL_LINES = 15

Verdict = Literal["same bits", "keep", "worse", "unclear"]


@dataclass(frozen=True)
class TrialRequest:
    """Request for a trial.

    Attributes:
        run: directory or URL of the run, which is only read.
        directory: directory of the trial.
        num_steps: steps of each fork.
        step: checkpoint of the run to fork; None for the newest that leaves enough steps.
        overrides: `KEY=VALUE`, the change.
        code: directory whose modules are used in place of those that are installed, for the change alone; or None.
        python: interpreter for the change alone, such as that of another virtual environment; or None.
        criteria: metrics by which the change is judged.
        is_any_device: True: both forks run on all devices of this machine, whatever the run had.
        trust: modules, see `runner.spec.Trust`.
    """

    run: str
    directory: Path
    num_steps: int
    step: int | None
    overrides: Sequence[str]
    code: str | None
    python: str | None
    criteria: Mapping[str, Criterion]
    is_any_device: bool = False
    trust: Sequence[str] = ()

    @property
    def changed_keys(self) -> list[str]:
        """Keys of the spec that the change sets."""
        return [override.partition("=")[0].strip() for override in self.overrides]


@dataclass(frozen=True)
class TrialResult:
    """Outcome of a trial."""

    run: str
    start: int  # step of the checkpoint that was forked
    stop: int  # last step of both forks
    change: Sequence[str]  # a line each
    comparisons: Sequence[Comparison]  # those that are judged come first
    judged: Sequence[str]  # names of the criteria
    failure: str | None  # why the fork with the change ended early
    has_same_rows: bool  # True if no row differs, but for times and sizes
    has_same_batches: bool

    @property
    def verdict(self) -> Verdict:
        """Outcome in words."""
        outcomes = [each.outcome for each in self.comparisons if each.name in self.judged]
        if self.failure is not None or "worse" in outcomes:
            return "worse"
        if len(outcomes) < len(self.judged) or "unclear" in outcomes:
            return "unclear"
        return "same bits" if self.has_same_rows else "keep"

    def to_json(self) -> JsonObject:
        """Return the outcome as plain data."""
        return {
            "verdict": self.verdict,
            "run": self.run,
            "from_step": self.start,
            "to_step": self.stop,
            "change": [*self.change],
            "judged": [*self.judged],
            "failure": self.failure,
            "same_rows": self.has_same_rows,
            "same_batches": self.has_same_batches,
            "comparisons": [each._asdict() | {"outcome": each.outcome} for each in self.comparisons],
        }

    def format(self) -> Iterator[str]:
        """Yield the lines for people."""
        yield f"{self.run}, steps {self.start + 1} to {self.stop}, without and with the change:"
        yield from (f"    {line}" for line in self.change)
        if not self.has_same_batches:
            yield "the change alters the batches, so equal steps have other examples"
        if self.failure is not None:
            yield f"with the change: {self.failure}"
        for each in self.comparisons:
            yield each.format() + ("" if each.name in self.judged else " (not judged)")
        missing = {*self.judged} - {each.name for each in self.comparisons}
        yield from (f"{name}: the rows do not have it" for name in sorted(missing) if self.failure is None)
        yield f"verdict: {self.verdict.upper()}"
        for each in self.comparisons if self.verdict == "unclear" else ():
            if each.outcome == "unclear" and each.name in self.judged:
                yield f"{each.name}: these steps do not tell; {each.advise()}"


class Fork:
    """One of the two runs of a trial."""

    def __init__(self, name: str, request: TrialRequest, start: int):
        """Prepare the fork; writes nothing."""
        self.name, self.start, self.stop = name, start, start + request.num_steps
        self.spec_path = request.directory / f"{name}.yaml"
        self.store = LocalStore(request.directory / name)
        self.log_path = request.directory / f"{name}.log"
        is_new = name == NEW
        self._python = request.python if is_new and request.python else sys.executable
        self._variables = make_code_environment(request.code) if is_new and request.code else dict(os.environ)
        self._tail, self._rows = MetricsTail(self.store), list[Row]()

    def read_spec(self) -> str | None:
        """Return the spec that was written for the fork; None if none was."""
        return self.spec_path.read_text() if self.spec_path.exists() else None

    def has_committed(self) -> bool:
        """Return True if the fork has its first checkpoint, so that it needs the run no longer."""
        return bool(read_committed(self.store))

    def read_rows(self) -> list[Row]:
        """Return the rows of the steps of the trial. Each call reads those that are new."""
        is_restart, rows, newest = self._tail.read()
        self._rows = [] if is_restart else self._rows
        self._rows += [row for row in rows if self.start < row["step"] <= self.stop]
        return [*self._rows, *(row for row in newest if self.start < row["step"] <= self.stop)]

    def is_complete(self) -> bool:
        """Return True if the last step of the trial has a row."""
        rows = self.read_rows()
        return bool(rows) and rows[-1]["step"] == self.stop

    def advance(self, is_reached: Callable[[], bool]) -> str | None:
        """Run the fork until `is_reached`, and stop it there. Returns why it failed, or None.

        Raises `InvalidError` if it is refused, and `RetryableError` if it ends too often with a retryable code.
        """
        num_tries = 0
        change = "with" if self.name == NEW else "without"
        if not is_reached():
            say(f"trial: {self.name}: {change} the change, steps {self.start + 1} to {self.stop}; log: {self.log_path}")
        while not is_reached():
            num_bytes = self.log_path.stat().st_size if self.log_path.exists() else 0
            code = self._run(is_reached)
            if code in (EXIT_DONE, EXIT_PREEMPTED) and is_reached():
                break
            output = self.log_path.read_bytes()[num_bytes:]
            lines = output.decode(errors="replace").splitlines()[-_TAIL_LINES:]
            if code == EXIT_INVALID:
                raise InvalidError("\n".join(lines))
            if code == EXIT_FAILED:
                return "\n".join([f"the fork failed: see {self.log_path}", *lines])
            num_tries += 1
            if num_tries > _MAX_RETRIES:
                ended = f"{self.spec_path}: the fork ended {num_tries} times, now with {code}; run the command again"
                raise RetryableError("\n".join([ended, *lines]))
        return None

    def _run(self, is_reached: Callable[[], bool]) -> int:
        """Make one attempt, and return its exit code."""
        with self.log_path.open("ab") as log:
            command = [self._python, "-m", "runner", str(self.spec_path)]
            process = start_process(command, self._variables, log)
        try:
            began, said_at, first = time.monotonic(), time.monotonic(), None
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                if is_reached():
                    process.terminate()
                    break
                now = time.monotonic()
                if now - said_at >= _SAY_SECONDS:
                    said_at, rows = now, self.read_rows()
                    if rows:
                        step, first = rows[-1]["step"], first or (rows[-1]["step"], now)
                        made, seconds = step - first[0], now - first[1]
                        left_seconds = seconds / made * (self.stop - step) if made else 0.0
                        left = f", {format_duration(left_seconds)} left" if made and seconds else ""
                        say(f"trial: {self.name}: step {step} of {self.start + 1} to {self.stop}{left}")
                    else:
                        say(f"trial: {self.name}: starting, {format_duration(now - began)}")
            return process.wait()
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            raise


def choose_start(request: TrialRequest, job: BaseTrainer) -> int:
    """Return the step of the checkpoint to fork. Raises `InvalidError` if there is none that leaves enough steps."""
    store, total = open_store(request.run), job.total_steps
    steps = sorted(read_committed(store))
    if request.num_steps < MIN_STEPS:
        raise InvalidError(
            f"--steps {request.num_steps}: the second half is judged, in {NUM_BLOCKS} blocks of two steps or more; "
            f"use --steps {MIN_STEPS} or more"
        )
    fitting = [step for step in steps if step + request.num_steps <= total]
    if request.step is None and fitting:
        return fitting[-1]
    if request.step is not None and request.step not in steps:
        raise InvalidError(
            f"{store.url}: --step {request.step}: has the checkpoints {', '.join(map(str, steps[-20:]))}"
        )
    if request.step not in fitting:
        known = f"the oldest is {steps[0]}" if steps and request.step is None else "choose an earlier --step"
        known += "; use fewer --steps, or extend the run"
        reason = f"no checkpoint leaves {request.num_steps} steps before the end at step {total}; {known}"
        raise InvalidError(f"{store.url}: {reason if steps else 'no checkpoint is here'}")
    assert request.step is not None, "it is among those that fit"
    return request.step


def write_specs(request: TrialRequest, job: BaseTrainer, start: int) -> tuple[Fork, Fork]:
    """Write the specs of both forks, unless they exist. Raises `InvalidError` if the trial that exists is another."""
    forks = Fork(OLD, request, start), Fork(NEW, request, start)
    values = QUIET | {
        "checkpoint.every_steps": math.ceil(request.num_steps / _SAVES),
        "checkpoint.every_minutes": None,
        "checkpoint.every_epochs": None,
        "checkpoint.every": None,
        "checkpoint.keep_last": 1,
        "checkpoint.keep_every_steps": None,
        "checkpoint.keep_best": None,
        "logging.every_steps": 1,
    }
    texts = [make_spec(request, job, fork, values) for fork in forks]
    # Without the lines about the fork itself.
    plain = [
        make_document(text, fork.name, dict.fromkeys(_PLACE), (), is_any_device=False, trust=Trust()).data
        for fork, text in zip(forks, texts, strict=True)
    ]
    if request.code is None and request.python is None and plain[0] == plain[1]:
        raise InvalidError(
            f"--set {', '.join(request.overrides)}: the run has this already, so there is nothing to try"
        )
    is_same = all(fork.read_spec() == text for fork, text in zip(forks, texts, strict=True))
    if not is_same and any(read_owner(fork.store) is not None for fork in forks):
        raise InvalidError(f"-o {request.directory}: holds another trial; use another directory")
    request.directory.mkdir(parents=True, exist_ok=True)
    for fork, text in zip(forks, texts, strict=True):
        LocalStore(request.directory).write(fork.spec_path.name, text.encode())
    return forks


def make_spec(request: TrialRequest, job: BaseTrainer, fork: Fork, values: Mapping[str, Any]) -> str:
    """Return the spec of a fork with these values of dotted keys. Raises `InvalidError`."""
    overrides = request.overrides if fork.name == NEW else ()
    changes = {*(request.changed_keys if fork.name == NEW else ())}
    if _alters_batches([*changes]):
        # The digests of the data follow from these keys.
        changes |= {"config.data"} | ({"config.stages"} if job.config.stages else set())
    parent = {"run": job.store.url, "step": fork.start, "changes": sorted(changes)}
    place = {"directory": fork.store.url, "checkpoint.init_from": None, "checkpoint.fork_from": parent}
    document = make_document(
        dump_yaml(job.document.data),
        f"{job.store.url}/{SPEC}",
        {**values, **place},
        overrides,
        request.is_any_device,
        Trust(tuple(request.trust)),
    )
    validate_spec(document)
    return dump_yaml(document.data)


def adopt(request: TrialRequest, step: int) -> str:
    """Return the spec with which the fork with the change goes on after a trial from `step`, as the run would have.

    It saves and logs as the run does. Its lineage names the run and the change.
    """
    job = open_job(request.run, request.trust)
    return make_spec(request, job, Fork(NEW, request, step), {})


def advise_stages(request: TrialRequest) -> Advice | None:
    """Return the stage with which the run itself makes the change, from its newest checkpoint on; None if none can."""
    manifests = read_committed(open_store(request.run))
    keys = request.changed_keys
    if request.code is not None or request.python is not None or not manifests:
        return None
    job, step = open_job(request.run, request.trust), max(manifests)
    if step >= job.total_steps:
        return None
    text = make_spec(request, job, Fork(NEW, request, step), {})
    document = make_document(text, NEW, {}, (), is_any_device=False, trust=Trust(tuple(request.trust)))
    config = make_job(document, validate_spec(document)).config
    given = (job.document.data.get("config") or {}).get("stages") or []
    stages = config.list_advised_stages(keys, manifests[step].identity, step, given)
    return None if stages is None else Advice("config.stages", stages, f"to change the run itself from step {step} on,")


def _alters_batches(keys: Sequence[str]) -> bool:
    """Return True if a change of these keys gives a step other examples."""
    return any(
        key in ("seed", "config") or key.startswith(("config.data", "config.train.global_batch")) for key in keys
    )


def run_trial(request: TrialRequest) -> TrialResult:
    """Run both forks, or go on with them, and compare their rows.

    Raises:
        InvalidError: the trial is impossible, or a fork is refused.
        FailedError: the fork without the change failed.
        RetryableError: a fork ended several times before its end, for reasons outside of it.
    """
    old, new, failure = begin(request, open_job(request.run, request.trust))
    if failure is None:
        if (reason := old.advance(old.is_complete)) is not None:
            raise FailedError(f"without the change, {reason}")
        failure = new.advance(new.is_complete)
    return compare(request, old, new, failure)


def begin(request: TrialRequest, job: BaseTrainer) -> tuple[Fork, Fork, str | None]:
    """Begin a trial, or go on with it: return both forks, and why that with the change failed.

    The first checkpoint of that fork makes it independent of the run, which may delete its own. If it does so before,
    a newer one is taken. A change that is refused ends the trial before any step is made.
    """
    for is_last in [False] * _MAX_RETRIES + [True]:
        begun = find_begun(request)
        start = choose_start(request, job) if begun is None else begun
        old, new = write_specs(request, job, start)
        try:
            return old, new, new.advance(new.has_committed)
        except InvalidError:
            if is_last or request.step is not None or start in read_committed(job.store):
                raise
    raise AssertionError("the last try returns or raises")


def find_begun(request: TrialRequest) -> int | None:
    """Return the step that a trial in this directory began at; None if there is none."""
    fork = Fork(NEW, request, 0)
    if request.step is not None or read_owner(fork.store) is None or (text := fork.read_spec()) is None:
        return None
    document = parse_document(text, str(fork.spec_path))
    parent = validate_spec(document).checkpoint.fork_from
    return None if parent is None or not isinstance(parent.step, int) else parent.step


def compare(request: TrialRequest, old: Fork, new: Fork, failure: str | None) -> TrialResult:
    """Compare the rows of both forks."""
    rows = {row["step"]: row for row in new.read_rows()}
    pairs = [(row, rows[row["step"]]) for row in old.read_rows() if row["step"] in rows]
    comparisons = []
    # The judged ones come first, with their own margins.
    for name, criterion in {**request.criteria, **CRITERIA, **request.criteria}.items():
        values: list[list[float]] = [[], []]
        for side, row in ((side, row) for pair in pairs for side, row in enumerate(pair)):
            values[side].append(math.nan if (value := get_float(row, criterion.key)) is None else value)
        found = compare_paired(name, criterion, *values)
        comparisons += [] if found is None else [found]
    change = [*request.overrides]
    change += [f"code of {request.code}"] if request.code is not None else []
    change += [f"Python of {request.python}"] if request.python is not None else []
    return TrialResult(
        request.run,
        old.start,
        old.stop,
        change,
        comparisons,
        [*request.criteria],
        failure,
        failure is None and not any(True for pair in pairs for _ in compare_rows(*pair)),
        not _alters_batches(request.changed_keys),
    )
