"""The score of one step of a run, or of all, on data of the run's or of one's own."""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from runner.attempt.result import read_result
from runner.checkpoint.manifest import committed
from runner.config import TokenSource
from runner.hosts.agreement import Hosts
from runner.inference.opening import NEWEST, Opened
from runner.inference.scored_data import open_scored_data
from runner.inference.scoring import Scorer, record_of
from runner.record import PARAMS
from runner.spec import Document, Place, validate_config
from runner.spec.dialect import parse
from runner.storage import JsonObject
from runner.terminal import warn

FOLLOW_SECONDS = 10.0


@dataclass(frozen=True)
class Request:
    """What is asked for: the score on `data`, or else on the run's own sets, of `step`, or else (None) of all.

    `weights` are those that are trained, or an average such as `ema_0.999`.
    """

    data: TokenSource | None = None
    step: str | None = NEWEST
    weights: str = PARAMS


def parse_source(text: str) -> TokenSource:
    """A source as `config.data.validation` takes it: its name, or a mapping. Raises `SpecError`."""
    place = Place("--data")
    given = parse(text, lambda line: place)[0] if text.startswith("{") else {"source": text}
    return validate_config(Document({"config": given}, {(): place, ("config",): place}), TokenSource)


def evaluate(run: Opened, request: Request, hosts: Hosts) -> Iterator[JsonObject]:
    """The record of each step, on the main host; nothing on the others. To be read to its end on every host.

    Of all steps one that the run deletes meanwhile is left out, and told. Raises `InvalidError`.
    """
    checkpoints = hosts.main_first(
        lambda: list(map(run.checkpoint, run.steps())) if request.step is None else [run.find(request.step)]
    )
    judge = _Judge(run, request.data, hosts, request.weights)
    for checkpoint in checkpoints:
        yield from judge.record(checkpoint, may_be_gone=request.step is None)


def follow(
    run: Opened,
    data: TokenSource | None,
    hosts: Hosts,
    is_known: Callable[[int], bool] = lambda step: False,
    wait: Callable[[], None] = lambda: time.sleep(FOLLOW_SECONDS),
    weights: str = PARAMS,
) -> Iterator[JsonObject]:
    """The record of each step that a run commits, as it comes, but for those that are known, until the run is done.

    Like `evaluate`. Between two looks it calls `wait`. What the run deletes before it is read is left out, and told.
    """
    judge, seen = _Judge(run, data, hosts, weights), set[int]()

    def look() -> tuple[bool, list[int]]:
        is_done = read_result(run.store) is not None  # first: what is committed afterwards would be missed
        return is_done, [step for step in committed(run.store) if step not in seen and not is_known(step)]

    while True:
        is_done, steps = hosts.main_first(look)
        for step in steps:
            seen.add(step)
            yield from judge.record(run.checkpoint(step), may_be_gone=True)
        if not steps:
            if is_done:
                return
            wait()


class _Judge:
    """Scores one checkpoint after the other. Made and called on every host."""

    def __init__(self, run: Opened, source: TokenSource | None, hosts: Hosts, weights: str):
        data = open_scored_data(run, source)
        self._run, self._hosts, self._weights = run, hosts, weights
        self._scorer = Scorer(run, data.dataset, weights, asks=source is None)
        self._sizes = {name: data.size(name) for name in data.languages} if hosts.is_main else {}
        for name, size in self._sizes.items():
            if size.num_bytes is None:
                warn(f"{name}: loss per byte is not known: {size.reason}")

    def record(self, checkpoint: str, may_be_gone: bool) -> Iterator[JsonObject]:
        """Its record on the main host; none on others, or if it may be gone and is."""
        if may_be_gone and not self._hosts.main_first(functools.partial(self._run.is_there, checkpoint)):
            warn(f"{checkpoint}: left out, the run has deleted it meanwhile")
            return
        score = self._scorer.score(checkpoint)
        if self._hosts.is_main:
            average = {} if self._weights == PARAMS else {"weights": self._weights}
            yield record_of(score, self._sizes) | average
