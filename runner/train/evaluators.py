"""Whoever judges the weights, each at its own cadence; and what becomes of their figures. Called on every host.

An evaluator that fails costs its own figures and one line, never the run: what it raises, figures that no row can hold,
figures that are not finite (null in the row), and other figures on another host than on host 0, whose stand in the row.
An evaluator that raises on one host alone, before it has met the others in a program over all devices, leaves them
waiting there: every host names it at once (see the watchdog), and the deadline of a phase ends the wait (76).

Validation: the mean loss over the real target tokens of fixed sets of batches.

The loss of averaged weights on the validation sets, beside that of the weights themselves.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from runner.config import TrainerConfig
from runner.console import warn
from runner.data import Dataset
from runner.distributed.agreement import Hosts
from runner.distributed.clock import EVALUATION, LocalFailure, Phase
from runner.errors import RunnerError, format_error
from runner.metrics.meta import LIST_MAX, SUMS, RowValue, compute_means, find_bins, to_finite, to_row_value
from runner.metrics.rows import Row
from runner.periodic import is_due
from runner.run.attempt import Attempt
from runner.spec import hash_record
from runner.train.auxiliary import EMA
from runner.train.lora import make_lazy_weights
from runner.train.state import PARAMS, RIDERS, VARIABLES, TrainState, get_merge
from runner.train.step import Batch

TEXT_CHARACTERS_MAX = 1 << 14
EvaluationMetrics = Row
_KEY = re.compile(r"[\w.-]+(/[\w.-]+)+")
_OF_OTHERS = ("train/", "perf/", "data/")


class Evaluator(Protocol):
    """Judges weights. Called on every host.

    One that has an attribute `every_steps` is asked each so many steps, and by `eval.every_steps` where that is None;
    one that has `name` is called so in messages, else by its class.
    """

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> EvaluationMetrics | None:
        """Figures by their key in a row (`val/...`); None if it ended early because the job was asked to stop.

        A figure is a number, a text, a list of at most 64 numbers, a histogram as rows have it, or None; the same on
        every host.
        """


class EvaluatorSchedule:
    """All evaluators of a job. Made and called on every host."""

    def __init__(self, attempt: Attempt, config: TrainerConfig[Any], evaluators: Sequence[Evaluator]):
        self._attempt, self._rule, self._last_step = attempt, config.eval, config.total_steps
        self._evaluators = list(evaluators)

    def due(self, step: int) -> list[Evaluator]:
        """Who is asked at `step`: all at step 0 with `at_start`, all at the last one with `at_end`."""
        if step == 0:
            return self._evaluators if self._rule.at_start else []
        last_step = self._last_step if self._rule.at_end else None
        return [each for each in self._evaluators if is_due(step, self._every_steps(each), last_step)]

    def _every_steps(self, evaluator: Evaluator) -> int | None:
        own = getattr(evaluator, "every_steps", None)
        return self._rule.every_steps if own is None else own

    @property
    def has_any(self) -> bool:
        """Whether anybody judges."""
        return bool(self._evaluators)

    def evaluate(self, weights: Any, step: int, is_asked_for: bool = False) -> Row | None:
        """The figures of all who are due; None if the job was asked to stop meanwhile.

        Where it is asked for and nobody is due, those of all.
        """
        found: Row = {}
        asked = self.due(step) or (self._evaluators if is_asked_for else [])
        with self._attempt.progress.report_phase(EVALUATION):
            for evaluator in asked:
                figures = self._ask(evaluator, weights, step, found)
                if figures is None:
                    return None
                found |= figures
        told = {key: value for key, value in found.items() if not isinstance(value, str | list | dict)}
        self._attempt.record("evaluate", step, figures=told)
        return found

    def _ask(self, evaluator: Evaluator, weights: Any, step: int, before: Row) -> EvaluationMetrics | None:
        """Host 0's figures, if every host has some; None if the job was asked to stop."""
        hosts, name = self._attempt.hosts, name_of(evaluator)
        figures, problem = _outcome(lambda: evaluator.evaluate(weights, step, hosts))
        is_stopping = figures is None and problem is None
        problem = problem or (None if is_stopping else _problem_with(figures, before))
        digest = None if problem or is_stopping else hash_record(_plain(figures or {}))
        words = f"evaluator {name} at step {step}: {problem} on process {hosts.process_id}"
        failure = None if problem is None else LocalFailure(words, is_end=False)
        wait = Phase(f"the wait for evaluator {name} of the others", EVALUATION.bucket)
        with self._attempt.progress.report_wait(wait, failure):
            told = hosts.gather([problem, digest, is_stopping])
        if any(is_stopping for _, _, is_stopping in told):
            return None
        raised = {process: each for process, (each, _, _) in enumerate(told) if each is not None}
        if raised:
            process, reason = min(raised.items())
            where = f" on process {process}" if hosts.num_processes > 1 else ""
            self._tell(name, step, f"{reason}{where}; the row of this step has none of its figures")
            return {}
        others = [process for process, (_, digest, _) in enumerate(told) if digest != told[0][1]]
        if others:
            self._tell(name, step, f"process {others[0]} has other figures than process 0, whose stand in the row")
        found = _plain(figures or {})
        if broken := [key for key, value in (figures or {}).items() if _is_broken(value)]:
            self._tell(name, step, f"{', '.join(broken)}: not finite; null in the row")
        return found

    def _tell(self, name: str, step: int, reason: str) -> None:
        if self._attempt.hosts.is_main:
            warn(f"evaluator {name} at step {step}: {reason}")
        self._attempt.record("evaluation_problem", step, evaluator=name, reason=reason)


