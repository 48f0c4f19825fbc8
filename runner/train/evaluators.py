"""Evaluators and their schedule: metrics of the weights besides the training loss. Called on every host.

If an evaluator fails, its metrics are left out, a line is printed, and the run continues. Failures are: an exception,
metrics that a row cannot hold, metrics that are not finite (null in the row), and metrics that differ between hosts
(the row has those of process 0). If an evaluator raises on one host before a collective, the other hosts hang in that
collective: every host then prints the evaluator's name at once (see the watchdog), and the deadline of a phase ends the
wait with exit code 76.

`Validation` evaluates the mean loss over the real target tokens of fixed sets of batches, and `EmaValidation` the loss
of averaged weights on the same sets.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from runner.attempts.attempt import Attempt
from runner.checkpoint.policy import is_due
from runner.config import TrainerConfig
from runner.console import warn
from runner.data import Dataset
from runner.distributed.agreement import Hosts
from runner.distributed.clock import EVALUATION, LocalFailure, Phase
from runner.errors import FailedError, InvalidError, RunnerError, format_error
from runner.metrics.media import MediaFile, MediaWriter, UnfitMediaError, encode_media, split_media
from runner.metrics.meta import ACCURACY, SUMS, RowValue, UnfitMetricsError, compute_means, parse_metrics, to_row_value
from runner.metrics.rows import Row
from runner.spec import hash_record
from runner.train.state import PARAMS, VARIABLES, TrainState
from runner.train.step import Batch
from runner.train.weights import DONATED, are_donated, copy_containers

EvaluationMetrics = Row
_VAL_ACCURACY = f"val/{ACCURACY}"


class Evaluator(Protocol):
    """Evaluator of weights. Called on every host.

    An optional attribute `every_steps` is its own schedule (None: `eval.every_steps`), and an optional `name` is used
    in messages instead of the name of the class.
    """

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> EvaluationMetrics | None:
        """Return metrics by their key in a row (`val/...`); None if the job was asked to stop meanwhile.

        A metric is a number, a text, a list of at most 64 numbers, a histogram in the form that rows have, or None. It
        must be the same on every host. An `Image` or `Audio` of `runner.metrics.media` may differ or be None on
        processes other than 0.
        """


class EvaluatorSchedule:
    """Evaluators of a job and their schedule. Made and called on every host."""

    def __init__(
        self,
        attempt: Attempt,
        config: TrainerConfig[Any],
        evaluators: Sequence[Evaluator],
        epoch_steps: Fraction | None = None,
    ):
        """Check the evaluators. `epoch_steps` are the steps of `eval.every_epochs`."""
        self._epoch_steps = epoch_steps
        self._attempt, self._config, self._last_step = attempt, config.eval, config.total_steps
        self._evaluators = list(evaluators)
        self._media = MediaWriter(attempt.store)
        for each in self._evaluators:
            kind, interval = type(each).__name__, getattr(each, "every_steps", None)
            if not callable(getattr(each, "evaluate", None)):
                raise InvalidError(f"evaluator() of the job returns a {kind}, which has no method evaluate")
            if interval is not None and (type(interval) is not int or interval < 1):
                raise InvalidError(
                    f"evaluator {kind}: every_steps is {interval!r}, needs a whole number above 0 or None"
                )

    @property
    def has_any(self) -> bool:
        """True if there is an evaluator."""
        return bool(self._evaluators)

    def list_due(self, step: int, has_end: bool = True) -> list[Evaluator]:
        """Return the evaluators that are due: all at step 0 with `at_start`, all at the last step with `at_end`.

        Without `has_end` the last step counts as any other.
        """
        if step == 0:
            return self._evaluators if self._config.at_start else []
        last_step = self._last_step if self._config.at_end and has_end else None

        def is_evaluator_due(evaluator: Evaluator) -> bool:
            own = getattr(evaluator, "every_steps", None)
            if own is not None:
                return is_due(step, own, last_step)
            return is_due(step, self._config.every_steps, last_step) or is_due(step, self._epoch_steps)

        return [each for each in self._evaluators if is_evaluator_due(each)]

    def are_all_due(self, step: int) -> bool:
        """Return True if all evaluators are due at `step`."""
        return len(self.list_due(step)) == len(self._evaluators)

    def evaluate(self, weights: Any, step: int, is_requested: bool = False) -> Row | None:
        """Return the metrics of all evaluators that are due; None if the job was asked to stop meanwhile.

        If an evaluation is requested and none is due, all evaluators are called.
        """
        metrics: Row = {}
        accuracy: Row = {}
        with self._attempt.progress.report_phase(EVALUATION):
            for evaluator in self.list_due(step) or (self._evaluators if is_requested else []):
                is_validation = isinstance(evaluator, Validation)
                before = {key: value for key, value in metrics.items() if not (is_validation and key == _VAL_ACCURACY)}
                own_metrics = self._call(evaluator, weights, step, before)
                if own_metrics is None:
                    return None
                # An evaluator of the job may have an accuracy of its own, which replaces the built-in one.
                if is_validation and _VAL_ACCURACY in own_metrics:
                    accuracy = {_VAL_ACCURACY: own_metrics.pop(_VAL_ACCURACY)}
                metrics |= own_metrics
            metrics = {**accuracy, **metrics}
        numbers = {key: value for key, value in metrics.items() if not isinstance(value, str | list | dict)}
        self._attempt.record("evaluate", step, figures=numbers)
        return metrics

    def pop_units_per_second(self) -> float | None:
        """Return the speed of the loss on the validation sets, see `Validation.pop_units_per_second`."""
        found = [each.pop_units_per_second() for each in self._evaluators if isinstance(each, Validation)]
        return found[0] if found else None

    def _call(self, evaluator: Evaluator, weights: Any, step: int, before: Row) -> EvaluationMetrics | None:
        """Return process 0's metrics; empty if the evaluator failed on a host; None if the job was asked to stop."""
        hosts = self._attempt.hosts
        name = type(evaluator).__name__
        with contextlib.suppress(Exception):  # a property of a user may raise
            name = str(getattr(evaluator, "name", None) or name)
        problem, is_stopping, is_interrupted = None, False, False
        metrics: Row = {}
        not_finite: list[str] = []
        files: dict[str, MediaFile] = {}
        try:
            # In new containers, so that training and other evaluators do not see what this evaluator writes there.
            returned = evaluator.evaluate(copy_containers(weights), step, hosts)
            is_stopping = returned is None
            # Inside `try`, because objects of user code may raise when they are read.
            if returned is not None:
                returned, media = split_media(returned)
                metrics, not_finite = parse_metrics(returned, before)
                # The values of process 0 count, so the others need not encode theirs.
                if media and hosts.is_main:
                    files, media_not_finite = encode_media(step, media)
                    not_finite += media_not_finite
        except RunnerError:
            raise  # an error of the runner, such as a lost peer, and not of the evaluator
        except KeyboardInterrupt:
            is_stopping = is_interrupted = True
        except (UnfitMetricsError, UnfitMediaError) as error:
            problem = str(error)
        except BaseException as error:  # noqa: BLE001 - code of a user, whose result training does not need
            problem = format_error(error)
        # Hosts compare digests, since the metrics themselves may be long texts.
        digest = None if problem or is_stopping else hash_record(metrics)

        # Every host gets here, whatever its evaluator did, so this gather cannot deadlock on a failure.
        message = f"evaluator {name} at step {step}: {problem} on process {hosts.process_id}"
        failure = None if problem is None else LocalFailure(message, is_end=False)
        wait = Phase(f"the wait for evaluator {name} of the others", EVALUATION.category)
        with self._attempt.progress.report_wait(wait, failure):
            references = {key: file.reference for key, file in files.items()}
            outcomes = hosts.gather([problem, digest, is_stopping, is_interrupted, are_donated(weights), references])
        if any(is_donated for *_, is_donated, _ in outcomes):
            raise FailedError(f"evaluator {name} at step {step}: {DONATED}")
        if any(is_interrupted for _, _, _, is_interrupted, *_ in outcomes):
            self._attempt.stop.stop_at_next_poll(f"KeyboardInterrupt in evaluator {name}")
        # One host that was asked to stop ends the evaluation on all, or the others would wait for it later.
        if any(is_stopping for _, _, is_stopping, *_ in outcomes):
            return None
        raised = {process: each for process, (each, *_) in enumerate(outcomes) if each is not None}
        if raised:
            process, reason = min(raised.items())
            where = f" on process {process}" if hosts.num_processes > 1 else ""
            self._report_problem(name, step, f"{reason}{where}; its metrics are not in the row of this step")
            return {}
        others = [process for process, (_, digest, *_) in enumerate(outcomes) if digest != outcomes[0][1]]
        if others:
            reason = f"process {others[0]} has other metrics than process 0; the row has those of process 0"
            self._report_problem(name, step, reason)
        if not_finite:
            self._report_problem(name, step, f"{', '.join(not_finite)}: not finite; null in the row")
        if files:
            # A newer attempt may own the directory by now; a fenced one must not write.
            self._attempt.fence.check_locally()
            lost = self._media.write(step, list(files.values()))
            if lost is not None:
                self._report_problem(name, step, f"{', '.join(files)}: {lost}; the row refers to missing files")
        # The row is the same whether the files could be written or not, as after a kill.
        return metrics | outcomes[0][-1]

    def _report_problem(self, name: str, step: int, reason: str) -> None:
        if self._attempt.hosts.is_main:
            warn(f"evaluator {name} at step {step}: {reason}")
        self._attempt.record("evaluation_problem", step, evaluator=name, reason=reason)


