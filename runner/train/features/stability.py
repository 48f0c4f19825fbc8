"""Stability policy: skip the update of a bad step, or go back to a checkpoint before a spike that lasts.

The policy is an auxiliary state (`runner.train.auxiliary`) that judges each step inside the compiled program, so that
the host does not wait for it. A skipped update leaves parameters, variables, moments, averages and the other auxiliary
states as they were; the step itself counts, and so do learning-rate schedule, random key and position in the data.

**Spikes.** A value is a spike if it is more than `sigmas` standard deviations above the mean of the last `over_steps`
accepted steps; there is no spike before that many steps were accepted. This is the rule of OLMo-core and Levanter
(`SkipStepOptimizer`, `SkipStepConfig`), which begin at half of the window and keep skipped values in it. Here the
window holds accepted values only, so that a stretch of bad data cannot raise its own threshold; a lasting change of
level ends the run after `max_consecutive_skips` instead of being accepted.

**Roll-back.** The state counts the successive steps whose loss is above the threshold. When the job has fetched
`after_steps` such losses, or a single value that is not finite, it is rolled back: it skips a range of batches that
begins shortly before the first of these steps, and continues from a checkpoint before that range. The steps between the
checkpoint and the range are repeated with their own data. The trajectory is therefore a function of the spec alone: it
does not depend on which checkpoints exist, when the values are fetched, or how often the job is killed. The protocol:

1. Process 0 creates `roll_backs/<number>`, durably, and only once (`Stability.rewind`). From this moment on every start
   completes the roll-back (`Stability.before_restore`).
2. The newest checkpoint whose step is not after the beginning of the range is loaded (`Session.go_back`). Later
   checkpoints belong to the discarded trajectory and are quarantined, after a kill by the next start.
3. The range is written into the state, and saved with it. A restored state lacks ranges of roll-backs after its save;
   they are added from the records (`Stability.on_restored`).

**A change of the spec.** A roll-back follows from the steps up to the one at which its spike was detected, so each
record holds the trajectory of the spec that made it. If the present spec differs before that step, or ends before it,
the skipped range no longer follows from it. A run that has not passed the beginning of the range withdraws the
roll-back (`Stability.before_restore`) and finds out again; one that has passed it cannot continue
(`Stability.validate_newest`).

The window holds the observed values, which are summed in a fixed order. If the values are the same on any number of
devices (`train.same_bits_devices`), so are the decisions.

Shape legend: N steps of the window.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from runner.attempts.attempt import Attempt
from runner.attempts.events import ROLL_BACK_FOLDER, ROLL_BACK_KEYS, ROLL_BACKS_MAX
from runner.checkpoint.fork import read_parent_manifest
from runner.checkpoint.manifest import Manifest, read_committed, read_newest_manifest
from runner.checkpoint.restore import quarantine
from runner.config import RollBackConfig, StabilityConfig, TrainerConfig
from runner.data import SkippedBatches
from runner.errors import DivergedError, InvalidError, ResumeError, StateError
from runner.job import RestoreableJob
from runner.metrics.meta import CONSECUTIVE_SKIPS, GRAD_NORM, HIGH_LOSS_STEPS, ROLL_BACKS, SKIPPED_UPDATES, RowValue
from runner.metrics.rows import Row
from runner.spec import Trajectory
from runner.storage import (
    JsonObject,
    Key,
    Store,
    create_file,
    encode_json,
    parse_number,
    read_json,
    read_log,
    validate_record,
)
from runner.train.auxiliary import AuxiliaryState, Scalars, StepOutcome
from runner.train.feature import Feature, RewindError
from runner.train.state import TrainState

STABILITY = "stability"
_SKIPPED, _CONSECUTIVE, _ACCEPTED, _WINDOW = "skipped", "consecutive", "accepted", "window"
_HIGH, _LOW, _LOSSES, _SKIPPED_BATCHES = "high", "low", "losses", "passed_over"
_RECORD_KEYS = (Key("begin", int, "Step after which batches are skipped."), *ROLL_BACK_KEYS)
_IDENTITY, _WITHDRAWN = "identity", ".withdrawn."  # key of a record; between the number and the attempt in a name
_INT32_MAX = 2**31 - 1

FirstChange = Callable[[Trajectory], int | None]


class Stability(Feature):
    """Skipped updates and roll-backs of a run.

    `skipped` are the ranges in the state of the job. A state that was saved before a roll-back gets its range when it
    is restored, so that `skipped` has one range for each record; those that a fork has inherited come first.

    Attributes:
        records: records of the roll-backs of this run, in order. Empty until `before_restore`.
    """

    key = STABILITY
    derived_keys = (ROLL_BACK_FOLDER,)

    def __init__(self, config: TrainerConfig[Any], run_config: TrainerConfig[Any]):
        super().__init__(config, run_config)
        self._policy = config.stability.roll_back
        self.records: list[JsonObject] = []
        self._withdrawn: list[tuple[int, SkippedBatches]] = []

    @staticmethod
    def is_on(config: TrainerConfig[Any]) -> bool:
        """Return True if the config skips updates or rolls back."""
        return config.stability.is_on

    def make_auxiliary(self) -> AuxiliaryState:
        """Return the state of the policy."""
        return make_stability(self.config.stability)

    def identity(self) -> Trajectory:
        """Return the ranges that roll-backs have skipped."""
        return {ROLL_BACK_FOLDER: [[*each] for each in self.skipped]} if self.skipped else {}

    def is_discarded(self, saved: Trajectory, step: int) -> bool:
        """Return True if a state saved at `step` was discarded by a roll-back."""
        return is_discarded(saved, step, self.records)

    def validate_newest(self, job: RestoreableJob, newest: Manifest) -> None:
        """Raise `ResumeError` if the run has passed a skipped range that no longer follows from the spec."""
        if self._policy is None:
            return
        find_change = job.make_run_identity(job.identity()).find_change
        record = _find_unfounded(read_roll_backs(job.store), newest.identity, find_change, job.total_steps)
        if record is not None and record["begin"] < newest.step:
            begin, detected = record["begin"], record["detected"]
            raise ResumeError(
                f"{job.store.url}: step {newest.step} is behind {record['batches']} batches that were skipped after "
                f"step {begin}, because of the spike that was detected at step {detected}; this does not follow from "
                f"the spec, which now differs, or ends, before that step; change it from step {detected} on, or fork "
                f"from a checkpoint of step {begin} or earlier"
            )

    def find_earliest_rewind(self, state: TrainState) -> int | None:
        """Return the earliest step to which the run may be rolled back. Waits for the device."""
        if self._policy is None:
            return None
        # The cause would be the current spike, or one that begins with the next step.
        step, high = jax.device_get((state.step, state.riders[STABILITY][_HIGH]))
        return max(int(step) - int(high) - self._policy.steps_before, 0)

    def watch(self, step: int, loss: float, meta: Mapping[str, Any], values: dict[str, RowValue]) -> bool:
        """Count skipped updates and spikes; see `Feature.watch`."""
        policy, num_skips = self.config.stability, 0
        grad_norm = float(meta.get(GRAD_NORM, 0.0))
        found = f"loss {loss}, gradient norm {grad_norm}"
        if policy.skips_updates:
            num_skips = int(meta[CONSECUTIVE_SKIPS])
            del values[CONSECUTIVE_SKIPS]
            values |= {SKIPPED_UPDATES: int(meta[SKIPPED_UPDATES])}
            if num_skips >= policy.max_consecutive_skips:
                raise DivergedError(
                    f"step {step}: training diverged: {num_skips} successive updates were skipped, the last with "
                    f"{found}"
                )
        if policy.roll_back is not None:
            num_high = int(meta[HIGH_LOSS_STEPS])
            values |= {ROLL_BACKS: int(meta[ROLL_BACKS]), HIGH_LOSS_STEPS: num_high}
            is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
            if policy.non_finite == "roll_back" and not is_finite:
                raise RewindError(self, step - max(num_high, 1) + 1, step, found)
            if num_high >= policy.roll_back.after_steps:
                raise RewindError(self, step - num_high + 1, step, f"{found}, {num_high} steps with a high loss")
        return num_skips > 0

    def is_suspect(self, row: Row) -> bool:
        """Return True if the step has a high loss, which may be the beginning of a spike that lasts."""
        return bool(row.get(f"train/{HIGH_LOSS_STEPS}"))

    def before_restore(self, job: RestoreableJob) -> None:
        """Withdraw roll-backs that no longer follow from the spec, and complete the others."""
        if self._policy is None:
            return
        attempt, fork = job.attempt, job.spec.checkpoint.fork_from
        find_first_change, total_steps = job.make_run_identity(job.identity()).find_change, job.total_steps

        def complete() -> tuple[list[JsonObject], list[list[int]]]:
            store, newest = attempt.store, read_newest_manifest(attempt.store)
            parent = None
            if newest is None and fork is not None:
                parent, newest = read_parent_manifest(fork)
            records = read_roll_backs(store if parent is None else parent)
            unfounded = _find_unfounded(
                records, {} if newest is None else newest.identity, find_first_change, total_steps
            )
            void = [] if unfounded is None else records[records.index(unfounded) :]
            if parent is not None:  # the parent is only read
                return [], [*_read_withdrawn(parent), *([each["number"], *_get_range(each)] for each in void)]
            for record in reversed(void):
                withdraw_roll_back(attempt, record)
            return complete_roll_backs(attempt), _read_withdrawn(store)

        self.records, withdrawn = attempt.hosts.run_on_main(complete)
        self._withdrawn = [(number, SkippedBatches(*skipped)) for number, *skipped in withdrawn]

    def on_restored(self, job: RestoreableJob) -> None:
        """Add the ranges of the roll-backs that were recorded after the restored state was saved.

        Raises `ResumeError` if a record is missing.
        """
        if self._policy is not None:
            job.state = self.restore(job.state, job.step, job.store.url)
            job.checkpointer.set_identity(job.identity())

    def restore(self, state: TrainState, step: int, url: str) -> TrainState:
        """Return a restored state of a step with the ranges of all roll-backs; `url` is that of the run, for errors."""
        rows = np.asarray(jax.device_get(state.riders[STABILITY][_SKIPPED_BATCHES])).tolist()
        saved = in_state = tuple(SkippedBatches(begin, num_batches) for begin, num_batches in rows if num_batches)
        live = {(record["number"], _get_range(record)) for record in self.records}
        for number, skipped in enumerate(saved, 1):
            # A range that the run has passed is part of its past; a fork takes it over as it is.
            if (number, skipped) in self._withdrawn and (number, skipped) not in live and skipped.begin >= step:
                saved = saved[: number - 1]
                break
        newer = [record for record in self.records if record["number"] > len(saved)]
        if newer and newer[0]["number"] > len(saved) + 1:
            raise ResumeError(
                f"{url}: {ROLL_BACK_FOLDER}/{len(saved) + 1} is missing, and step {step} was saved before that "
                "roll-back; restore the file"
            )
        self.skipped = (*saved, *map(_get_range, newer))
        return replace_skipped_batches(state, self.skipped) if self.skipped != in_state else state

    def adopt_records(self, identity: Trajectory, store: Store) -> None:
        """Take over the ranges that a run has skipped, to read its data: those of its newest checkpoint and records.

        `identity` is that of the checkpoint. Raises `InvalidError` if a record is damaged.
        """
        saved = [SkippedBatches(*skipped) for skipped in identity.get(ROLL_BACK_FOLDER, [])]
        newer = [record for record in read_roll_backs(store) if record["number"] > len(saved)]
        self.skipped = (*saved, *map(_get_range, newer))

    def rewind(
        self,
        job: RestoreableJob,
        cause: RewindError,
        data_start: int,
        batch_examples: int,
        list_rows_after: Callable[[int], Sequence[Row]],
    ) -> list[int]:
        """Decide on the range to skip because of a spike, and record it. Call it when no save is in progress.

        From this moment on, every start completes the roll-back. The rows after the checkpoint are kept in the record
        alone. For the arguments see `Feature.rewind`.
        """
        attempt, hosts, policy, made = job.attempt, job.attempt.hosts, self._policy, self.skipped
        assert policy is not None, "only a job with this policy finds spikes"
        if len(made) >= policy.at_most:
            tried = ", ".join(f"{number} batches after step {begin}" for begin, number in made)
            raise DivergedError(f"{cause}; all {len(made)} allowed roll-backs have been made, and skipped {tried}")
        begin, number = plan_roll_back(policy, cause.first, batch_examples, made)
        begin, number = max(begin, data_start), number - max(data_start - begin, 0)
        committed = hosts.run_on_main(lambda: [step for step in sorted(read_committed(attempt.store)) if step <= begin])
        if not committed:
            raise DivergedError(f"{cause}; no checkpoint of step {begin} or earlier is left to go back to")
        record = {
            "number": len(made) + 1,
            "begin": begin,
            "batches": number,
            "first": cause.first,
            "detected": cause.step,
            "reason": cause.reason,
        }
        more = {_IDENTITY: {key: value for key, value in job.identity().items() if key != ROLL_BACK_FOLDER}}
        hosts.run_on_main(lambda: record_roll_back(attempt, record | more | {"rows": list_rows_after(begin)}))
        self.records = [*self.records, record | more]
        attempt.say(
            f"rolled back: {cause.reason} at step {cause.step}; {number} batches after step {begin} are skipped"
        )
        return committed[::-1]


def make_stability(config: StabilityConfig) -> AuxiliaryState:
    """Return the policy of a config with `is_on`."""
    spike, roll_back, skips_non_finite = config.spike, config.roll_back, config.non_finite == "skip"

    def init(params: Any) -> Any:
        # Each leaf is an array of its own, because the step donates them.
        def make_counts(*names: str) -> Any:
            return {name: jnp.zeros((), jnp.int32) for name in names}

        state = make_counts(_SKIPPED, _CONSECUTIVE) if config.skips_updates else {}
        if spike is not None:
            state |= make_counts(_ACCEPTED) | {_WINDOW: jnp.zeros(spike.over_steps, jnp.float32)}
        if roll_back is not None:
            state |= make_counts(_HIGH, _LOW) | {_LOSSES: jnp.zeros(roll_back.over_steps, jnp.float32)}
            state |= {_SKIPPED_BATCHES: jnp.zeros((ROLL_BACKS_MAX, 2), jnp.int32)}
        return state

    def judge(before: Any, outcome: StepOutcome) -> tuple[jax.Array, Any, Scalars]:
        is_skipped = jnp.bool_(False)
        after: dict[str, Any] = {}
        scalars: Scalars = {}
        if config.skips_updates:
            is_skipped, after, scalars = judge_skip(before, outcome)
        if roll_back is not None:
            more, more_scalars = watch_loss(before, outcome, roll_back)
            after, scalars = after | more, scalars | more_scalars
        return ~is_skipped, after, scalars

    def judge_skip(before: Any, outcome: StepOutcome) -> tuple[jax.Array, Any, Scalars]:
        is_finite = jnp.isfinite(outcome.loss) & jnp.isfinite(outcome.grad_norm)
        # With `non_finite: stop` the host ends the run, so the state does not matter.
        is_skipped = ~is_finite if skips_non_finite else jnp.bool_(False)
        after = {}
        if spike is not None:
            value = outcome.grad_norm if config.watches_grad_norm else outcome.loss
            is_skipped |= is_finite & is_spike(before[_WINDOW], before[_ACCEPTED], value, spike.sigmas)
            is_accepted = is_finite & ~is_skipped & outcome.has_target
            after[_WINDOW], after[_ACCEPTED] = _push(before[_WINDOW], before[_ACCEPTED], value, is_accepted)
        # A step without a target neither counts as skipped nor ends a series of skips.
        is_skipped &= outcome.has_target
        after[_SKIPPED] = before[_SKIPPED] + is_skipped
        following = jnp.where(is_skipped, before[_CONSECUTIVE] + 1, 0)
        after[_CONSECUTIVE] = jnp.where(outcome.has_target, following, before[_CONSECUTIVE])
        scalars = {SKIPPED_UPDATES: after[_SKIPPED], CONSECUTIVE_SKIPS: after[_CONSECUTIVE]}
        return is_skipped, after, scalars

    return AuxiliaryState(STABILITY, init, judge=judge)


def watch_loss(before: Any, outcome: StepOutcome, config: RollBackConfig) -> tuple[Any, Scalars]:
    """Return (leaves after a step, scalars) of the threshold of a roll-back. To be traced."""
    # A loss that is not finite, or no loss, neither begins nor ends a series of steps above the threshold.
    is_known = jnp.isfinite(outcome.loss) & jnp.isfinite(outcome.grad_norm) & outcome.has_target
    is_high = is_known & is_spike(before[_LOSSES], before[_LOW], outcome.loss, config.loss_above_sigmas)
    losses, low = _push(before[_LOSSES], before[_LOW], outcome.loss, is_known & ~is_high)
    longer = before[_HIGH] + 1
    high = jnp.where(is_known, jnp.where(is_high, longer, 0), jnp.where(before[_HIGH] > 0, longer, 0))
    skipped = before[_SKIPPED_BATCHES]
    num_roll_backs = jnp.sum((skipped[:, 1] > 0) & (skipped[:, 0] < outcome.step), dtype=jnp.int32)
    after = {_LOSSES: losses, _LOW: low, _HIGH: high, _SKIPPED_BATCHES: skipped}
    return after, {ROLL_BACKS: num_roll_backs, HIGH_LOSS_STEPS: high}


def _push(
    window_N: jax.Array, num_accepted: jax.Array, value: jax.Array, is_accepted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return window and number of accepted values, with `value` in the place of the oldest one if it is accepted."""
    N = window_N.shape[0]
    is_oldest_N = is_accepted & (jnp.arange(N) == num_accepted % N)
    return jnp.where(is_oldest_N, value, window_N), num_accepted + is_accepted