def name_of(evaluator: Evaluator) -> str:
    """What messages call it."""
    return str(getattr(evaluator, "name", None) or type(evaluator).__name__)


def _outcome(evaluate: Callable[[], EvaluationMetrics | None]) -> tuple[EvaluationMetrics | None, str | None]:
    """Its figures, or what it has raised; whatever the runner itself raises is no fault of the evaluator."""
    try:
        return evaluate(), None
    except RunnerError:
        raise
    except Exception as error:  # noqa: BLE001 - somebody else's code, of which training needs nothing
        return {}, format_error(error)


def _problem_with(figures: Any, before: Row) -> str | None:
    """Why a row cannot hold these figures."""
    if not isinstance(figures, Mapping):
        return f"it returns a {type(figures).__name__}, needs a dictionary of figures by their key in a row"
    for key, value in figures.items():
        if not (isinstance(key, str) and _KEY.fullmatch(key)) or key.startswith(_OF_OTHERS):
            return f"it returns a figure named {key!r}, needs a key such as val/accuracy"
        if key in before:
            return f"it returns {key}, which another evaluator has returned"
        if not _is_figure(value):
            return (
                f"it returns as {key} {_kind(value)}; a row needs a number, null, a text of at most "
                f"{TEXT_CHARACTERS_MAX:,} characters, or a list of at most {LIST_MAX} numbers"
            )
    return None


