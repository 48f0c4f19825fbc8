"""Ladder of models: runs of ascending depth, the scaling law of their losses, and its forecast for a larger run.

The runs are those of a sweep with an explicit list (`sweep.json`), whose values follow from the depth (`runner scale`).
When all are finished the law is fitted. The forecast for a larger size is written into that run's own directory before
the run begins (`forecast.json`), and the run records that it began with it.

After an interruption the same command continues, and comes to the same law and forecast.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from launch.options import SpecOptions, runner_arguments, set_arguments
from runner.attempts.layout import OWNER, RESULT, RESULT_KEYS, DamagedRecordError, read_record, write_forecast
from runner.command_line import HeadSize, TokensPerParameter, WidthPerLayer, parse_depths, parse_numbers
from runner.console import say
from runner.errors import EXIT_DONE, EXIT_INVALID, FailedError, InvalidError
from runner.history.lineage import format_forecast
from runner.history.sweep import SWEEP, Sweep, SweepRun, read_sweep
from runner.spec import load_attribute, load_document, validate_spec
from runner.spec.document import format_overrides
from runner.storage import JsonObject, Store, make_store

_METRIC = "val/loss"


@dataclass(frozen=True, kw_only=True)
class LadderArguments(SpecOptions):
    """Arguments of `launch ladder`."""

    sizes: Annotated[str, typer.Option(metavar="N,N,...", help="Depths of the models, ascending; at least 4.")]
    tokens_per_parameter: TokensPerParameter = "20"
    width_per_layer: WidthPerLayer = 64
    head_size: HeadSize = None
    forecast: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Depth of a larger model whose loss is forecast before it is trained."),
    ] = None
    is_then: Annotated[bool, typer.Option("--then", help="Train that model when its forecast is written.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = 4 if len(self.ratios) == 1 else 3
        if len(self.depths) < needed:
            raise InvalidError(f"--sizes {self.sizes}: a law needs at least {needed} sizes")
        if len(self.ratios) > 1 and self.ratios[-1] < 1.5 * self.ratios[0]:
            raise InvalidError(
                f"--tokens-per-parameter {self.tokens_per_parameter}: the ratios are too near to tell N and D apart; "
                "give one, or some that differ by a factor of 1.5 at least"
            )
        if self.forecast is not None and self.forecast <= self.depths[-1]:
            raise InvalidError(f"--forecast {self.forecast}: needs a depth above those of --sizes {self.sizes}")
        if self.is_then and self.forecast is None:
            raise InvalidError("--then: needs --forecast N, the model to train")

    @property
    def depths(self) -> list[int]:
        """Depths, ascending."""
        return parse_depths("--sizes", self.sizes)

    @property
    def ratios(self) -> list[float]:
        """Ratios of tokens to parameters, ascending."""
        return parse_numbers("--tokens-per-parameter", self.tokens_per_parameter)


def run(arguments: LadderArguments) -> int:
    """Train the models of a ladder, fit the law, write the forecast, and return the exit code."""
    document = load_document(arguments.spec, arguments.overrides)
    spec = validate_spec(document)
    store = make_store(spec.directory)
    rule = {
        "kind": "ladder",
        "sizes": arguments.depths,
        "tokens_per_parameter": arguments.ratios,
        "width_per_layer": arguments.width_per_layer,
        "head_size": arguments.head_size,
    }
    known = _read_ladder(store)
    if known is not None and (known.digest, known.rule) != (document.compute_digest(), rule):
        raise InvalidError(
            f"{store.url}: holds another {known.rule.get('kind', 'sweep')}, of {known.spec}; use another directory, or "
            "the same command"
        )
    if known is None:
        sizes = _derive_sizes(arguments, arguments.depths, arguments.ratios)
        runs = tuple(SweepRun(_name_run(arguments, size), size["values"]) for size in sizes)
        ladder = {"sizes": {_name_run(arguments, size): _describe_size(size) for size in sizes}, "forecasts": {}}
        known = Sweep(spec.name, arguments.spec, document.compute_digest(), _METRIC, False, rule, runs, {}, ladder)
        store.write(SWEEP, known.encode())

    for number, each in enumerate(known.runs, 1):
        if _read_loss(store, each.name) is None:
            say(f"{spec.name}: run {number} of {len(known.runs)}, {each.name}")
            if (code := _train(arguments, spec.name, store, each.name, each.values)) != EXIT_DONE:
                return code
    if arguments.forecast is None:
        say(f"{store.url}: all {len(known.runs)} runs are finished; --forecast N forecasts a larger one")
        return EXIT_DONE

    # The forecast is for the largest ratio, so that neither N nor D of the run is inside the ladder.
    (size,) = _derive_sizes(arguments, [arguments.forecast], arguments.ratios[-1:])
    name = f"d{arguments.forecast}"
    if name not in known.ladder["forecasts"]:
        points = []
        for each in known.runs:
            own = known.ladder["sizes"][each.name]
            points.append((own["parameters"], own["tokens"], _read_loss(store, each.name)))
        record = _fit(points, (size["parameters"], size["tokens"])) | {"ladder": store.url}
        forecasts = known.ladder["forecasts"] | {name: record}
        known = replace(known, ladder=known.ladder | {"forecasts": forecasts})
        store.write(SWEEP, known.encode())
    record = known.ladder["forecasts"][name]
    write_forecast(make_store(f"{spec.directory.rstrip('/')}/{name}"), record)
    say(f"{name}: {record['parameters']:,} parameters, {record['tokens']:,} tokens: {format_forecast(record)}")
    say(f"{record['law']['formula']}, by {len(known.runs)} runs of {store.url}")
    if arguments.is_then:
        if (code := _train(arguments, spec.name, store, name, size["values"])) != EXIT_DONE:
            return code
        loss = _read_loss(store, name)
        assert loss is not None, "a run that ends with 0 has written its result"
        place = "inside" if record["low"] <= loss <= record["high"] else "outside"
        say(f"{name}: the loss is {loss:.4f}, {place} the interval; {loss / record['loss'] - 1:+.2%} of the forecast")
    else:
        say(f"next: {shlex.join(['python', *_make_command(arguments, spec.name, store, name, size['values'])])}")
    return EXIT_DONE


def _read_ladder(store: Store) -> Sweep | None:
    try:
        known = read_sweep(store)
    except DamagedRecordError as error:
        raise InvalidError(f"{error}; move it away, and the finished runs stay finished") from error
    if known is None and store.exists(OWNER):
        raise InvalidError(f"{store.url}: a run is here; use a directory of its own for the ladder")
    return known


def _derive_sizes(arguments: LadderArguments, depths: Sequence[int], ratios: Sequence[float]) -> list[JsonObject]:
    """Return the sizes that `runner scale` derives, in a process of its own, since this one imports no jax."""
    words = ["-m", "runner", "scale", arguments.spec, "--json", *set_arguments(arguments.overrides)]
    words += ["--depth", ",".join(map(str, depths)), "--tokens-per-parameter", ",".join(f"{each!r}" for each in ratios)]
    words += ["--width-per-layer", str(arguments.width_per_layer)]
    words += [] if arguments.head_size is None else ["--head-size", str(arguments.head_size)]
    found = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if found.returncode != EXIT_DONE:
        kind = InvalidError if found.returncode == EXIT_INVALID else FailedError
        raise kind(found.stderr.strip().removeprefix("error: "))
    sizes: list[JsonObject] = json.loads(found.stdout)
    return sizes


def _name_run(arguments: LadderArguments, size: JsonObject) -> str:
    ratio = f"_r{size['tokens_per_parameter']:g}" if len(arguments.ratios) > 1 else ""
    return f"d{size['depth']}{ratio}"


def _describe_size(size: JsonObject) -> JsonObject:
    return {key: size[key] for key in ("depth", "parameters", "embedding_parameters", "tokens")}


def _read_loss(store: Store, name: str) -> float | None:
    """Return the validation loss at the end of a run, or None if it is not finished.

    Raises `InvalidError` if it has none, or a hook has ended the run before its last step.
    """
    place = make_store(f"{store.url}/{name}")
    result = read_record(place, RESULT, RESULT_KEYS, ["step"])
    if result is None:
        return None
    if not isinstance(loss := result.get("val_loss"), float):
        raise InvalidError(f"{place.url}: has no validation loss at its end; give the spec data.validation_fraction")
    if result.get("stopped_by") is not None:
        raise InvalidError(
            f"{place.url}: was stopped by {result['stopped_by']} before its last step; leave the hook out"
        )
    return loss


def _make_command(arguments: LadderArguments, base: str, store: Store, name: str, values: dict[str, Any]) -> list[str]:
    own = format_overrides({"name": f"{base}_{name}", "directory": f"{store.url}/{name}", **values})
    return ["-m", "launch", "local", *runner_arguments(arguments.spec, [*arguments.overrides, *own])[2:]]


def _train(arguments: LadderArguments, base: str, store: Store, name: str, values: Any) -> int:
    return subprocess.run([sys.executable, *_make_command(arguments, base, store, name, values)]).returncode


def _fit(points: Sequence[tuple[int, int, float | None]], target: tuple[int, int]) -> JsonObject:
    # scipy takes half a second to import, which the other commands need not wait for.
    fit: Any = load_attribute("runner.history.scaling:fit_ladder", callable)
    make_point: Any = load_attribute("runner.history.scaling:ScalingPoint", callable)
    found: JsonObject = fit([make_point(*each) for each in points], make_point(*target))
    return found
