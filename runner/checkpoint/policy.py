"""Policy: when to save, and which checkpoints to keep.

Saves are due by steps, by minutes, or at the interval that loses the least time, and at the steps that are kept
forever. Retention decides by step number, never by time and never by the order of a listing, so every listing gives the
same answer. Both decisions are pure functions of their arguments; the clock is an argument too.
"""

import enum
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from typing import Literal, NamedTuple

from runner.attempts.attempt import Attempt
from runner.checkpoint.manifest import CHECKPOINTS, Manifest, is_committed, read_committed, remove_files, uncommit
from runner.console import warn
from runner.spec import CheckpointConfig
from runner.storage import DeadlineError, JsonObject, Key, LocalStore, Store, encode_json, read_json, validate_record

# Time between failures.

# Of 16,384 GPUs 419 failed in 54 days: "The Llama 3 Herd of Models" (2024), section 3.3.4.
_DEVICE_HOURS_PER_FAILURE = 50_000.0
_HOURS_BETWEEN_FAILURES_MAX = 24.0  # assumed for few devices


class FailureRecord(NamedTuple):
    """Hours for which the ended attempts of a run were alive, and the number of them that failed."""

    hours: float = 0.0
    num_failures: int = 0


def count_failures(events: Iterable[JsonObject], attempt: int) -> FailureRecord:
    """Count the attempts before `attempt` that lost work. `events` are rows of the ledger, and need not be valid.

    An attempt that stopped with a save, was done, or ended with 1 or 2, which no supervisor retries, did not fail.
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    ended = set()
    for row in events:
        number, moment, event = row.get("attempt"), row.get("time"), row.get("event")
        # Only by the clock of process 0, since clocks of hosts differ.
        if type(number) is not int or not 0 < number < attempt or row.get("process") != 0:
            continue
        if type(moment) is float and math.isfinite(moment):
            first[number] = min(first.get(number, moment), moment)
            last[number] = max(last.get(number, moment), moment)
        is_saved = event == "preempt" and row.get("saved") is True
        if is_saved or event in ("done", "grow") or (event == "failed" and row.get("code") in (1, 2)):
            ended.add(number)
    seconds = sum(last[number] - first[number] for number in first)
    return FailureRecord(seconds / 3600, len(first.keys() - ended))


def estimate_hours_between_failures(num_devices: int, record: FailureRecord | None = None) -> float:
    """Return the expected hours between failures of the whole job.

    Without a record the job is assumed to fail once in 50,000 hours of a device, and at least once a day. This
    assumption weighs as much as one failure of `record`.
    """
    hours, num_failures = record or FailureRecord()
    assumed_hours = min(_HOURS_BETWEEN_FAILURES_MAX, _DEVICE_HOURS_PER_FAILURE / num_devices)
    return (assumed_hours + hours) / (1 + num_failures)


def compute_expected_goodput(
    interval_seconds: float, stall_seconds: float, restart_seconds: float, hours_between_failures: float
) -> float:
    """Return the share of time that is spent on steps which are kept.

    Each save stalls training. Each failure loses half an interval on average, and the time of a restart.
    """
    lost_seconds = interval_seconds / 2 + restart_seconds
    return interval_seconds / (interval_seconds + stall_seconds) / (1 + lost_seconds / (3600 * hours_between_failures))


_HOSTS_WITHOUT_REPLICAS_MAX = 64


def find_replica_advice(num_hosts: int, config: CheckpointConfig) -> str | None:
    """Return the advice to use replicas, None for a job of few hosts or one that has them."""
    if num_hosts <= _HOSTS_WITHOUT_REPLICAS_MAX or config.local_replicas:
        return None
    return (
        f"a failure of one of {num_hosts} hosts loses all steps since the last save; set local_directory, "
        "local_every_steps and local_replicas: 1, so that most restarts lose a few steps and read no bucket"
    )


# When to save.


def is_due(step: int, every_steps: int | Fraction | None, last_step: int | None = None) -> bool:
    """Return True if work that is due every `every_steps` steps is due at `step`: always at `last_step`, never at 0.

    The n-th multiple of a fraction is due at the first whole step that is not below it.
    """
    if step <= 0:
        return False
    if step == last_step:
        return True
    return every_steps is not None and step // every_steps > (step - 1) // every_steps


def compute_epoch_interval(every_epochs: float | None, steps_per_epoch: Fraction | None) -> Fraction | None:
    """Return the steps of `every_epochs` passes over the data, as a fraction; None if there are none."""
    # By the decimal that the user wrote: the nearest float could round up to one step too many.
    return None if every_epochs is None or steps_per_epoch is None else Fraction(str(every_epochs)) * steps_per_epoch


def is_overdue(now_seconds: float, since_seconds: float, every_minutes: float | None) -> bool:
    """Return True if `every_minutes` have passed since `since_seconds`."""
    return every_minutes is not None and now_seconds - since_seconds >= every_minutes * 60


class SaveKind(enum.Enum):
    """Destination of a save. A step that is saved goes into the fast tier too, if there is one."""

    FAST = "fast"  # into the fast tier alone
    DURABLE = "durable"  # into the run's directory; in a bucket left out while an earlier save is in progress
    REQUIRED = "required"  # into the run's directory, even if training must wait


def compute_best_interval_seconds(stall_seconds: float, durable_seconds: float, hours_between_failures: float) -> float:
    """Return the seconds between saves that lose the least time: sqrt(2 x stall x mean time between failures).

    Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly (2006) refines it where the
    stall, for which a save stops training, is not small against the interval. The interval is never shorter than the
    time until a save is durable, since the next save could not begin.
    """
    least_loss_seconds = math.sqrt(2 * stall_seconds * hours_between_failures * 3600)
    return max(least_loss_seconds, durable_seconds, 1.0)


class SavePolicy:
    """Decision at each step whether a save is due, by `checkpoint` of the spec. Called on every host.

    `every_minutes` is checked every `logging_every_steps`. `decide` broadcasts process 0's argument to every host,
    because clocks differ between hosts.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        logging_every_steps: int,
        decide: Callable[[bool], bool],
        clock: Callable[[], float] = time.monotonic,
        steps_per_epoch: Fraction | None = None,
    ):
        self._epoch_steps = compute_epoch_interval(config.every_epochs, steps_per_epoch)
        self._config, self._logging_every_steps = config, logging_every_steps
        self._decide, self._clock = decide, clock
        self._last_save_seconds = clock()

    def record_save(self) -> None:
        """Restart the interval: a durable save has begun, or a state was restored."""
        self._last_save_seconds = self._clock()

    def find_due_save(self, step: int, last_step: int, interval_seconds: float) -> SaveKind | None:
        """Return the kind of save that is due at `step`, None if none is. The same on every host.

        `interval_seconds` is that of `every: auto`, and used only with it.
        """
        config = self._config
        if is_due(step, config.every_steps if config.every is None else None, last_step):
            return SaveKind.REQUIRED if step == last_step else SaveKind.DURABLE
        # A step to keep forever must be saved, whatever the other intervals are.
        if is_due(step, self._epoch_steps) or is_due(step, config.keep_every_steps):
            return SaveKind.DURABLE
        every_minutes = config.every_minutes if config.every is None else interval_seconds / 60
        # `decide` is a collective, so every host must reach it: the conditions before it are equal on all hosts.
        if (
            every_minutes is not None
            and is_due(step, self._logging_every_steps)
            and self._decide(is_overdue(self._clock(), self._last_save_seconds, every_minutes))
        ):
            return SaveKind.DURABLE
        return SaveKind.FAST if is_due(step, config.local_every_steps) else None


