"""Loss of a run's checkpoints on its own validation sets or on any source, per token and per byte of text.

The loss comes from the run's own `val_step`. On the run's own validation sets and on as many devices it is therefore
bit-identical to the loss in the rows of `metrics.jsonl`. All functions are called on every host of the command, whose
number of hosts may differ from that of the run.
"""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from runner.attempts.layout import read_result
from runner.checkpoint.manifest import read_committed
from runner.config import TokenSource
from runner.console import warn
from runner.data import Dataset, Fields, load_validation_set
from runner.data.packing import TokenWindows
from runner.data.source_files import TOKENISE_HINT
from runner.distributed.agreement import Hosts
from runner.distributed.preemption import StopNotice
from runner.errors import DataError, InvalidError, format_error
from runner.evaluation.builtin import (
    BuiltinEvaluators,
    EvaluationData,
    load_codec_or_reason,
    select_run_data,
)
from runner.evaluation.generation import TextCodec, load_data_codec
from runner.evaluation.likelihood import EvaluationContext
from runner.inference.open_run import NEWEST, ReadOnlyRun, parse_step
from runner.metrics.media import split_media
from runner.metrics.meta import TOKEN_COUNT, UnfitMetricsError, parse_metrics
from runner.metrics.rows import Row, format_metrics
from runner.parallel.mesh import AXES, count_batch_shards, is_mesh_possible, make_mesh, resolve_mesh_sizes
from runner.spec import PARAMS, Document, SpecLocation, validate_config
from runner.spec.document import parse_yaml
from runner.storage import JsonObject
from runner.train.evaluators import Evaluator, Validation, ValidationSet, ValidationSize, ValidationSums
from runner.train.layout import BatchLayout
from runner.train.weights import copy_containers
from runner.trainer import BaseTrainer

DATA_SET = "data"  # name of the set that the command line gives
_FOLLOW_SECONDS = 10.0
_LARGEST_EXPONENT = 700.0  # exp of slightly more overflows a double
_STRETCH_BATCHES = 64  # batches whose losses are added in float32, as for a row; these sums are added in float64


@dataclass(frozen=True)
class EvaluationRequest:
    """Request for the score of checkpoints."""

    data: TokenSource | None = None  # source to score on; None for the run's own validation sets
    step: str | None = NEWEST  # number of a step, `newest` or `best`; None for all steps
    weights: str = PARAMS  # `params`, or an average such as `ema_0.999`


def parse_source(text: str) -> TokenSource:
    """Parse the value of `--data`, a name or a mapping as in `config.data.validation`. Raises `SpecError`."""
    place = SpecLocation("--data")
    # The name of a directory may begin with a brace, too.
    is_mapping = text.startswith("{") and not os.path.lexists(text.partition("/")[0])
    given = parse_yaml(text, lambda line: place)[0] if is_mapping else {"source": text}
    return validate_config(Document({"config": given}, {(): place, ("config",): place}), TokenSource)


def load_evaluation_data(
    run: ReadOnlyRun, token_source: TokenSource | None, is_in_order: bool = False
) -> EvaluationData:
    """Load a whole source, or as many examples of the run's own validation sets as the run evaluates.

    With `is_in_order` no sequence of a source holds several documents, so that they keep their order. Called on every
    host. Raises InvalidError if the run has no validation set, DataError if the ids of the source are
    known to be of another tokenizer than the run's.
    """
    job = run.job
    data = job.config.data
    if token_source is None:
        dataset = job.dataset
        dataset.validate_vocabulary(job.vocabulary_size)
        if not dataset.validation:
            raise InvalidError(f"{run.store.url}: its spec keeps no validation set; name a source with --data")
        return select_run_data(dataset, job.config)
    try:
        run_codec: TextCodec | None = load_data_codec(data)
    except DataError:  # the tokenizer of the run is not known, so nothing can be compared
        run_codec = None
    if is_in_order and data.packing == "documents":
        data = data.model_copy(update={"packing": "pad"})
    name = token_source.source
    # Losses on ids of another tokenizer would be meaningless.
    codec = load_codec_or_reason(token_source, data)
    if isinstance(codec, TextCodec) and run_codec is not None and codec.kind != run_codec.kind:
        raise DataError(
            f"--data {name}: its tokens are of another tokenizer ({codec.kind.get('kind')}) than those of the run "
            f"({run_codec.kind.get('kind')}); tokenise it with the run's"
        )
    try:
        dataset = load_validation_set(data, DATA_SET, token_source, vocabulary_size=job.vocabulary_size)
    except DataError as error:
        reason, hint, _ = str(error).removeprefix(f"data.source={name}: ").partition(TOKENISE_HINT)
        reads_text = run_codec is not None and run_codec.kind.get("kind") in ("bytes", "characters")
        advice = "write this text into a .txt file" if reads_text else "name a corpus of the run's tokenizer"
        raise DataError(f"--data {name}: {reason}{f'; {advice}' if hint else ''}") from error
    return EvaluationData(dataset, {DATA_SET: codec})


