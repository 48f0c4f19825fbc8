"""Replay of a step: its state is computed again from an earlier checkpoint, and compared with what the run recorded."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from runner.checkpoint.fingerprint import compute_fingerprint
from runner.history.records import History
from runner.metrics.file import read_rows
from runner.metrics.rows import Row
from runner.retrace.leaves import StepInspection, inspect_step
from runner.retrace.scratch import Retracing
from runner.storage import JsonObject, Store, read_log
from runner.train.features.stability import read_roll_backs
from runner.trainer import BaseTrainer

ROUNDING = 1e-3  # largest relative difference of the losses where equal bits are not promised
LOSS = "train/loss"
_UNCOMPARED = "perf/"  # times and sizes, which no run has twice
_DECISIVE = ("versions", "cpus", "options")  # of the environment of an attempt: with others the bits may differ

Verdict = Literal["same bits", "within rounding", "different", "not compared"]


class Difference(NamedTuple):
    """First value of a row that differs."""

    step: int
    key: str
    recorded: Any
    replayed: Any


@dataclass(frozen=True)
class ReplayResult:
    """Outcome of a replay."""

    step: int
    start: int  # completed steps from which it began
    stop: int  # last step that was repeated: behind `step`, if only a later one could be compared
    fingerprint: str  # of the state after `step`
    recorded_fingerprints: Mapping[int, str]  # those of the run, by committed step that was repeated
    fingerprints: Mapping[int, str]  # those of the replay, by the same steps
    num_rows: int  # rows that were compared
    difference: Difference | None  # the first one
    loss_deviation: float  # largest relative difference of a loss
    promises_bits: bool  # True if hardware and program are those of the run, or the run promises equal bits on others
    changes: Sequence[str]  # differences of program, versions or hardware
    notes: Sequence[str]  # history of the step in the run
    inspection: StepInspection | None = None  # figures of the step, if they were asked for

    @property
    def verdict(self) -> Verdict:
        """Outcome in words."""
        if not self.num_rows and not self.fingerprints:
            return "not compared"
        if self.difference is None and self.fingerprints == self.recorded_fingerprints:
            return "same bits"
        return "within rounding" if not self.promises_bits and self.loss_deviation <= ROUNDING else "different"

    def to_json(self) -> JsonObject:
        """Return the result as plain data."""
        return {
            "step": self.step,
            "from_checkpoint": self.start,
            "compared_to_step": self.stop,
            "verdict": self.verdict,
            "fingerprint": self.fingerprint,
            "recorded_fingerprints": {str(step): found for step, found in self.recorded_fingerprints.items()},
            "fingerprints": {str(step): found for step, found in self.fingerprints.items()},
            "rows": self.num_rows,
            "first_difference": None if self.difference is None else self.difference._asdict(),
            "loss_deviation": self.loss_deviation,
            "same_bits_promised": self.promises_bits,
            "changes": [*self.changes],
            "notes": [*self.notes],
            **({} if self.inspection is None else self.inspection.to_json()),
        }

    def format(self) -> Iterator[str]:
        """Yield the lines for people."""
        yield from self.notes
        for change in self.changes:
            yield f"other than in the run: {change}"
        if any(change.startswith("program of the train step") for change in self.changes):
            yield "if the code has changed since, --code DIRECTORY uses modules of a directory with the former code"
        compared = [f"{self.num_rows} row{'s' * (self.num_rows > 1)}"] if self.num_rows else []
        compared += [f"fingerprint of step {step}" for step in self.recorded_fingerprints]
        where = f"step {self.step}, from {f'checkpoint {self.start}' if self.start else 'the beginning'}"
        against = f", compared with {' and '.join(compared)}" if compared else ""
        yield f"{where}: {self.verdict.upper()}{against}"
        if self.difference is not None:
            step, key, recorded, replayed = self.difference
            yield f"first difference: step {step}, {key}: the run has {recorded!r}, the replay {replayed!r}"
        for step, recorded in self.recorded_fingerprints.items():
            if self.fingerprints[step] != recorded:
                yield f"fingerprint of step {step}: the run has {recorded}, the replay {self.fingerprints[step]}"
        if self.verdict in ("within rounding", "different") and self.num_rows:
            yield f"largest relative difference of a loss: {self.loss_deviation:.2g}"
        if self.verdict == "not compared":
            yield "the run has recorded nothing behind this step yet, so nothing proves the replay"
        yield f"fingerprint of step {self.step}: {self.fingerprint}"
        if self.inspection is not None:
            yield ""
            yield from self.inspection.format()


def replay(
    retracing: Retracing, step: int, history: History, is_inspected: bool = False, save_path: Path | None = None
) -> ReplayResult:
    """Repeat all steps to `step`, and on to the next one that the run has recorded if none before it was.

    If `is_inspected`, the result has the figures of the arrays in `step`, which are written to `save_path` if it is
    given.
    """
    notes = describe_past(retracing.run, step, history)
    recorded = {row["step"]: row for row in read_rows(retracing.run)}
    known = {manifest.step: manifest.fingerprint for manifest in retracing.manifests.values() if manifest.fingerprint}
    retracing.advance_to(step - is_inspected)
    inspection = inspect_step(retracing, save_path) if is_inspected else None
    fingerprint = compute_fingerprint(retracing.job.state)
    points = {each for each in {*recorded, *known} if each > retracing.start}
    stop = step if any(each <= step for each in points) else min(points, default=step)
    retracing.advance_to(stop)
    committed = {each: known[each] for each in known if each in (step, stop)}
    found = {step: fingerprint, stop: compute_fingerprint(retracing.job.state)}
    differences, deviation, num_rows = [], 0.0, 0
    for row in retracing.read_rows():
        if row["step"] in recorded:
            num_rows += 1
            differences += [*compare_rows(recorded[row["step"]], row)]
            deviation = max(deviation, compare_losses(recorded[row["step"]].get(LOSS), row.get(LOSS)))
    changes, promises_bits = compare_setup(retracing)
    return ReplayResult(
        step,
        retracing.start,
        stop,
        fingerprint,
        committed,
        {each: found[each] for each in committed},
        num_rows,
        differences[0] if differences else None,
        deviation,
        promises_bits,
        changes,
        notes,
        inspection,
    )


def compare_rows(recorded: Row, replayed: Row) -> Iterator[Difference]:
    """Yield the values that differ, without times and sizes."""
    for key in sorted(recorded.keys() | replayed.keys()):
        values = [None if value != value else value for value in (recorded.get(key), replayed.get(key))]
        if not key.startswith(_UNCOMPARED) and values[0] != values[1]:
            yield Difference(recorded["step"], key, recorded.get(key), replayed.get(key))


def compare_losses(recorded: Any, replayed: Any) -> float:
    """Return the relative difference of two losses; infinite if only one of them is a number."""
    values = [
        value if isinstance(value, int | float) and math.isfinite(value) else None for value in (recorded, replayed)
    ]
    if None in values:
        return 0.0 if values == [None, None] else math.inf
    return abs(recorded - replayed) / max(abs(recorded), abs(replayed), 1e-9)


def compare_hardware(job: BaseTrainer, saved: JsonObject) -> list[str]:
    """Return what differs in the hardware of this process from that of a manifest: a line each."""
    own = job.train_setup.describe_hardware(1)
    return [f"{key} {value}, not {saved[key]}" for key, value in own.items() if key in saved and saved[key] != value]


def compare_setup(retracing: Retracing) -> tuple[list[str], bool]:
    """Return what differs from the run at its checkpoint, a line each, and whether equal bits are promised here.

    They are if program, versions and CPU threads are those of the run. The hardware is too, unless the run has
    `same_bits_devices`.
    """
    job, before = retracing.job, retracing.environment
    hardware = compare_hardware(job, retracing.hardware)
    # What the job itself has found.
    events = [event for event in read_log(job.store, "events") if event.get("event") == "changed"]
    found = [str(change) for event in events for change in event.get("changes", [])]
    # The spec is that of the run, with defaults and `auto` filled in.
    lines = hardware + [change for change in found if not change.startswith("config.")]
    if any(key in before and before[key] != job.attempt.environment.get(key) for key in _DECISIVE):
        return lines, False
    own = job.train_setup.describe_hardware(1)
    if any(retracing.hardware.get(key) != value for key, value in own.items()):
        return lines, job.config.train.same_bits_devices is not None
    return lines, not any(event.get("program") for event in events)


def describe_past(run: Store, step: int, history: History) -> list[str]:
    """Return the history of a step that a run has made more than once: a line for each event."""
    lines = []
    made = [
        attempt
        for attempt in history.attempts
        if attempt.resumed_step is not None and attempt.resumed_step < step <= (attempt.reached_step or 0)
    ]
    for attempt in made[:-1]:
        lines.append(f"attempt {attempt.number} made step {step} too, and lost it; it was computed again")
    for record in read_roll_backs(run):
        if record["begin"] < step <= record["detected"]:
            lines.append(
                f"step {step} was rolled back, because of {record['reason']} at step {record['detected']}: "
                f"{record['batches']} batches after step {record['begin']} were skipped, and the step was made again"
            )
    return lines