# Retention.

Mode = Literal["min", "max"]


def find_superfluous_steps(
    metrics: Mapping[int, float | None],
    keep_last: int,
    keep_every_steps: int | None = None,
    best: Mode | None = None,
    roll_back_to: int | None = None,
    read_back: Collection[int] = (),
) -> list[int]:
    """Return the committed steps to delete, ascending.

    Args:
        metrics: the value that `best` compares, for each committed step.
        keep_last: number of newest steps to keep.
        keep_every_steps: multiples of this are kept.
        best: keep the step with the best value too; of equal values the older step.
        roll_back_to: keep the newest step up to this one too.
        read_back: steps of which every byte was read back before the commit; the newest of them is kept.
    """
    steps = sorted(metrics)
    kept = set(steps[-keep_last:])
    if keep_every_steps is not None:
        kept |= {step for step in steps if step % keep_every_steps == 0}
    if best is not None:
        kept |= {step for step in [find_best_step(metrics, best)] if step is not None}
    if roll_back_to is not None:
        kept |= set([step for step in steps if step <= roll_back_to][-1:])
    kept |= set([step for step in steps if step in read_back][-1:])
    return [step for step in steps if step not in kept]


METRIC = "metric.json"  # beside a manifest without a metric: what was measured after its commit

_METRIC_KEYS = (
    Key("metric", float, "Value that `checkpoint.keep_best` compares."),
    Key("end", bool, "True if the step has it only because the run ended there."),
)