# Validation.


@dataclass(frozen=True)
class ValidationSet:
    """Validation set: its number of batches, and the function `batch` that returns one by its index."""

    name: str
    num_batches: int
    batch: Callable[[int], Batch]
    units_per_batch: int  # tokens of a batch, padding included; examples where the data are arrays


@dataclass(frozen=True)
class ValidationSize:
    """Size of a validation set."""

    num_targets: int  # real target tokens
    num_bytes: int | None  # of their text; None if unknown
    reason: str = ""  # why the bytes are unknown


@dataclass(frozen=True)
class ValidationSums:
    """Sums over a validation set or a part of it."""

    loss: float
    num_tokens: float  # real target tokens
    last_meta: Mapping[str, RowValue] = field(default_factory=dict)  # of the last batch, as rows hold it
    meta_sums: Mapping[str, Any] = field(default_factory=dict)  # `sums` of the meta over all batches

    @property
    def meta(self) -> dict[str, RowValue]:
        """Meta of the last batch and means of the sums, as rows hold them."""
        means = jax.device_get(compute_means(self.meta_sums, self.num_tokens))
        # Sorted, as the names of a step's own meta are.
        return dict(sorted({**self.last_meta, **{name: to_row_value(each) for name, each in means.items()}}.items()))

    def __add__(self, other: "ValidationSums") -> "ValidationSums":
        sums = jax.tree.map(np.add, self.meta_sums, other.meta_sums) if self.meta_sums else other.meta_sums
        return ValidationSums(self.loss + other.loss, self.num_tokens + other.num_tokens, other.last_meta, sums)

    def select_common(self) -> "ValidationSums":
        """Return the sums that can be added over several sets: the loss and the number of correct predictions."""
        correct = self.meta_sums.get(ACCURACY)
        has_own_weight = correct is None or isinstance(correct, tuple)
        return ValidationSums(self.loss, self.num_tokens, {}, {} if has_own_weight else {ACCURACY: correct})


