"""The loss of a run's weights on sets of examples: over all tokens, and over all bytes of their text.

By the run's own `val_step`, so that on its own validation sets, on as many devices, the loss is that of its rows, bit
for bit. Everything is called on every host of the command, which need not be as many as the run has.

What weights are scored on: a run's own validation sets, or any source.

The score of one step of a run, or of all, on data of the run's or of one's own.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from runner.checkpoint.manifest import read_committed
from runner.config import TokenSource
from runner.console import warn
from runner.data import Dataset, get_batch_fields, load_validation_set
from runner.data.packing import Fields
from runner.distributed.agreement import Hosts
from runner.errors import DataError, InvalidError
from runner.evaluation.builtin import EvaluationContext, EvaluationData, load_codec_or_reason, select_run_data
from runner.evaluation.generation import TextCodec, load_data_codec
from runner.inference.open_run import NEWEST, ReadOnlyRun, parse_step
from runner.parallel.mesh import AXES, count_batch_shards, is_mesh_possible, make_mesh, resolve_mesh_sizes
from runner.records import PARAMS
from runner.run.layout import read_result
from runner.spec import Document, SpecLocation, validate_config
from runner.spec.document import parse_yaml
from runner.storage import JsonObject
from runner.train.batch_layout import BatchLayout
from runner.train.evaluators import Validation, ValidationSet, ValidationSize
from runner.trainer import BaseTrainer

DATA_SET = "data"  # the set that the command line names


def load_evaluation_data(run: ReadOnlyRun, named: TokenSource | None) -> EvaluationData:
    """All of a source, or of the run's own validation sets as many examples as the run looks at. On every host.

    Raises `InvalidError` if there is nothing to score, or if the ids of the source mean something else to the run.
    """
    job = run.job
    data = job.config.data
    if named is not None:
        language = load_codec_or_reason(named, data)
        _refuse_another(language, job, named)
        return EvaluationData(
            load_validation_set(data, DATA_SET, named, vocabulary_size=job.vocabulary_size), {DATA_SET: language}
        )
    dataset = job.dataset
    dataset.validate_vocabulary(job.vocabulary_size)
    if not dataset.validation:
        raise InvalidError(f"{run.store.url}: its spec keeps no validation set; name a source with --data")
    return select_run_data(dataset, job.config)


def _refuse_another(found: TextCodec | str, job: BaseTrainer, named: TokenSource) -> None:
    """Raise `DataError` if the ids of a source are known to mean something else than those that the run trains on."""
    try:
        own = load_data_codec(job.config.data)
    except DataError:
        return
    if isinstance(found, TextCodec) and found.kind != own.kind:
        raise DataError(
            f"--data {named.source}: its tokens are of another tokenizer ({found.kind.get('kind')}) than those of the "
            f"run ({own.kind.get('kind')}); tokenise it with the run's"
        )


_LARGEST_EXPONENT = 700.0  # a double ends soon behind
_STRETCH_BATCHES = 64  # whose losses are added up in float32, as those of a row; stretches are in float64


@dataclass(frozen=True)
class Score:
    """The summed loss in nats of one step's weights, and the number of tokens, by set; figures of tasks by name."""

    step: int
    sums: Mapping[str, tuple[float, float]]
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class Scorer:
    """Scores checkpoints of `run` on all validation sets of `dataset`. Made on every host, and then asked there.

    With `asks` they are asked the questions of the run's `eval.multiple_choice`, too.
    """

    def __init__(self, run: ReadOnlyRun, dataset: Dataset, weights: str = PARAMS, asks: bool = False):
        self._run, self._dataset, self._weights, job = run, dataset, weights, run.job
        mesh = _mesh_here(run)
        self._layout = _lay_out(run, mesh, dataset.fields)
        train_setup = job.setup_builder.build_on_mesh(mesh, jax.random.key(job.spec.seed))
        self._abstract = job.weights(train_setup.abstract_state)
        self._validation = Validation(
            train_setup.abstract_state,
            lambda abstract: train_setup.compile_val(job.val_step, abstract, self._layout),
            (),
            lambda: False,
        )
        self._tasks = job.evaluation_tasks.make_multiple_choices(make_evaluation_context(run)[0]) if asks else []

    def score(self, checkpoint: str) -> Score:
        """The score of one checkpoint, by the name that `ReadOnlyRun.find` gives.

        Raises as `ReadOnlyRun.weights` does.
        """
        step, weights = parse_step(checkpoint), self._run.load_weights(checkpoint, self._abstract, self._weights)
        state = self._validation.make_val_state(weights, step)
        found = {}
        for name in self._dataset.validation:
            loss_sum = num_tokens = 0.0
            for stretch in self._stretches(name):
                sums = self._validation.sum(state, stretch)
                assert sums is not None, "nobody asks it to stop"
                loss_sum, num_tokens = loss_sum + sums.loss, num_tokens + sums.num_tokens
            found[name] = loss_sum, num_tokens
        return Score(step, found, {task.name: task.score(weights) or {} for task in self._tasks})

    def _stretches(self, name: str) -> Iterator[ValidationSet]:
        num_batches = -(-self._dataset.validation[name].num_examples // self._layout.global_batch_examples)
        for first in range(0, num_batches, _STRETCH_BATCHES):
            number = min(_STRETCH_BATCHES, num_batches - first)
            yield ValidationSet(name, number, functools.partial(self._batch, name, first))

    def _batch(self, name: str, first: int, index: int) -> dict[str, jax.Array]:
        return self._layout.batch(self._dataset, name, first + index)


def make_evaluation_context(run: ReadOnlyRun) -> tuple[EvaluationContext, Any]:
    """Where the run's model is asked on the devices at hand, and the abstract weights that it needs there."""
    job, mesh = run.job, _mesh_here(run)
    layout = _lay_out(run, mesh, get_batch_fields(job.config.data))
    abstract = job.weights(job.setup_builder.build_on_mesh(mesh, jax.random.key(job.spec.seed)).abstract_state)
    size = layout.micro_batch_examples
    return EvaluationContext(job.model(), mesh, size, job.vocabulary_size, lambda: False), abstract


def _mesh_here(run: ReadOnlyRun) -> Mesh:
    """The run's own mesh if it fits on the devices at hand, else weights and batch cut over all of them."""
    number, mesh = jax.device_count(), run.job.topology.mesh
    sizes = (
        resolve_mesh_sizes(mesh, number)
        if is_mesh_possible(mesh, number)
        else dict.fromkeys(AXES, 1) | {"fsdp": number}
    )
    return make_mesh(sizes)


def _lay_out(run: ReadOnlyRun, mesh: Mesh, fields: Fields) -> BatchLayout:
    """The run's own global batch, or the next larger one that divides over these devices; micro-batches no larger."""
    train, shards = run.job.config.train, count_batch_shards(mesh)
    share = -(-train.global_batch_examples // shards)
    most = share if train.micro_batch_examples == "auto" else int(train.micro_batch_examples)
    micro = max(size for size in range(1, share + 1) if share % size == 0 and size <= max(1, most))
    is_ordered = train.same_bits_devices is not None
    return BatchLayout(mesh, share * shards, micro, run.job.config.data.sequence_length, fields, is_ordered)


def make_record(score: Score, sizes: Mapping[str, ValidationSize]) -> JsonObject:
    """The figures of a step: those of all its tokens, whose loss is `val/loss` of a row, and those of each set."""
    sets = {name: _figures(*sums, _bytes_of(sizes[name], sums[1])) for name, sums in score.sums.items()}
    loss_sum, num_tokens = (sum(sums) for sums in zip(*score.sums.values(), strict=True))
    known = [figures["bytes"] for figures in sets.values()]
    all_sets = _figures(loss_sum, num_tokens, None if None in known else sum(known))
    return {"step": score.step, **all_sets, "sets": sets} | ({"tasks": dict(score.tasks)} if score.tasks else {})


def _bytes_of(size: ValidationSize, num_tokens: float) -> int | None:
    """The bytes of a set's text, if the loss is of just its targets: a job's own may leave some out."""
    return size.num_bytes if size.num_targets == num_tokens else None


def _figures(loss_sum: float, num_tokens: float, num_bytes: int | None) -> JsonObject:
    """What is not finite, or not known, is null."""
    loss = loss_sum / (num_tokens or 1.0)
    perplexity = math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf
    found = {"loss": loss, "perplexity": perplexity, "loss_per_byte": loss_sum / num_bytes if num_bytes else math.nan}
    finite = {name: value if math.isfinite(value) else None for name, value in found.items()}
    tokens = int(num_tokens) if num_tokens.is_integer() else num_tokens  # weights need not add up to a whole number
    return finite | {"tokens": tokens, "bytes": num_bytes}


def format_record(record: JsonObject) -> list[str]:
    """For a person: a line for all sets, and before it one for each if there are several; then one for each task."""
    sets = record["sets"] if len(record["sets"]) > 1 else {}
    named = [*((name, figures) for name, figures in sets.items()), ("", record)]
    step = " ".join(["step", str(record["step"]), *([record["weights"]] if "weights" in record else [])])
    lines = [f"{step}{f' {name}' if name else ''}: {_line(figures)}" for name, figures in named]
    for name, figures in record.get("tasks", {}).items():
        numbers = ", ".join(f"{key} {value:.4f}" for key, value in figures.items())
        lines.append(f"{step} {name}: {numbers}")
    return lines


def _line(figures: JsonObject) -> str:
    if figures["loss"] is None:
        return f"loss is not finite ({figures['tokens']:,.0f} tokens)"
    parts = [f"loss {figures['loss']:.6f} nats a token"]
    if figures["perplexity"] is not None:
        parts.append(f"perplexity {figures['perplexity']:.4f}")
    if figures["loss_per_byte"] is not None:
        parts.append(f"{figures['loss_per_byte']:.6f} nats a byte")
    size = f"{figures['tokens']:,.0f} tokens" + (f", {figures['bytes']:,} bytes" if figures["bytes"] else "")
    return f"{', '.join(parts)} ({size})"


FOLLOW_SECONDS = 10.0


@dataclass(frozen=True)
class EvaluationRequest:
    """What is asked for: the score on `data`, or else on the run's own sets, of `step`, or else (None) of all.

    `weights` are those that are trained, or an average such as `ema_0.999`.
    """

    data: TokenSource | None = None
    step: str | None = NEWEST
    weights: str = PARAMS


def parse_source(text: str) -> TokenSource:
    """A source as `config.data.validation` takes it: its name, or a mapping. Raises `SpecError`."""
    place = SpecLocation("--data")
    given = parse_yaml(text, lambda line: place)[0] if text.startswith("{") else {"source": text}
    return validate_config(Document({"config": given}, {(): place, ("config",): place}), TokenSource)


def evaluate(run: ReadOnlyRun, request: EvaluationRequest, hosts: Hosts) -> Iterator[JsonObject]:
    """The record of each step, on the main host; nothing on the others. To be read to its end on every host.

    Of all steps one that the run deletes meanwhile is left out, and told. Raises `InvalidError`.
    """
    checkpoints = hosts.run_on_main(
        lambda: (
            list(map(run.get_checkpoint, run.list_steps()))
            if request.step is None
            else [run.find_checkpoint(request.step)]
        )
    )
    judge = _CheckpointEvaluator(run, request.data, hosts, request.weights)
    for checkpoint in checkpoints:
        yield from judge.record(checkpoint, may_be_gone=request.step is None)


def follow(
    run: ReadOnlyRun,
    data: TokenSource | None,
    hosts: Hosts,
    is_known: Callable[[int], bool] = lambda step: False,
    wait: Callable[[], None] = lambda: time.sleep(FOLLOW_SECONDS),
    weights: str = PARAMS,
) -> Iterator[JsonObject]:
    """The record of each step that a run commits, as it comes, but for those that are known, until the run is done.

    Like `evaluate`. Between two looks it calls `wait`. What the run deletes before it is read is left out, and told.
    """
    judge, seen = _CheckpointEvaluator(run, data, hosts, weights), set[int]()

    def look() -> tuple[bool, list[int]]:
        is_done = read_result(run.store) is not None  # first: what is committed afterwards would be missed
        return is_done, [step for step in read_committed(run.store) if step not in seen and not is_known(step)]

    while True:
        is_done, steps = hosts.run_on_main(look)
        for step in steps:
            seen.add(step)
            yield from judge.record(run.get_checkpoint(step), may_be_gone=True)
        if not steps:
            if is_done:
                return
            wait()


class _CheckpointEvaluator:
    """Scores one checkpoint after the other. Made and called on every host."""

    def __init__(self, run: ReadOnlyRun, source: TokenSource | None, hosts: Hosts, weights: str):
        data = load_evaluation_data(run, source)
        self._run, self._hosts, self._weights = run, hosts, weights
        self._scorer = Scorer(run, data.dataset, weights, asks=source is None)
        self._sizes = {name: data.measure(name) for name in data.codecs} if hosts.is_main else {}
        for name, size in self._sizes.items():
            if size.num_bytes is None:
                warn(f"{name}: loss per byte is not known: {size.reason}")

    def record(self, checkpoint: str, may_be_gone: bool) -> Iterator[JsonObject]:
        """Its record on the main host; none on others, or if it may be gone and is."""
        if may_be_gone and not self._hosts.run_on_main(functools.partial(self._run.has_checkpoint, checkpoint)):
            warn(f"{checkpoint}: left out, the run has deleted it meanwhile")
            return
        score = self._scorer.score(checkpoint)
        if self._hosts.is_main:
            average = {} if self._weights == PARAMS else {"weights": self._weights}
            yield make_record(score, self._sizes) | average