class StepMetric(NamedTuple):
    """Value that `checkpoint.keep_best` compares, of one step."""

    at_end: float | None  # value of the step if the run ends there, or has not gone on yet
    # Value of the step of a longer run: none if it was evaluated only because the run ended there.
    before_end: float | None


def _get_step_metric(manifest: Manifest) -> StepMetric:
    carry = manifest.carry or {}
    return StepMetric(manifest.metric, carry.get("metric") if "end" in carry else manifest.metric)


def read_step_metric(store: Store, manifest: Manifest) -> StepMetric:
    """Return the value of a committed step, which may have been measured after its commit."""
    if manifest.metric is not None:
        return _get_step_metric(manifest)
    try:
        record = read_json(store, f"{CHECKPOINTS}/{manifest.name}/{METRIC}")
        validate_record(record, _METRIC_KEYS, [key.name for key in _METRIC_KEYS])
    except (FileNotFoundError, ValueError):  # none was measured, or the file is damaged
        return StepMetric(None, None)
    metric = float(record["metric"])
    return StepMetric(metric, None if record["end"] else metric)


def read_metrics(store: Store) -> dict[int, float | None]:
    """Return the value that `checkpoint.keep_best` compares, by committed step."""
    return select_metrics({step: read_step_metric(store, each) for step, each in read_committed(store).items()})


def select_metrics(steps: Mapping[int, StepMetric]) -> dict[int, float | None]:
    """Return the value to compare for each step, by whether the run has gone on behind it."""
    newest = max(steps, default=0)
    return {step: metric.at_end if step == newest else metric.before_end for step, metric in steps.items()}


def find_best_step(metrics: Mapping[int, float | None], mode: Mode) -> int | None:
    """Return the step with the best value, of equal values the older step; None if no step has a value."""
    measured = {step: value for step, value in sorted(metrics.items()) if value is not None and value == value}
    choose = min if mode == "min" else max
    return choose(measured, key=lambda step: measured[step]) if measured else None


def delete_step(attempt: Attempt, step: int) -> None:
    """Delete one committed step. Process 0 only. Raises `FencedError` or `OSError`."""
    attempt.fence.check()
    directory = f"{CHECKPOINTS}/{step}"
    # The manifest goes first: a kill in between leaves a directory that is not taken for a checkpoint.
    uncommit(attempt.store, directory, attempt.number)
    remove_files(attempt.store, directory, attempt.number)


class _CommittedStep(NamedTuple):
    """Values of a step by which it is kept or deleted."""

    metric: StepMetric
    roll_back_to: int | None
    read_back: bool


