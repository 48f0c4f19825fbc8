"""Explanation of a training step: its examples, the cost of each, and other changes at that step.

The loss of a spike is judged as `config.stability` does: by standard deviations above the mean of a window of rows.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from runner.checkpoint.manifest import read_committed
from runner.config import SpikeConfig, TrainerConfig
from runner.errors import InvalidError
from runner.history.ledger import get_float, get_int
from runner.history.records import History
from runner.metrics.file import read_rows
from runner.metrics.rows import Row
from runner.retrace.losses import ExampleLoss, ExampleScorer
from runner.retrace.origin import ExampleReader, StepExample, adopt_past, list_unknown, makes_own_batches
from runner.retrace.origin import to_json as example_to_json
from runner.retrace.replay import LOSS, describe_past
from runner.retrace.scratch import Retracing
from runner.storage import JsonObject
from runner.trainer import BaseTrainer

_MIN_ROWS = 8  # before a spike can be told
_STANDING_OUT_SIGMAS = 4.0  # above the examples of the step before
_WORST_TOKENS = 5
_TEXT_CHARACTERS = 60
_CHANGED_RATE = 1.5  # factor between the learning rates of two rows that is worth a line


class Deviation(NamedTuple):
    """Loss of a row, compared with the rows before it."""

    step: int
    loss: float
    mean: float  # of the rows before
    sigmas: float  # standard deviations above the mean
    num_rows: int


def find_deviation(rows: Sequence[Row], index: int, spike: SpikeConfig) -> Deviation | None:
    """Return how far the loss of a row is from those before it; None if there are too few, or they are all equal."""
    window = (get_float(row, LOSS) for row in rows[max(index - spike.over_steps, 0) : index])
    losses = [loss for loss in window if loss is not None]
    loss = rows[index].get(LOSS)
    if len(losses) < _MIN_ROWS or not isinstance(loss, int | float):
        return None
    mean, deviation = statistics.fmean(losses), statistics.stdev(losses)
    if not deviation:
        return None
    sigmas = (loss - mean) / deviation if math.isfinite(loss) else math.inf
    return Deviation(rows[index]["step"], float(loss), mean, sigmas, len(losses))


def _get_spike_config(config: TrainerConfig[Any]) -> SpikeConfig:
    """Return the window and the threshold of the run for spikes of the loss, or the defaults."""
    policy = config.stability.roll_back
    if config.stability.spike is None and policy is not None:
        return SpikeConfig(sigmas=policy.loss_above_sigmas, over_steps=policy.over_steps)
    return config.stability.spike or SpikeConfig()


def find_spike(rows: Sequence[Row], config: TrainerConfig[Any], url: str) -> Deviation:
    """Return the row whose loss is furthest above those before it. Raises `InvalidError` if none can be told."""
    spike = _get_spike_config(config)
    found = [deviation for index in range(len(rows)) if (deviation := find_deviation(rows, index, spike)) is not None]
    if not found:
        raise InvalidError(f"{url}: --spike needs {_MIN_ROWS + 1} rows with a loss, and there are {len(rows)}")
    highest = max(found, key=lambda deviation: deviation.sigmas)
    if highest.sigmas <= 0:
        raise InvalidError(f"{url}: --spike: no row has a loss above the mean of the {spike.over_steps} rows before it")
    return highest


@dataclass(frozen=True)
class ExplainedExample:
    """Example of a step, with what it cost; the costs are None without weights."""

    example: StepExample
    loss: ExampleLoss | None = None
    loss_share: float | None = None  # of the loss of the step
    grad_share: float | None = None  # of the sum of the gradient norms of all examples
    stands_out: bool = False  # True if its mean loss is far above those of the step before
    worst_tokens: Sequence[tuple[str, float]] = ()  # text and loss

    @property
    def mean_loss(self) -> float | None:
        """Loss per target; None without weights or targets."""
        return None if self.loss is None or not self.loss.num_targets else self.loss.loss_sum / self.loss.num_targets

    def to_json(self) -> JsonObject:
        """Return the example as plain data."""
        costs = {
            "loss": self.mean_loss,
            "loss_share": self.loss_share,
            "grad_norm": None if self.loss is None else self.loss.grad_norm,
            "grad_share": self.grad_share,
            "stands_out": self.stands_out,
            "worst_tokens": [[text, loss] for text, loss in self.worst_tokens],
        }
        return example_to_json(self.example) | ({} if self.loss is None else costs)

    def format(self) -> Iterator[str]:
        """Yield the lines for people."""
        example = self.example
        cost = ""
        if self.mean_loss is not None and self.loss_share is not None:
            cost = f"  loss {self.mean_loss:.4f}, {self.loss_share:.1%} of the step"
        if self.grad_share is not None:
            cost += f", {self.grad_share:.1%} of the gradient norms"
        mark = "  STANDS OUT" if self.stands_out else ""
        yield f"example {example.number}  {example.source}, epoch {example.epoch}, number {example.index}{cost}{mark}"
        for part in example.parts:
            text = repr(part.text)[1:-1] if part.text is not None else ""  # on one line
            text = text if len(text) <= _TEXT_CHARACTERS else f"{text[:_TEXT_CHARACTERS]}..."
            yield f"    {part.num_tokens} tokens from {part.place}" + ("" if part.text is None else f": {text}")
        yield from (f"    {name}: {value}" for name, value in example.fields.items())
        if self.worst_tokens:
            worst = ", ".join(f"{text!r} {loss:.2f}" for text, loss in self.worst_tokens)
            yield f"    highest losses: {worst}"


@dataclass(frozen=True)
class Explanation:
    """Explanation of one step."""

    step: int
    row: Row  # of the step; empty if it has none
    deviation: Deviation | None  # of its loss
    changes: Sequence[str]  # what else changed since the row before, a line each
    examples: Sequence[ExplainedExample]  # the most expensive first, or in order without weights
    before: float | None  # mean loss of the examples of the step before, with the same weights; None without weights
    advice: Sequence[str]  # lines of a spec that trains past the step
    notes: Sequence[str]  # history of the step in the run

    def summarise_sources(self) -> dict[str, tuple[int, float | None]]:
        """Return the number of examples and the mean loss of each source."""
        sources: dict[str, list[float | None]] = {}
        for each in self.examples:
            sources.setdefault(each.example.source, []).append(each.mean_loss)
        return {name: (len(losses), _mean(losses)) for name, losses in sorted(sources.items())}

    def to_json(self) -> JsonObject:
        """Return the explanation as plain data."""
        return {
            "step": self.step,
            "row": self.row,
            "deviation": None if self.deviation is None else self.deviation._asdict(),
            "changes": [*self.changes],
            "notes": [*self.notes],
            "loss_before": self.before,
            "sources": {
                name: {"examples": count, "loss": loss} for name, (count, loss) in self.summarise_sources().items()
            },
            "examples": [each.to_json() for each in self.examples],
            "advice": [*self.advice],
        }

    def format(self, num_shown: int) -> Iterator[str]:
        """Yield the lines for people, with the first examples."""
        yield from self.notes
        parts = [f"step {self.step}"]
        loss = get_float(self.row, LOSS)
        parts += [] if loss is None else [f"loss {loss:.4f}"]
        if self.deviation is not None:
            _, _, mean, sigmas, num_rows = self.deviation
            parts.append(f"{sigmas:+.1f} standard deviations from the mean {mean:.4f} of {num_rows} rows before")
        yield ", ".join(parts)
        yield from (f"changed here: {change}" for change in self.changes)
        sources = self.summarise_sources()
        yield f"{len(self.examples)} examples: " + ", ".join(
            f"{name} {count}" + (f" (loss {loss:.4f})" if loss is not None else "")
            for name, (count, loss) in sources.items()
        )
        if self.before is not None:
            yield f"with the same weights, the examples of the step before have loss {self.before:.4f}"
        yield ""
        for each in self.examples[:num_shown]:
            yield from each.format()
        if len(self.examples) > num_shown:
            yield f"and {len(self.examples) - num_shown} more; --top and --json show them"
        if self.advice:
            yield ""
            yield "to train past this step, in a copy of the spec with another directory:"
            yield from (f"    {line}" for line in self.advice)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def list_changes(rows: Sequence[Row], step: int, job: BaseTrainer, history: History) -> list[str]:
    """Return what changed between the row before a step and the step: a line each."""
    index = next((number for number, row in enumerate(rows) if row["step"] >= step), None)
    if index is None:
        return []
    row, before = rows[index], rows[index - 1] if index else Row()
    first = int(before.get("step", 0))  # completed steps
    lines = [
        f"stage {plan.number} begins after step {plan.start}"
        for plan in job.programs.plans[1:]
        if first <= plan.start < step
    ]
    attempts = {attempt.number: attempt for attempt in history.attempts}
    old, new = (attempts.get(get_int(each, "perf/attempt") or 0) for each in (before, row))
    if old is not None and new is not None and old.number != new.number:
        lines.append(f"a restart: attempt {new.number} went on from step {new.resumed_step}")
        if {*old.hosts} != {*new.hosts}:
            lines.append(f"hosts: {', '.join(old.hosts[:4])} -> {', '.join(new.hosts[:4])}")
        if (old.num_devices, old.device_kind) != (new.num_devices, new.device_kind):
            lines.append(f"devices: {old.num_devices} {old.device_kind} -> {new.num_devices} {new.device_kind}")
    former, present = (get_float(each, "train/learning_rate") or 0.0 for each in (before, row))
    if min(former, present) > 0 and max(former, present) / min(former, present) >= _CHANGED_RATE:
        lines.append(f"learning rate: {former:.3g} -> {present:.3g}")
    for event in history.events:
        at, changes = get_int(event, "step"), event.get("changes")
        if event.get("event") in ("changed", "spec_changed") and at is not None and first <= at < step:
            lines += [str(change) for change in changes] if isinstance(changes, list) else []
    return [f"since step {first}: {line}" for line in lines] if first < step - 1 else lines


def list_advice(url: str, step: int, config: TrainerConfig[Any], base: int | None) -> list[str]:
    """Return the lines of a spec that trains past a step: a fork at the checkpoint `base`, which skips its batch.

    Empty if the run skips batches at this step or later: the steps of those ranges would be others then.
    """
    ranges = [[*each] for each in config.train.skip_steps]
    if ranges and ranges[-1][1] >= step:
        return []
    ranges.append([step - 1, step])
    if base is None:
        return [f"config: {{train: {{skip_steps: {ranges}}}}}"]
    return [
        f"checkpoint: {{fork_from: {{run: {json.dumps(url)}, step: {base}, changes: [config.train.skip_steps]}}}}",
        f"config: {{train: {{skip_steps: {ranges}}}}}",
    ]


def score_examples(
    retracing: Retracing,
    scorer: ExampleScorer,
    examples: Sequence[StepExample],
    num_shown: int,
    reader: ExampleReader | None,
) -> tuple[list[ExplainedExample], float | None]:
    """Return the examples of the next step with their costs, and the mean loss of those of the step before.

    The worst tokens are found for the `num_shown` most expensive ones.
    """
    job = retracing.job
    arrays = retracing.load_arrays(job.step)

    def select(fields: Mapping[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
        return {name: values[number] for name, values in fields.items()}

    losses = [scorer.score(select(arrays, each.number)) for each in examples]
    earlier: list[float] = []
    if job.step:
        past = retracing.load_arrays(job.step - 1)
        means = (scorer.compute_mean(select(past, number)) for number in range(len(next(iter(past.values())))))
        earlier = [mean for mean in means if mean is not None]
    limit = math.inf
    if len(earlier) > 1:
        limit = statistics.fmean(earlier) + _STANDING_OUT_SIGMAS * statistics.stdev(earlier)
    total, total_grad = sum(each.loss_sum for each in losses), sum(each.grad_norm for each in losses)
    explained = [
        ExplainedExample(
            example,
            loss,
            loss.loss_sum / total if total else None,
            loss.grad_norm / total_grad if total_grad else None,
            stands_out=bool(loss.num_targets) and not loss.loss_sum / loss.num_targets <= limit,
        )
        for example, loss in zip(examples, losses, strict=True)
    ]
    explained.sort(key=lambda each: _rank(each.loss), reverse=True)
    if scorer.is_language_model and reader is not None:
        for place, each in enumerate(explained[:num_shown]):
            # The targets with the highest losses, as text or id.
            fields = select(arrays, each.example.number)
            token_losses = np.where(fields["padding_mask"], scorer.score_tokens(fields), -np.inf)
            order = np.argsort(-token_losses)[:_WORST_TOKENS].tolist()
            worst = [index for index in order if token_losses[index] > -np.inf]
            targets = fields["y"]
            texts = [reader.decode(targets[index : index + 1]) or str(targets[index]) for index in worst]
            pairs = list(zip(texts, token_losses[worst].tolist(), strict=True))
            explained[place] = replace(each, worst_tokens=pairs)
    return explained, _mean(earlier)


def _rank(loss: ExampleLoss | None) -> float:
    return 0.0 if loss is None else math.inf if math.isnan(loss.loss_sum) else loss.loss_sum


class Explainer:
    """Explanations of the steps of one run."""

    def __init__(self, job: BaseTrainer, history: History):
        """Prepare for the job of a run, which is only read. Raises `InvalidError` if its records are damaged."""
        self._job, self._history = job, history
        self.rows = read_rows(job.store)
        adopt_past(job, job.store)
        self._committed = sorted(read_committed(job.store))
        self._reader = None if makes_own_batches(job) else ExampleReader(job)
        self._scorers: dict[int, ExampleScorer] = {}  # by stage

    def explain(self, step: int, retracing: Retracing | None, num_shown: int) -> Explanation:
        """Explain the step that ends with `step` completed ones.

        With a `retracing` its job makes the steps before it. Raises `DataError` if the data are gone.
        """
        index = next((number for number, row in enumerate(self.rows) if row["step"] == step), None)
        config = self._job.at_step(step).config
        deviation = None if index is None else find_deviation(self.rows, index, _get_spike_config(config))
        before = None
        if retracing is not None:
            retracing.advance_to(step - 1)
        if self._reader is not None:
            examples = self._reader.read(step)
        elif retracing is not None:
            examples = list_unknown(retracing.load_arrays(step - 1))
        else:
            raise InvalidError(
                f"{self._job.spec.job} makes its own batches, of which the data say nothing; leave --data-only out"
            )
        explained = [ExplainedExample(example) for example in examples]
        if retracing is not None:
            stage = self._job.config.find_stage(step - 1)
            if stage not in self._scorers:
                self._scorers[stage] = ExampleScorer(retracing.job, step)
            explained, before = score_examples(retracing, self._scorers[stage], examples, num_shown, self._reader)
        base = max((each for each in self._committed if each < step), default=None)
        return Explanation(
            step,
            Row() if index is None else self.rows[index],
            deviation,
            list_changes(self.rows, step, self._job, self._history),
            explained,
            before,
            list_advice(self._job.store.url, step, self._job.config, base),
            describe_past(self._job.store, step, self._history),
        )
