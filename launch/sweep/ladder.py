"""Command `ladder`: models of ascending depth, the scaling law of their losses, and its forecast for a larger run.

A ladder is a sweep with a list of runs, whose values follow from the depth (`runner scale`). When all of them are
finished, the law is fitted. The forecast for a larger model is written into that run's own directory before the run
begins (`forecast.json`), and the run records that it began with it.

After an interruption the same command continues, and comes to the same law and forecast.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from launch.options import LaunchArguments, set_arguments
from launch.sweep import queues
from launch.sweep.children import LocalSweep
from launch.sweep.command import EngineOptions, divide_devices, parse_engine
from launch.sweep.points import SweepPlan
from launch.sweep.record import SweepRecord, lock_root
from runner.attempts.layout import RESULT, RESULT_KEYS, read_record, write_forecast
from runner.command_line import HeadSize, TokensPerParameter, WidthPerLayer, parse_depths, parse_numbers
from runner.console import say
from runner.errors import EXIT_DONE, EXIT_INVALID, FailedError, InvalidError
from runner.history.lineage import format_ladder
from runner.history.sweep import RATIO_SPREAD, Sweep, SweepRun
from runner.spec import load_attribute, load_document, validate_spec
from runner.storage import JsonObject, make_store

_METRIC = "val/loss"


@dataclass(frozen=True, kw_only=True)
class LadderArguments(EngineOptions):
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
        if len(self.ratios) > 1 and self.ratios[-1] < RATIO_SPREAD * self.ratios[0]:
            raise InvalidError(
                f"--tokens-per-parameter {self.tokens_per_parameter}: the ratios are too near to tell N and D apart; "
                f"give one, or some that differ by a factor of {RATIO_SPREAD} at least"
            )
        if self.forecast is not None and self.forecast <= self.depths[-1]:
            raise InvalidError(f"--forecast {self.forecast}: needs a depth above those of --sizes {self.sizes}")
        if self.is_then and self.forecast is None:
            raise InvalidError("--then: needs --forecast N, the model to train")
        if self.is_then and self.engine in ("slurm", "jobset"):
            raise InvalidError(
                f"--then: {self.engine} only queues runs; leave it out, and run the command that is printed"
            )

    @property
    def depths(self) -> list[int]:
        """Depths, ascending."""
        return parse_depths("--sizes", self.sizes)

    @property
    def ratios(self) -> list[float]:
        """Ratios of tokens to parameters, ascending."""
        return parse_numbers("--tokens-per-parameter", self.tokens_per_parameter)

    def name_run(self, depth: int, ratio: float) -> str:
        """Return the name of a run below the root."""
        return f"d{depth}" + (f"_r{ratio:g}" if len(self.ratios) > 1 else "")


def run(arguments: LadderArguments, parse: Callable[[Sequence[str]], object]) -> int:
    """Train the models of a ladder, fit the law, write the forecast, and return the exit code."""
    document = load_document(arguments.spec, arguments.overrides)
    spec = validate_spec(document)
    engine = parse_engine(arguments, parse)
    store = make_store(arguments.root or f"{spec.directory.rstrip('/')}-ladder")
    rule = {
        "sizes": arguments.depths,
        "tokens_per_parameter": arguments.ratios,
        "width_per_layer": arguments.width_per_layer,
        "head_size": arguments.head_size,
    }
    names = [arguments.name_run(depth, ratio) for depth in arguments.depths for ratio in arguments.ratios]
    empty = tuple(SweepRun(name, {}) for name in names)
    ladder: JsonObject = {"sizes": {}, "forecasts": {}}
    sweep = Sweep(spec.name, arguments.spec, document.compute_digest(), _METRIC, False, rule, empty, {}, ladder)
    record = SweepRecord(store, arguments.spec, arguments.overrides, sweep)
    with lock_root(record):
        if not record.open(_METRIC):
            sizes = derive_sizes(arguments, arguments.depths, arguments.ratios)
            runs = tuple(SweepRun(name, size["values"]) for name, size in zip(names, sizes, strict=True))
            keys = ("depth", "parameters", "embedding_parameters", "tokens")
            described = {name: {key: size[key] for key in keys} for name, size in zip(names, sizes, strict=True)}
            record.write(replace(sweep, runs=runs, ladder=ladder | {"sizes": described}))
        if any(_read_loss(record, name) is None for name in names):
            if arguments.engine in ("slurm", "jobset"):
                code = queues.submit(record, engine, arguments.at_once, is_dry=False)
                say("ladder: when all of these runs are finished, the same command fits the law")
                return code
            if (code := train(record, arguments, engine, record.sweep.runs)) != EXIT_DONE:
                return code
        if arguments.forecast is None:
            say(f"ladder: all {len(names)} runs in {store.url} are finished; --forecast N forecasts a larger one")
            return EXIT_DONE

        # The forecast is for the largest ratio, so that both N and D of that run are beyond the ladder.
        (size,) = derive_sizes(arguments, [arguments.forecast], arguments.ratios[-1:])
        large = SweepRun(f"d{arguments.forecast}", size["values"])
        if large.name not in record.sweep.ladder["forecasts"]:
            points = [
                (each["parameters"], each["tokens"], _read_loss(record, name))
                for name, each in record.sweep.ladder["sizes"].items()
            ]
            if lost := [name for name, (*_, loss) in zip(names, points, strict=True) if loss is None]:
                raise InvalidError(f"{store.url}/{lost[0]}: has no result, so no law is fitted; see its status")
            # scipy takes half a second to import, for which the other commands should not wait.
            fit: Any = load_attribute("runner.history.scaling:fit_ladder", callable)
            found: JsonObject = fit(points, size["parameters"], size["tokens"]) | {"ladder": store.url}
            forecasts = record.sweep.ladder["forecasts"] | {large.name: found}
            record.write(replace(record.sweep, ladder=record.sweep.ladder | {"forecasts": forecasts}))
        forecast = record.sweep.ladder["forecasts"][large.name]
        write_forecast(record.open_run(large.name), forecast)
        for line in format_ladder(record.sweep):
            say(f"ladder: {line}")
        if not arguments.is_then:
            words = [arguments.engine, arguments.spec, *arguments.engine_words]
            command = ["python", "-m", "launch", *words, *set_arguments(record.list_overrides(large))]
            say(f"ladder: {large.name} has its forecast; next: {shlex.join(command)}")
            return EXIT_DONE
        if (code := train(record, arguments, engine, (large,))) == EXIT_DONE:
            loss = _read_loss(record, large.name)
            if loss is None:
                raise InvalidError(f"{store.url}/{large.name}: has no result; see its status")
            place = "inside" if forecast["low"] <= loss <= forecast["high"] else "outside"
            say(f"ladder: {large.name} came to {loss:.4f}, {loss / forecast['loss'] - 1:+.2%}, {place} the interval")
        return code


def derive_sizes(arguments: LadderArguments, depths: Sequence[int], ratios: Sequence[float]) -> list[JsonObject]:
    """Return the sizes that `runner scale` derives, in a process of its own, since this one imports no jax."""
    words = ["-m", "runner", "scale", arguments.spec, "--json", *set_arguments(arguments.overrides)]
    words += ["--depth", ",".join(map(str, depths)), "--tokens-per-parameter", ",".join(map(repr, ratios))]
    words += ["--width-per-layer", str(arguments.width_per_layer)]
    words += [] if arguments.head_size is None else ["--head-size", str(arguments.head_size)]
    found = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if found.returncode != EXIT_DONE:
        kind = InvalidError if found.returncode == EXIT_INVALID else FailedError
        raise kind(found.stderr.strip())
    sizes: list[JsonObject] = json.loads(found.stdout)
    return sizes


def train(record: SweepRecord, arguments: LadderArguments, engine: LaunchArguments, runs: tuple[SweepRun, ...]) -> int:
    """Make runs below the root, and return the exit code."""
    # The large run is no part of the record, which this one does not write.
    part = SweepRecord(record.store, arguments.spec, arguments.overrides, replace(record.sweep, runs=runs))
    plan = SweepPlan({}, {}, {}, [dict(each.values) for each in runs], None, 0)
    devices = divide_devices(arguments.engine, engine, min(arguments.at_once or 1, len(runs)))
    return LocalSweep(part, plan, None, arguments.engine, arguments.engine_words, devices).run()


def _read_loss(record: SweepRecord, name: str) -> float | None:
    """Return the validation loss at the end of a run, or None if it is not finished.

    Raises `InvalidError` if it has none, or a hook has ended the run before its last step.
    """
    result = read_record(store := record.open_run(name), RESULT, RESULT_KEYS, ["step"])
    if result is None:
        return None
    if not isinstance(loss := result.get("val_loss"), float):
        raise InvalidError(f"{store.url}: has no validation loss at its end; give the spec data.validation_fraction")
    if result.get("stopped_by") is not None:
        raise InvalidError(
            f"{store.url}: was stopped by {result['stopped_by']} before its last step; leave the hook out"
        )
    return loss