class Retention:
    """Committed steps of a run, and the rule by which they are kept. Process 0 only, one thread at a time.

    A separate thread deletes steps, so that a save does not wait for the deletion of many files. `scan`, `add` and
    `forget_after` first wait for the deletion in progress, and raise its error.
    """

    def __init__(self, attempt: Attempt, keep_last: int, keep_every_steps: int | None = None, best: Mode | None = None):
        self._attempt = attempt
        self._rule = (keep_last, keep_every_steps, best)
        self._steps: dict[int, _CommittedStep] = {}
        # Of the thread, while it deletes.
        self._untried: list[int] = []  # steps to delete
        self._undeleted: list[int] = []  # steps that could not be deleted, the one to try next first
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="delete")
        self._deletion: Future[None] | None = None

    def scan(self) -> None:
        """Read which steps are committed, and begin to delete what an attempt that was killed should have deleted."""
        self.wait()
        store, self._steps = self._attempt.store, {}
        for step, manifest in read_committed(store).items():
            # Without a rule for the best step no value matters, and each is a file of its own.
            metric = _get_step_metric(manifest) if self._rule[2] is None else read_step_metric(store, manifest)
            self._steps[step] = _CommittedStep(metric, manifest.roll_back_to, manifest.read_back)
        self._untried, self._undeleted = [], []
        if self._steps and isinstance(store, LocalStore):
            # An attempt that was killed right after it created a manifest has not flushed its name.
            store.flush_names(f"{CHECKPOINTS}/{max(self._steps)}")
        self._prune()

    def add(self, manifest: Manifest) -> None:
        """Add a step that has just been committed, and begin to delete the steps that it makes superfluous."""
        self.wait()
        # A step that has just been committed has no value that was measured later.
        self._steps[manifest.step] = _CommittedStep(
            _get_step_metric(manifest), manifest.roll_back_to, manifest.read_back
        )
        self._prune()

    def add_metric(self, step: int, metric: float, *, is_end: bool) -> None:
        """Add the value of a step that was evaluated after its commit; `is_end` if only because the run ends there."""
        known = self._steps.get(step)
        if known is not None and known.metric.at_end is None:
            self._attempt.fence.check()
            record = {"metric": metric, "end": is_end}
            self._attempt.store.write(f"{CHECKPOINTS}/{step}/{METRIC}", encode_json(record))
            self._steps[step] = known._replace(metric=StepMetric(metric, None if is_end else metric))

    def forget_after(self, step: int) -> list[int]:
        """Forget the steps beyond `step`, which is loaded again, and return them."""
        self.wait()
        later = sorted(other for other in [*self._steps, *self._untried, *self._undeleted] if other > step)
        self._steps = {other: committed for other, committed in self._steps.items() if other <= step}
        self._untried = [other for other in self._untried if other <= step]
        self._undeleted = [other for other in self._undeleted if other <= step]
        # Of a step that could not be deleted there may be no manifest any more, and so no checkpoint.
        return [other for other in later if is_committed(self._attempt.store, str(other))]

    def _prune(self) -> None:
        metrics = select_metrics({step: committed.metric for step, committed in self._steps.items()})
        # A spike that is running may still be rolled back, as the newest state knows.
        roll_back_to = self._steps[max(self._steps)].roll_back_to if self._steps else None
        read_back = {step for step, committed in self._steps.items() if committed.read_back}
        superfluous = find_superfluous_steps(metrics, *self._rule, roll_back_to, read_back)
        self._untried += superfluous
        # From here they count for no rule, since their manifests may be gone.
        self._steps = {step: committed for step, committed in self._steps.items() if step not in superfluous}
        if self._untried or self._undeleted:
            self._deletion = self._worker.submit(self._delete)

    def _delete(self) -> None:
        # One of those that could not be deleted is tried again at each save, so that a save has a bounded amount of
        # work, and all of them at the next start.
        again = self._undeleted[:1]
        for step in [*again, *self._untried]:
            is_deleted = True
            try:
                delete_step(self._attempt, step)
            except DeadlineError as error:
                # The whole store does not answer, so the other steps would take as long.
                warn(f"checkpoint {step} cannot be deleted, will be tried again: {error}")
                return
            except OSError as error:
                is_deleted = False
                if step not in again:
                    warn(f"checkpoint {step} cannot be deleted and stays, will be tried again: {error}")
            (self._undeleted if step in again else self._untried).remove(step)
            if not is_deleted:
                self._undeleted.append(step)

    def wait(self) -> None:
        """Wait for the deletion in progress, and raise its error, such as `FencedError`."""
        deletion, self._deletion = self._deletion, None
        if deletion is not None:
            deletion.result()

    def close(self) -> None:
        """Stop the thread, after the deletion in progress."""
        self._worker.shutdown()