def warn_left_out(data: EvaluationData, source: TokenSource) -> None:
    """Warn of tokens at the end of a source that fill no sequence. Called on process 0."""
    examples = data.dataset.validation.get(DATA_SET)
    if isinstance(examples, TokenWindows) and examples.num_left_out:
        warn(
            f"--data {source.source}: the last {examples.num_left_out:,} tokens are left out, since they fill no "
            f"sequence of {data.dataset.units_per_example:,}"
        )


@dataclass(frozen=True)
class Score:
    """Score of one step's weights."""

    step: int
    # Summed loss and number of tokens, and meta of the job's own `forward`, by validation set.
    sums: Mapping[str, ValidationSums]
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # metrics of tasks, by name


class Scorer:
    """Scorer of checkpoints on all validation sets of `dataset`, and on questions. Made and called on every host."""

    def __init__(self, run: ReadOnlyRun, dataset: Dataset, has_tasks: bool = False):
        self._dataset, job = dataset, run.job
        mesh = _make_mesh(run)
        self.layout = _make_batch_layout(run, mesh, dataset.fields)
        train_setup = job.setup_builder.build_on_mesh(mesh, jax.random.key(job.spec.seed))
        self.is_language_model = job.setup_builder.is_language_model(train_setup)
        self.train_setup = train_setup
        self.abstract = job.weights(train_setup.abstract_state)
        self._validation = Validation(
            train_setup.abstract_state,
            lambda abstract: train_setup.compile_val(job.val_step, abstract, self.layout),
            (),
            lambda: False,
        )
        self._tasks = (
            job.session.evaluation_tasks.make_multiple_choices(make_evaluation_context(run)[0]) if has_tasks else []
        )

    def score(self, step: int, weights: Any) -> Score:
        """Return the score of the weights of a step, which are like `abstract`."""
        # `val_step` takes a train state; this one holds these weights and no optimizer state.
        state = self._validation.make_val_state(weights, step)
        sums_by_set = {}
        for name, examples in self._dataset.validation.items():
            num_batches = -(-examples.num_examples // self.layout.global_batch_examples)
            total = ValidationSums(0.0, 0.0)
            for first in range(0, num_batches, _STRETCH_BATCHES):
                stretch = ValidationSet(
                    name,
                    min(_STRETCH_BATCHES, num_batches - first),
                    functools.partial(self._load_batch, name, first),
                    self.layout.global_batch_examples * self._dataset.units_per_example,
                )
                sums = self._validation.sum(state, stretch)
                assert sums is not None, "a command is never asked to stop"
                total += sums
            sums_by_set[name] = total
        return Score(step, sums_by_set, {task.name: task.score(weights) or {} for task in self._tasks})

    def make_own_evaluators(self, job: BaseTrainer) -> list[Evaluator]:
        """Return the evaluators that the job adds to the built-in ones. Raises what the job's `evaluator` raises."""

        def load_batch(name: str, index: int) -> dict[str, jax.Array]:
            return self.layout.batch(self._dataset, name, index)

        builtin = BuiltinEvaluators(
            job.setup_builder, self.train_setup, self.layout, job.session.evaluation_tasks, load_batch, StopNotice()
        )
        chosen = job.session.list_evaluators(builtin)
        return [each for each in chosen if not any(each is known for known in builtin)]

    def _load_batch(self, name: str, first: int, index: int) -> dict[str, jax.Array]:
        return self.layout.batch(self._dataset, name, first + index)


def make_evaluation_context(run: ReadOnlyRun) -> tuple[EvaluationContext, Any]:
    """Return the context of the run's model on the available devices, and its abstract weights there."""
    job, mesh = run.job, _make_mesh(run)
    layout = _make_batch_layout(run, mesh, job.setup_builder.fields)
    abstract = job.weights(job.setup_builder.build_on_mesh(mesh, jax.random.key(job.spec.seed)).abstract_state)
    size = layout.micro_batch_examples
    return EvaluationContext(job.model(), mesh, size, job.vocabulary_size, lambda: False), abstract


def _make_mesh(run: ReadOnlyRun) -> Mesh:
    """Return the run's own mesh if it is possible on the available devices, else FSDP over all of them."""
    num_devices, mesh = jax.device_count(), run.job.topology.mesh
    if is_mesh_possible(mesh, num_devices):
        return make_mesh(resolve_mesh_sizes(mesh, num_devices))
    return make_mesh(dict.fromkeys(AXES, 1) | {"fsdp": num_devices})


def _make_batch_layout(run: ReadOnlyRun, mesh: Mesh, fields: Fields) -> BatchLayout:
    """Return the run's validation batch, or the next larger one; its micro-batches are no larger than the run's."""
    train, own, num_shards = run.job.config.train, run.job.config.eval, count_batch_shards(mesh)
    train_share, shard_examples = (
        -(-size // num_shards)
        for size in (train.global_batch_examples, own.global_batch_examples or train.global_batch_examples)
    )
    wanted = own.micro_batch_examples or train.micro_batch_examples
    largest = train_share if wanted == "auto" else int(wanted)
    # A micro-batch of the run fits its memory, and so does any smaller one.
    micro_batch = max(
        size for size in range(1, shard_examples + 1) if shard_examples % size == 0 and size <= max(1, largest)
    )
    is_ordered = train.same_bits_devices is not None
    return BatchLayout(mesh, shard_examples * num_shards, micro_batch, fields, is_ordered)


def make_record(score: Score, sizes: Mapping[str, ValidationSize], is_language_model: bool = True) -> JsonObject:
    """Return the metrics of a step over all tokens, whose loss is `val/loss` of a row, and those of each set."""

    def compute_metrics(sums: ValidationSums, num_bytes: int | None) -> JsonObject:
        """Return the metrics of a set; values that are not finite or not known are None."""
        loss = sums.loss / sums.num_tokens if sums.num_tokens else math.nan
        # The loss of another job is in a unit of its own.
        perplexity = math.exp(loss) if is_language_model and loss < _LARGEST_EXPONENT else math.inf
        loss_per_byte = sums.loss / num_bytes if num_bytes else math.nan
        found = {"loss": loss, "perplexity": perplexity, "loss_per_byte": loss_per_byte}
        finite = {name: value if math.isfinite(value) else None for name, value in found.items()}
        # A sum of loss weights may be no integer.
        tokens = int(sums.num_tokens) if sums.num_tokens.is_integer() else sums.num_tokens
        own = {name: value for name, value in sums.meta.items() if name != TOKEN_COUNT}
        return finite | {"tokens": tokens, "bytes": num_bytes} | ({"metrics": own} if own else {})

    sets = {}
    for name, sums in score.sums.items():
        # The bytes are known only if the loss covers exactly the targets of the set; a job's own loss may omit some.
        size = sizes.get(name)
        is_whole = size is not None and size.num_targets == sums.num_tokens
        sets[name] = compute_metrics(sums, size.num_bytes if size is not None and is_whole else None)
    num_bytes = [metrics["bytes"] for metrics in sets.values()]
    # If there is one set, its metrics are those of the whole. Most metrics of several sets have different weights.
    parts = [sums if len(sets) == 1 else sums.select_common() for sums in score.sums.values()]
    whole = sum(parts, ValidationSums(0.0, 0.0))
    total = compute_metrics(whole, None if None in num_bytes else sum(num_bytes))
    record = {"step": score.step, **total, "sets": sets}
    record |= {"tasks": dict(score.tasks)} if score.tasks else {}
    # Only a loss in no known unit is marked, so that records of language models keep their keys.
    return record if is_language_model else record | {"language_model": False}


def format_record(record: JsonObject) -> list[str]:
    """Format a record for the terminal: a line for each set if there are several, one for all, one for each task."""
    sets = record["sets"] if len(record["sets"]) > 1 else {}
    step = " ".join(["step", str(record["step"]), *([record["weights"]] if "weights" in record else [])])
    unit, targets = (" nats a token", "tokens") if record.get("language_model", True) else ("", "targets")
    lines = []
    for name, metrics in [*sets.items(), ("", record)]:
        prefix = f"{step}{f' {name}' if name else ''}"
        if metrics["loss"] is None:
            reason = "loss is not finite" if metrics["tokens"] else "no loss, because there is no target"
            lines.append(f"{prefix}: {reason} ({metrics['tokens']:,.0f} {targets})")
            continue
        parts = [f"loss {metrics['loss']:.6f}{unit}"]
        if metrics["perplexity"] is not None:
            parts.append(f"perplexity {metrics['perplexity']:.4f}")
        if metrics["loss_per_byte"] is not None:
            parts.append(f"{metrics['loss_per_byte']:.6f} nats a byte")
        parts += format_metrics(metrics.get("metrics", {}))
        size = f"{metrics['tokens']:,.0f} {targets}" + (f", {metrics['bytes']:,} bytes" if metrics["bytes"] else "")
        lines.append(f"{prefix}: {', '.join(parts)} ({size})")
    for name, metrics in record.get("tasks", {}).items():
        numbers = ", ".join(f"{key} {value:.4f}" for key, value in metrics.items())
        lines.append(f"{step} {name}: {numbers}")
    return lines


class CheckpointEvaluator(Protocol):
    """Evaluation of weights, one checkpoint after the other. Made and called on every host."""

    abstract: Any  # abstract weights, with their shardings
    weights: str  # `params`, or an average

    def evaluate(self, step: int, weights: Any) -> JsonObject | None:
        """Return the record of one step; None on processes other than 0."""


class LossEvaluator:
    """Evaluation on validation sets, and by the job's own evaluators on those of the run: a `CheckpointEvaluator`."""

    def __init__(self, run: ReadOnlyRun, source: TokenSource | None, hosts: Hosts, weights: str):
        data = load_evaluation_data(run, source)
        if hosts.is_main and source is not None:
            warn_left_out(data, source)
        self._scorer = Scorer(run, data.dataset, has_tasks=source is None)
        self.abstract, self.weights, self._hosts = self._scorer.abstract, weights, hosts
        # Only process 0 makes records, so the others need not decode the sets.
        has_text = hosts.is_main and self._scorer.is_language_model
        self._sizes = {name: data.measure(name) for name in data.codecs} if has_text else {}
        for name, size in self._sizes.items():
            if size.num_bytes is None:
                warn(f"{name}: loss per byte is not known: {size.reason}")
        self._own: list[Evaluator] = []
        has_own = source is None and type(run.job).evaluator is not BaseTrainer.evaluator
        if has_own and hosts.num_processes > 1:
            # An evaluator that fails on one process would leave the others waiting, without a watchdog.
            if hosts.is_main:
                warn("evaluators of the job are left out: evaluate calls them in one process only")
        elif has_own:
            try:
                self._own = self._scorer.make_own_evaluators(run.job)
            except Exception as error:  # noqa: BLE001 - code of a user, which may need a running job
                warn(f"evaluators of the job are left out: {format_error(error)}")

    def evaluate(self, step: int, weights: Any) -> JsonObject | None:
        """Return the record of one step; None on processes other than 0."""
        score = self._scorer.score(step, weights)
        if not self._hosts.is_main:
            return None
        record = make_record(score, self._sizes, self._scorer.is_language_model)
        if own := self._call_own(step, weights):
            record["metrics"] = record.get("metrics", {}) | own
        return record if self.weights == PARAMS else record | {"weights": self.weights}

    def _call_own(self, step: int, weights: Any) -> Row:
        """Return the metrics of the job's own evaluators. One that fails prints a line and has no metrics."""
        metrics: Row = {}
        for evaluator in self._own:
            try:
                returned = evaluator.evaluate(copy_containers(weights), step, self._hosts)
                returned, media = split_media({} if returned is None else returned)
                own = parse_metrics(returned, metrics)[0]
                # Images and audio are files of a run's directory, which this command does not write to.
                metrics |= {key: value for key, value in own.items() if key not in media}
            except Exception as error:  # noqa: BLE001 - code of a user
                reason = str(error) if isinstance(error, UnfitMetricsError) else format_error(error)
                warn(f"evaluator {getattr(evaluator, 'name', type(evaluator).__name__)}: {reason}")
        return {key.removeprefix("val/"): value for key, value in metrics.items()}


def evaluate(
    run: ReadOnlyRun,
    request: EvaluationRequest,
    hosts: Hosts,
    make_evaluator: Callable[[ReadOnlyRun], CheckpointEvaluator] | None = None,
) -> Iterator[JsonObject]:
    """Yield the record of each requested step on process 0, nothing on others. Must be exhausted on every host.

    A checkpoint that the run deletes meanwhile is left out with a warning if all are requested. `newest` and `best` are
    looked for again.

    `make_evaluator` makes the evaluator for a run with the config of one stage; None: on the request's data. Raises
    InvalidError if there is no such checkpoint, or it cannot be scored.
    """
    get_evaluator = _cache_evaluators(
        run, make_evaluator or (lambda own: LossEvaluator(own, request.data, hosts, request.weights))
    )
    if request.step is None:
        # Process 0 lists the checkpoints, because another host might see one more or one less.
        steps = hosts.run_on_main(run.list_steps)
        for step in steps:
            yield from _evaluate_if_there(run, get_evaluator(step), step, hosts)
        return
    # A wrong step is reported before the data are read.
    given = request.step
    first = hosts.run_on_main(lambda: run.find_checkpoint(given))
    own = get_evaluator(parse_step(first))
    checkpoint, weights = run.load_found_weights(given, own.abstract, own.weights, hosts, first)
    record = own.evaluate(parse_step(checkpoint), weights)
    if record is not None:
        yield record


def _cache_evaluators(
    run: ReadOnlyRun, make_evaluator: Callable[[ReadOnlyRun], CheckpointEvaluator]
) -> Callable[[int], CheckpointEvaluator]:
    """Return a function from a step to its evaluator: one for each config that the run has had."""

    @functools.cache
    def make(stage: int) -> CheckpointEvaluator:
        return make_evaluator(dataclasses.replace(run, job=run.job.stage_jobs[stage]))

    return lambda step: make(run.job.config.find_stage(max(step - 1, 0)))


def follow(
    run: ReadOnlyRun,
    data: TokenSource | None,
    hosts: Hosts,
    is_known: Callable[[int], bool] = lambda step: False,
    wait: Callable[[], None] = lambda: time.sleep(_FOLLOW_SECONDS),
    weights: str = PARAMS,
    make_evaluator: Callable[[ReadOnlyRun], CheckpointEvaluator] | None = None,
) -> Iterator[JsonObject]:
    """Yield the record of each step that a run commits, until the run is done; otherwise like `evaluate`.

    `data` is the source to score on, None for the run's own validation sets. `is_known` returns True for a step that
    needs no record, and `wait` is called while there is no new step.
    """
    get_evaluator = _cache_evaluators(run, make_evaluator or (lambda own: LossEvaluator(own, data, hosts, weights)))
    seen = set[int]()

    def find_new_steps() -> tuple[bool, list[int]]:
        # The result is read first. In the other order, a checkpoint that is committed in between would be missed.
        is_done = read_result(run.store) is not None
        return is_done, [step for step in read_committed(run.store) if step not in seen and not is_known(step)]

    while True:
        is_done, steps = hosts.run_on_main(find_new_steps)
        for step in steps:
            seen.add(step)
            yield from _evaluate_if_there(run, get_evaluator(step), step, hosts)
        if not steps:
            if is_done:
                return
            wait()


def _evaluate_if_there(
    run: ReadOnlyRun, evaluator: CheckpointEvaluator, step: int, hosts: Hosts
) -> Iterator[JsonObject]:
    """Yield the record of a step on process 0; nothing on others, or if the run has deleted its checkpoint."""
    checkpoint, weights = run.get_checkpoint(step), None
    # All hosts decide together: a single host that misses the checkpoint would leave the others waiting in the program.
    is_there = hosts.run_on_main(functools.partial(run.has_checkpoint, checkpoint))
    if is_there:
        weights, problem = run.load_unless_deleted(checkpoint, evaluator.abstract, evaluator.weights, hosts)
        is_there = problem is None
    if not is_there:
        warn(f"{checkpoint}: skipped, because the run has deleted it meanwhile")
        return
    record = evaluator.evaluate(step, weights)
    if record is not None:
        yield record