def is_spike(window_N: jax.Array, num_accepted: jax.Array, value: jax.Array, sigmas: float) -> jax.Array:
    """Return True if `value` is more than `sigmas` standard deviations above the mean of a full window."""
    N = window_N.shape[0]
    mean = _sum_pairwise(window_N) / N
    # The barrier keeps XLA from fusing squares and sum to multiply-adds, which would depend on the code around them.
    squares_N = lax.optimization_barrier((window_N - mean) ** 2)
    deviation = jnp.sqrt(_sum_pairwise(squares_N) / (N - 1))
    # If all values are equal, their deviation gives no threshold.
    return (num_accepted >= N) & (deviation > 0) & (value - mean > jnp.float32(sigmas) * deviation)


def _sum_pairwise(values_N: jax.Array) -> jax.Array:
    """Return the sum, added in an order that does not depend on how it is compiled."""
    while (N := values_N.shape[0]) > 1:
        half = -(-N // 2)
        values_N = values_N[:half] + jnp.pad(values_N[half:], (0, 2 * half - N))
    return values_N[0]


# Roll-backs, on the host.


def plan_roll_back(
    config: RollBackConfig, first: int, batch_examples: int, made: Sequence[SkippedBatches]
) -> SkippedBatches:
    """Return the range to skip because of a spike that begins with step `first`; `made` are earlier ranges."""
    # A range never begins before an earlier one: otherwise the data of the earlier one would be used again.
    begin = max(first - 1 - config.steps_before, made[-1].begin if made else 0)
    return SkippedBatches(begin, first - 1 - begin + -(-config.skip_examples // batch_examples))


def _find_unfounded(
    records: Sequence[JsonObject], saved: Trajectory, find_first_change: FirstChange, total_steps: int
) -> JsonObject | None:
    """Return the first record that no longer follows from the spec, which ends at `total_steps`; None if all do.

    `find_first_change` returns the steps before the first update that differs from an earlier trajectory; None if none
    differs. A record of an earlier version has no trajectory: `saved`, that of the newest checkpoint, stands for it.
    """
    for record in records:
        first = find_first_change(record.get(_IDENTITY, saved))
        if record["detected"] > (total_steps if first is None else min(first, total_steps)):
            return record
    return None


def _get_range(record: JsonObject) -> SkippedBatches:
    return SkippedBatches(record["begin"], record["batches"])


def withdraw_roll_back(attempt: Attempt, record: JsonObject) -> None:
    """Withdraw a roll-back: its record gets another name, which keeps its range out of restored states. Process 0 only.

    A kill between the two writes leaves the record, which the next start withdraws again.
    """
    store, number = attempt.store, record["number"]
    attempt.fence.check()
    create_file(store, f"{ROLL_BACK_FOLDER}/{number}{_WITHDRAWN}{attempt.number}", encode_json(record))
    store.remove(f"{ROLL_BACK_FOLDER}/{number}")
    attempt.say(
        f"withdrew roll-back {number}, which would skip {record['batches']} batches after step {record['begin']}: it "
        "does not follow from the changed spec"
    )
    attempt.events.append("roll_back_withdrawn", record["begin"], number=number, batches=record["batches"])


def _read_withdrawn(store: Store) -> list[list[int]]:
    """Return number, begin and batches of each withdrawn roll-back. Raises `InvalidError` if a record is damaged."""
    found = []
    for name in store.list_names(ROLL_BACK_FOLDER):
        number, mark, _ = name.partition(_WITHDRAWN)
        if mark:
            record = _read_record(store, name)
            found.append([int(number), record["begin"], record["batches"]])
    return found


def record_roll_back(attempt: Attempt, record: JsonObject) -> None:
    """Record a roll-back, before it is carried out. Process 0 only.

    Raises `StateError` if another roll-back has this number, so that the run has two different trajectories.
    """
    store, name = attempt.store, f"{ROLL_BACK_FOLDER}/{record['number']}"
    attempt.fence.check()
    try:
        create_file(store, name, encode_json(record | {"time": time.time(), "attempt": attempt.number}))
    except FileExistsError:
        # A suspended process of an earlier attempt may have recorded the same decision.
        known = _read_record(store, str(record["number"]))
        if any(known.get(key) != record[key] for key in ("begin", "batches")):
            raise StateError(f"{store.url}/{name} skips other data than this attempt found") from None
    _append_event(attempt, record)
    attempt.events.flush()


def _append_event(attempt: Attempt, record: JsonObject) -> None:
    attempt.events.append("roll_back", record["begin"], **{key.name: record[key.name] for key in ROLL_BACK_KEYS})


def complete_roll_backs(attempt: Attempt) -> list[JsonObject]:
    """Complete roll-backs of killed attempts, and return all records. Process 0 only, before the restore."""
    records = read_roll_backs(attempt.store)
    if not records:
        return []
    events = read_log(attempt.store, "events")
    # A withdrawn roll-back may have had the same number.
    keys = ("number", "batches", "first", "detected")
    known = {tuple(event.get(key) for key in keys) for event in events if event.get("event") == "roll_back"}
    for record in records:
        if tuple(record[key] for key in keys) not in known:
            _append_event(attempt, record)
    for step, manifest in read_committed(attempt.store).items():
        if is_discarded(manifest.identity, step, records):
            quarantine(attempt, step, "the run was rolled back to an earlier step")
    return records


def read_roll_backs(store: Store) -> list[JsonObject]:
    """Return the records of all roll-backs of this run, in order. A fork continues the numbering of its parent.

    Raises `InvalidError` if a record is damaged, or one between two others is missing.
    """
    numbers = [number for number in map(parse_number, store.list_names(ROLL_BACK_FOLDER)) if number is not None]
    return [_read_record(store, str(number)) for number in range(min(numbers, default=1), max(numbers, default=0) + 1)]


def _read_record(store: Store, name: str) -> JsonObject:
    """Return a record. Raises `InvalidError` if it is damaged or missing."""
    number = int(name.partition(_WITHDRAWN)[0])
    try:
        record = read_json(store, f"{ROLL_BACK_FOLDER}/{name}")
        validate_record(record, _RECORD_KEYS, [key.name for key in _RECORD_KEYS])
        # The skipped ranges of a run are stored in its state, as 32-bit numbers.
        if record["number"] != number or number > ROLL_BACKS_MAX:
            raise ValueError(f"it is roll-back {number}, and says {record['number']}; {ROLL_BACKS_MAX} are possible")
        if not 0 <= record["begin"] < _INT32_MAX or not 0 < record["batches"] < _INT32_MAX:
            raise ValueError(f"it skips {record['batches']} batches after step {record['begin']}")
    except (ValueError, FileNotFoundError) as error:
        reason = "missing" if isinstance(error, FileNotFoundError) else f"damaged ({error})"
        advice = f"put a copy of it back, or move {ROLL_BACK_FOLDER} away, and the run decides again"
        raise InvalidError(f"{store.url}/{ROLL_BACK_FOLDER}/{name} is {reason}; {advice}") from error
    return record


def is_discarded(saved: Trajectory, step: int, records: Sequence[JsonObject]) -> bool:
    """Return True if a state saved at `step` was discarded by one of these roll-backs."""
    # A withdrawn roll-back may have had the number of a later one.
    made = {(number, *skipped) for number, skipped in enumerate(saved.get(ROLL_BACK_FOLDER, ()), 1)}
    return any((record["number"], *_get_range(record)) not in made and record["begin"] < step for record in records)


def replace_skipped_batches(state: TrainState, skipped: Sequence[SkippedBatches]) -> TrainState:
    """Return the state with these skipped ranges. Every host makes its own shards."""
    rows = np.zeros((ROLL_BACKS_MAX, 2), np.int32)
    rows[: len(skipped)] = np.reshape(skipped, (-1, 2))
    own = state.riders[STABILITY]
    array = jax.make_array_from_callback(rows.shape, own[_SKIPPED_BATCHES].sharding, lambda index: rows[index])
    return state.replace(riders=state.riders | {STABILITY: own | {_SKIPPED_BATCHES: array}})