def make_validation_sets(
    dataset: Dataset, batch_examples: int, batch: Callable[[str, int], Batch]
) -> list[ValidationSet]:
    """Return each validation set of the dataset in batches of `batch_examples`.

    `batch` makes a batch by set and index.
    """
    return [
        ValidationSet(
            name,
            -(-examples.num_examples // batch_examples),
            functools.partial(batch, name),
            batch_examples * dataset.units_per_example,
        )
        for name, examples in dataset.validation.items()
    ]


class Validation:
    """Evaluator of the loss on validation sets. Made and called on every host.

    The `val_step` is compiled when it is first needed, or in the background.
    """

    def __init__(
        self,
        abstract: TrainState,
        compile_val: Callable[[TrainState], jax.stages.Compiled],
        sets: Sequence[ValidationSet],
        is_stopping: Callable[[], bool],
        measure: Callable[[str], ValidationSize] | None = None,
        step: Future[jax.stages.Compiled] | None = None,
    ):
        """Prepare the evaluator; compiles nothing.

        `compile_val` compiles `val_step` for a state without optimizer and auxiliary states; `step` has its result, if
        it has been called already. An evaluation ends early if `is_stopping`, since it must not delay a stop. `measure`
        returns the size of a set by name, for bits per byte; without it they are not reported.
        """
        self._measure = None if measure is None else functools.cache(measure)
        self._warned: set[str] = set()  # sets whose bytes are unknown
        # Without optimizer state, so that the validation step does not take its memory.
        self._abstract = abstract.replace(opt_state=(), riders={})
        self._compile_val, self._sets, self._is_stopping = compile_val, sets, is_stopping
        self._step = step
        self._num_units, self._seconds = 0, 0.0  # of the evaluations since `pop_units_per_second`

    def start_compiling(self) -> None:
        """Compile in the background. Called after the first row, because tracing would slow down the first steps."""
        if self._step is None:
            compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
            self._step = compiler.submit(self._compile_val, self._abstract)
            compiler.shutdown(wait=False)  # the thread ends once it has compiled

    @property
    def compiled(self) -> jax.stages.Compiled:
        """Compiled `(state, batch) -> (loss_sum, token_count, last_meta)`. May wait for the compiler."""
        self.start_compiling()
        assert self._step is not None
        return self._step.result()

    def make_val_state(self, weights: Any, step: int) -> TrainState:
        """Return the state to pass to `val_step`: the weights of `step` without optimizer state."""
        variables = weights.get(VARIABLES, {})
        return self._abstract.replace(params=weights[PARAMS], variables=variables, step=np.int32(step))

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> EvaluationMetrics | None:
        """Return the mean loss over all tokens of all sets, by its key in a row; None if the job was asked to stop.

        If there are several sets, the metrics include the loss of each. They also include, for each set, the meta of
        `val_step` for the last batch, the means of its `sums` over all batches, and, if sizes are measured, the bits
        per byte. A `val_step` that counts correct predictions also gives the token accuracy of all sets.
        """
        state = self.make_val_state(weights, step)
        metrics: EvaluationMetrics = {}
        total = ValidationSums(0.0, 0.0)
        total_bytes: int | None = 0
        for validation_set in self._sets:
            prefix = f"val/{validation_set.name}" if len(self._sets) > 1 else "val"
            sums = self.sum(state, validation_set)
            if sums is None:
                return None
            num_bytes = self._find_num_bytes(validation_set.name, sums, hosts)
            metrics |= {f"{prefix}/{name}": value for name, value in sums.meta.items()}
            metrics |= self._compute_losses(prefix, sums, num_bytes)
            total += sums.select_common()
            total_bytes = None if total_bytes is None or num_bytes is None else total_bytes + num_bytes
        metrics |= {f"val/{name}": value for name, value in total.meta.items()}
        return metrics | self._compute_losses("val", total, total_bytes)

    def _compute_losses(self, prefix: str, sums: ValidationSums, num_bytes: int | None) -> EvaluationMetrics:
        # A mean over nothing is null, because 0 would be the best possible loss.
        metrics: EvaluationMetrics = {f"{prefix}/loss": sums.loss / sums.num_tokens if sums.num_tokens else None}
        if self._measure is not None:
            metrics[f"{prefix}/bits_per_byte"] = sums.loss / math.log(2) / num_bytes if num_bytes else None
        return metrics

    def _find_num_bytes(self, name: str, sums: ValidationSums, hosts: Hosts) -> int | None:
        """Return the bytes of the text of a set, if the loss covers exactly its targets; warn once if unknown.

        Only process 0 counts. The first call for a set decodes it.
        """
        if self._measure is None:
            return None
        size = self._measure(name) if hosts.is_main else ValidationSize(0, None)
        reason = size.reason
        if size.num_bytes is not None and size.num_targets != sums.num_tokens:
            reason = f"it has {size.num_targets} targets, and the loss is a sum over {sums.num_tokens:g}"
        if hosts.is_main and reason and name not in self._warned:
            self._warned.add(name)
            warn(f"{name}: bits per byte are not known: {reason}")
        # Process 0 decides and all learn, so that rows of all hosts stay equal.
        known: int | None = hosts.agree(None if reason else size.num_bytes)
        return known

    def sum(self, state: TrainState, validation_set: ValidationSet) -> ValidationSums | None:
        """Return the sums over the batches of a set; None if the job was asked to stop."""
        loss_sum, token_count, meta = jnp.float32(0), jnp.float32(0), {}
        sums: Any = None
        compiled = self.compiled  # waiting for the compiler does not count in the speed
        started = time.monotonic()
        for index in range(validation_set.num_batches):
            if self._is_stopping():
                return None
            # Queue at most one batch ahead of the device, so that a stop need not wait for a whole queued evaluation.
            jax.block_until_ready(loss_sum)
            # The sums stay on the device; only the wait above and the end of the set need the host.
            loss, count, meta = compiled(state, validation_set.batch(index))
            loss_sum, token_count = loss_sum + loss, token_count + count
            if SUMS in meta:
                sums = meta[SUMS] if sums is None else jax.tree.map(jnp.add, sums, meta[SUMS])
        last = {name: to_row_value(value) for name, value in jax.device_get(meta).items() if name != SUMS}
        # Sums are divided later, by the tokens of all batches; in float64, parts of a large set add up exactly.
        host_sums = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), jax.device_get(sums or {}))
        result = ValidationSums(float(loss_sum), float(token_count), last, host_sums)
        self._num_units += validation_set.num_batches * validation_set.units_per_batch
        self._seconds += time.monotonic() - started
        return result

    def pop_units_per_second(self) -> float | None:
        """Return the tokens (or examples) per second of the evaluations since the last call; None if there is none."""
        num_units, seconds = self._num_units, self._seconds
        self._num_units, self._seconds = 0, 0.0
        return num_units / max(seconds, 1e-9) if num_units else None


def cast_like(averages: Any, params: Any) -> Any:
    """Return the averages cast to the dtypes of the parameters (which may be abstract), as a replacement for them."""
    return jax.tree.map(lambda average, param: average.astype(param.dtype), averages, params)