def _is_figure(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= TEXT_CHARACTERS_MAX
    if isinstance(value, list | tuple):
        return len(value) <= LIST_MAX and all(map(_is_number, value))
    if isinstance(value, dict):
        return find_bins(value) is not None
    return _is_number(value)


def _is_number(value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float):
        return True
    return getattr(value, "shape", None) == () and hasattr(value, "__float__") and value.dtype.kind in "biuf"


def _kind(value: Any) -> str:
    return f"a text of {len(value):,} characters" if isinstance(value, str) else f"a {type(value).__name__}"


def _is_broken(value: Any) -> bool:
    """Whether a number, or one of a list, is not finite."""
    if value is None or isinstance(value, str | dict):
        return False
    if isinstance(value, list | tuple):
        return any(map(_is_broken, value))
    return not math.isfinite(value)


def _plain(figures: EvaluationMetrics) -> EvaluationMetrics:
    """As JSON has them; what is not finite is null."""

    def plain(value: Any) -> Any:
        if value is None or isinstance(value, str | dict):
            return value
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        if isinstance(value, int):
            return value
        return to_finite(value)

    return {key: plain(value) for key, value in figures.items()}


@dataclass(frozen=True)
class ValidationSet:
    """Batches 0 .. `num_batches` of a set; `batch` makes one by its number."""

    name: str
    num_batches: int
    batch: Callable[[int], Batch]


@dataclass(frozen=True)
class ValidationSize:
    """How many real targets a set has, and how many bytes their text; None, and why, where that is not known."""

    num_targets: int
    num_bytes: int | None
    reason: str = ""


@dataclass(frozen=True)
class ValidationSums:
    """Loss and real tokens of a set, added up; and its meta, as rows hold it, by name."""

    loss: float
    num_tokens: float
    meta: dict[str, RowValue]


def make_validation_sets(
    dataset: Dataset, config: TrainerConfig[Any], batch: Callable[[str, int], Batch]
) -> list[ValidationSet]:
    """Of each set `eval.batches` batches, or fewer if they hold all of it; `batch` makes one by set and number."""
    size, most = config.train.global_batch_examples, config.eval.batches
    return [
        ValidationSet(name, min(most, -(-examples.num_examples // size)), functools.partial(batch, name))
        for name, examples in dataset.validation.items()
    ]


class Validation:
    """The loss on validation sets, by a `val_step` that is compiled when it is first needed, or in the background.

    `abstract` is the train state's; `compile_val` compiles for one with no optimizer state, and of which nothing rides
    along; `is_stopping` says whether the job was asked to stop, which a whole evaluation must not delay; `size_of`, if
    given, how many bytes a set's text has, by its name. Made and called on every host.
    """

    def __init__(
        self,
        abstract: TrainState,
        compile_val: Callable[[TrainState], jax.stages.Compiled],
        sets: Sequence[ValidationSet],
        is_stopping: Callable[[], bool],
        size_of: Callable[[str], ValidationSize] | None = None,
    ):
        self._size_of = None if size_of is None else functools.cache(size_of)
        self._told: set[str] = set()  # the sets of whose bytes it is told that they are not known
        self._abstract = abstract.replace(opt_state=(), riders={})
        self._compile_val, self._sets, self._is_stopping = compile_val, sets, is_stopping
        self._step: Future[jax.stages.Compiled] | None = None

    def start_compiling(self) -> None:
        """In the background, and not before a first row is out: tracing would slow down what the first steps need."""
        if self._step is None:
            compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
            self._step = compiler.submit(self._compile_val, self._abstract)
            compiler.shutdown(wait=False)

    @property
    def compiled(self) -> jax.stages.Compiled:
        """`(state, batch) -> (loss_sum, token_count, last_meta)`. May wait for the compiler."""
        self.start_compiling()
        assert self._step is not None
        return self._step.result()

    def make_val_state(self, weights: Any, step: int) -> TrainState:
        """What `val_step` is shown: the weights of `step`, and no optimizer state."""
        variables = weights.get(VARIABLES, {})
        return self._abstract.replace(params=weights[PARAMS], variables=variables, step=np.int32(step))

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> EvaluationMetrics | None:
        """The mean loss over all tokens of all batches, by its key in a row; None if the job was asked to stop.

        Of several sets that of each by its name, too. Beside it what `val_step` returns as meta, of the last batch of
        each, and the means of its `sums` over all of them; and bits per byte where sizes are asked for.
        """
        state = self.make_val_state(weights, step)
        figures: EvaluationMetrics = {}
        total = ValidationSums(0.0, 0.0, {})
        num_bytes: int | None = 0
        for held in self._sets:
            prefix = f"val/{held.name}" if len(self._sets) > 1 else "val"
            sums = self.sum(state, held)
            if sums is None:
                return None
            own_bytes = self._num_bytes(held.name, sums, hosts)
            figures |= {f"{prefix}/{name}": value for name, value in sums.meta.items()}
            figures |= self._figures(prefix, sums, own_bytes)
            total = ValidationSums(total.loss + sums.loss, total.num_tokens + sums.num_tokens, {})
            num_bytes = None if num_bytes is None or own_bytes is None else num_bytes + own_bytes
        return figures | self._figures("val", total, num_bytes)

    def _figures(self, prefix: str, sums: ValidationSums, num_bytes: int | None) -> EvaluationMetrics:
        found: EvaluationMetrics = {f"{prefix}/loss": sums.loss / (sums.num_tokens or 1.0)}
        if self._size_of is not None:
            found[f"{prefix}/bits_per_byte"] = sums.loss / math.log(2) / num_bytes if num_bytes else None
        return found

    def _num_bytes(self, name: str, sums: ValidationSums, hosts: Hosts) -> int | None:
        """Bytes of the text of a set, if the loss is of just its targets; counted by host 0. One line where it is not.

        The first time it may take as long as to decode the set.
        """
        if self._size_of is None:
            return None
        size = self._size_of(name) if hosts.is_main else ValidationSize(0, None)
        reason = size.reason
        if size.num_bytes is not None and size.num_targets != sums.num_tokens:
            reason = f"it has {size.num_targets} targets, and the loss is of {sums.num_tokens:g}"
        if hosts.is_main and reason and name not in self._told:
            self._told.add(name)
            warn(f"{name}: bits per byte are not known: {reason}")
        known: int | None = hosts.agree(None if reason else size.num_bytes)
        return known

    def sum(self, state: TrainState, held: ValidationSet) -> ValidationSums | None:
        """What the batches of a set add up to; None if the job was asked to stop."""
        loss_sum, token_count, meta = jnp.float32(0), jnp.float32(0), {}
        sums: Any = None
        for index in range(held.num_batches):
            if self._is_stopping():
                return None
            # At most one batch ahead of the device: a stop must not wait for a whole evaluation that is queued.
            jax.block_until_ready(loss_sum)
            loss, count, meta = self.compiled(state, held.batch(index))
            loss_sum, token_count = loss_sum + loss, token_count + count
            if SUMS in meta:
                sums = meta[SUMS] if sums is None else jax.tree.map(jnp.add, sums, meta[SUMS])
        last = {name: value for name, value in meta.items() if name != SUMS}
        means = {} if sums is None else compute_means(sums, token_count)
        found = {name: to_row_value(value) for name, value in jax.device_get({**last, **means}).items()}
        return ValidationSums(float(loss_sum), float(token_count), found)


class EmaValidation:
    """`Validation` of the average with one decay. The weights that it is shown hold all averages: `add_averages`."""

    def __init__(self, validation: Validation, decay: float):
        self._validation, self._decay = validation, str(decay)

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> EvaluationMetrics | None:
        """What `Validation` says, by keys of this average: `val/ema_0.999/loss`."""
        averages = cast_like(weights[EMA][self._decay], weights[PARAMS])
        figures = self._validation.evaluate({**weights, PARAMS: averages}, step, hosts)
        if figures is None:
            return None
        return {f"val/{EMA}_{self._decay}/{key.removeprefix('val/')}": value for key, value in figures.items()}


def make_ema_evaluators(config: Any, validation: Validation) -> Sequence[EmaValidation]:
    """One for each average, if the config wants them evaluated."""
    rule = config.ema
    return [] if rule is None or not rule.evaluate else [EmaValidation(validation, decay) for decay in rule.decays]


def add_averages(weights: Callable[[Any], Any], state: Any) -> Any:
    """`weights(state)`, and by `ema` the averages that ride along in it, by decay, if there are any.

    Those of an adapter are merged, when they are first asked for.
    """
    if get_merge(state) is not None:
        return make_lazy_weights(state)
    riders = getattr(state, RIDERS, {})
    return weights(state) | ({EMA: riders[EMA]} if EMA in riders else {})


def cast_like(averages: Any, params: Any) -> Any:
    """Averages in the types of the parameters, of which shape and dtype are enough, so that they take their place."""
    return jax.tree.map(lambda average, param: average.astype(param.dtype), averages, params)
