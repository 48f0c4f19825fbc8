"""The score of one step of a run, or of all, on data of the run's or of one's own."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

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
    data = open_scored_data(run, request.data)
    checkpoints = hosts.main_first(
        lambda: list(map(run.checkpoint, run.steps())) if request.step is None else [run.find(request.step)]
    )
    scorer = Scorer(run, data.dataset, request.weights)
    sizes = {name: data.size(name) for name in data.languages} if hosts.is_main else {}
    for name, size in sizes.items():
        if size.num_bytes is None:
            warn(f"{name}: loss per byte is not known: {size.reason}")
    for checkpoint in checkpoints:
        if request.step is None and not hosts.main_first(functools.partial(run.is_there, checkpoint)):
            warn(f"{checkpoint}: left out, the run has deleted it meanwhile")
            continue
        score = scorer.score(checkpoint)
        if hosts.is_main:
            average = {} if request.weights == PARAMS else {"weights": request.weights}
            yield record_of(score, sizes) | average
