"""Command `sweep`: many settings of one spec, each a run of its own, on any engine.

All that can be wrong is checked before anything starts or is written. The same command again goes on with the sweep.
"""

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import typer

from launch.checks import SkipChecks, check_runs
from launch.local import LocalArguments
from launch.options import DryRun, LaunchArguments, SpecOptions
from launch.sweep import queues
from launch.sweep.children import LocalSweep
from launch.sweep.halving import HalvingRule
from launch.sweep.points import SEED, SweepPlan, format_name, format_setting_line, parse_plan
from launch.sweep.record import SweepRecord, lock_root
from runner.accelerator import GPU_DEVICES, TPU_DEVICES, has_device, has_gpu
from runner.console import say
from runner.errors import EXIT_DONE, InvalidError, suggest_choices
from runner.history.sweep import Sweep, SweepRun
from runner.spec import SpecLocation, load_document, validate_spec
from runner.spec.document import parse_yaml
from runner.spec.imports import import_extra
from runner.spec.model import NAME_PATTERN
from runner.storage import JsonObject, make_store

_SECTIONS = ("grid", "random", "search", "runs", "halving", "metric")
_MAX_NAME = 128
_RESERVED = ("--set", "--name", "--dry-run", "--skip-checks")  # options of an engine that the sweep sets


@dataclass(frozen=True, kw_only=True)
class EngineOptions(SpecOptions):
    """Engine of several runs, its own options, and the root of the runs."""

    free_texts: ClassVar[tuple[str, ...]] = (*SpecOptions.free_texts, "engine_words")

    engine_words: Annotated[
        list[str], typer.Argument(metavar="[-- OPTIONS]", help="Options of the engine, such as -- --nodes 2.")
    ] = field(default_factory=list)
    root: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", show_default="the spec's directory + -sweep or -ladder", help="Directory or URL of all runs."
        ),
    ] = None
    engine: Annotated[Literal["local", "slurm", "jobset", "tpu-vm"], typer.Option(help="Engine of the runs.")] = "local"
    at_once: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", show_default="1; slurm: no limit", help="Number of runs at the same time."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SweepArguments(EngineOptions):
    """Arguments of `launch sweep`."""

    free_texts: ClassVar[tuple[str, ...]] = (*EngineOptions.free_texts, "grid", "random", "search")

    grid: Annotated[
        list[str],
        typer.Option(metavar="KEY=V1,V2", help="Values of a dotted key of the spec; repeatable: all combinations."),
    ] = field(default_factory=list)
    random: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=RANGE", help="Draw a key from log(A,B), uniform(A,B), int(A,B) or choice(V,W); repeatable."
        ),
    ] = field(default_factory=list)
    search: Annotated[
        list[str], typer.Option(metavar="KEY=RANGE", help="Choose a key by the results so far (TPE); repeatable.")
    ] = field(default_factory=list)
    number: Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of runs of --random or --search.")] = (
        None
    )
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="YAML with grid, random, search, runs, halving, metric.")
    ] = None
    sweep_seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of --random and --search.")] = 0
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", show_default="val/loss, or train/loss", help="Key of the rows by which runs are compared."
        ),
    ] = None
    is_maximised: Annotated[bool, typer.Option("--maximise", help="The largest value of the metric is the best.")] = (
        False
    )
    halving: Annotated[
        str | None,
        typer.Option(metavar="F@STEP,STEP", help="Stop all but the best 1/F of the runs at each of these steps."),
    ] = None
    is_skip_checks: SkipChecks = False
    dry_run: DryRun = False


def run(arguments: SweepArguments, parse: Callable[[Sequence[str]], object]) -> int:
    """Make the runs of a sweep, and return the exit code. `parse` reads the command line of an engine."""
    file = {} if arguments.file is None else _read_file(arguments.file)
    document = load_document(arguments.spec, arguments.overrides)
    spec = validate_spec(document)
    plan = parse_plan(arguments.grid, arguments.random, arguments.search, arguments.number, arguments.sweep_seed, file)
    rule = _read_rule(arguments.halving, file)
    metric = arguments.metric if arguments.metric is not None else file.get("metric")
    engine = parse_engine(arguments, parse)
    problems: list[str] = []
    with _collect(problems):
        if plan.searched:
            import_extra("optuna")  # a package that is missing is named before anything is written
        plan.validate([override.partition("=")[0].strip() for override in arguments.overrides])
    problems += _list_conflicts(arguments, plan, rule, metric)
    settings: list[JsonObject] = []
    if not problems:
        with _collect(problems):
            settings = plan.make_settings()
    name = f"{spec.name}-{format_name(max(len(settings), plan.number or 0) - 1)}"
    if len(name) > _MAX_NAME or not re.match(NAME_PATTERN, name):
        problems.append(
            f"name: the runs are called {name}, which has more than {_MAX_NAME} characters; use a shorter one"
        )
    devices: list[str | None] = [None]
    with _collect(problems):
        devices = divide_devices(arguments.engine, engine, arguments.at_once or 1)
    if problems:
        raise InvalidError("\n".join(problems))

    rule_record = plan.to_json() | ({} if rule is None else {"halving": rule.format()})
    if plan.searched:
        rule_record["at_once"] = len(devices)  # a trial knows the results of those before it that have ended
    store = make_store(arguments.root or f"{spec.directory.rstrip('/')}-sweep")
    runs = tuple(SweepRun(format_name(number), setting) for number, setting in enumerate(settings))
    sweep = Sweep(
        spec.name, arguments.spec, document.compute_digest(), metric or "", arguments.is_maximised, rule_record, runs
    )
    record = SweepRecord(store, arguments.spec, arguments.overrides, sweep)
    with contextlib.nullcontext() if arguments.dry_run else lock_root(record):
        if not record.open(metric):
            checked = (
                [*runs, *(SweepRun(f"search-{n}", end) for n, end in enumerate(plan.list_ends()))]
                if plan.searched
                else runs
            )
            facts: JsonObject = {}
            if not arguments.is_skip_checks:
                facts = check_runs(
                    arguments.spec,
                    {
                        f"{each.name} ({format_setting_line(each.values)})": record.list_overrides(each)
                        for each in checked
                    },
                    has_shared_files=arguments.engine in ("local", "slurm"),
                    topology=queues.find_topology(document, spec, engine),
                )
            metric = metric or ("val/loss" if facts.get("evaluates", True) else "train/loss")
            if rule is not None:
                _validate_rungs(rule, metric, facts)
            sweep = replace(sweep, metric=metric)
            record.sweep = sweep
            if not arguments.dry_run:
                record.write(sweep)
        if arguments.engine in ("slurm", "jobset"):
            return queues.submit(record, engine, arguments.at_once, is_dry=arguments.dry_run)
        if arguments.dry_run:
            for each in record.sweep.runs:
                say(f"{each.name}  {format_setting_line(each.values)}")
            return EXIT_DONE
        local = LocalSweep(record, plan, rule, arguments.engine, arguments.engine_words, devices)
        code = local.run()
    for line in format_summary(record.sweep, local.list_outcomes()):
        say(line)
    say(f"sweep: python -m runner report {store.url} -o sweep.html")
    return code


@contextlib.contextmanager
def _collect(problems: list[str]) -> Any:
    try:
        yield
    except InvalidError as error:
        problems.extend(str(error).split("\n"))


def _read_file(path: str) -> Mapping[str, Any]:
    """Return the content of `--file`. Raises `InvalidError`."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidError(f"--file {path}: cannot be read ({getattr(error, 'strerror', error)})") from None
    data, locations = parse_yaml(text, lambda line: SpecLocation(f"{path}:{line}", line))
    if not isinstance(data, dict):
        raise InvalidError(f"--file {path}: needs a mapping with {', '.join(_SECTIONS)}")
    unknown = [key for key in data if key not in _SECTIONS]
    if unknown:
        raise InvalidError(
            "\n".join(
                locations[key,].format_problem((key,), f"unknown key{suggest_choices(key, _SECTIONS)}")
                for key in unknown
            )
        )
    if not isinstance(data.get("metric", ""), str):
        raise InvalidError(f"--file {path}: metric is {data['metric']!r:.60}, needs text such as val/loss")
    return data


def _read_rule(option: str | None, file: Mapping[str, Any]) -> HalvingRule | None:
    section = file.get("halving")
    if section is None:
        return None if option is None else HalvingRule.parse(option)
    if option is not None:
        raise InvalidError("--halving and halving of --file: give one of them")
    match section:
        case {"factor": int(factor), "steps": [*steps]} if len(section) == 2:
            return HalvingRule.parse(f"{factor}@{','.join(map(str, steps))}")
    raise InvalidError("halving: needs {factor: 3, steps: [100, 300]}")


def parse_engine(arguments: EngineOptions, parse: Callable[[Sequence[str]], object]) -> LaunchArguments:
    """Return the arguments of the engine, checked by its own class."""
    for word in arguments.engine_words:
        if word.partition("=")[0] in _RESERVED:
            place = "it is an option of sweep, before --" if word != "--name" else "the sweep names its runs"
            raise InvalidError(f"-- {word}: {place}")
    engine = parse([arguments.engine, arguments.spec, *arguments.engine_words])
    assert isinstance(engine, LaunchArguments), "each engine of `SweepArguments` runs jobs"
    return engine


def _list_conflicts(arguments: SweepArguments, plan: SweepPlan, rule: HalvingRule | None, metric: object) -> list[str]:
    """Return a line for each option that does not fit to the others."""
    problems = []
    is_queue = arguments.engine in ("slurm", "jobset")
    if rule is not None and arguments.engine != "local":
        problems.append(f"--halving: {arguments.engine} cannot stop runs and resume them; use --engine local")
    if rule is not None and plan.searched:
        problems.append("--halving and --search: a search needs the results of all its runs; leave out one of them")
    if is_queue and plan.searched:
        problems.append(f"--search: {arguments.engine} gets all runs at once; use --engine local or tpu-vm")
    if arguments.engine == "jobset" and arguments.at_once is not None:
        problems.append("--at-once: Kubernetes starts what the quota of the queue allows; leave it out")
    if metric == "":
        problems.append("--metric: needs a key of the rows, such as val/loss")
    return problems


def divide_devices(engine: str, arguments: LaunchArguments, at_once: int) -> list[str | None]:
    """Return the value of CUDA_VISIBLE_DEVICES for each of the runs that are made at once; None to leave it alone."""
    if engine != "local" or at_once == 1:
        return [None] * at_once
    assert isinstance(arguments, LocalArguments), "it is the engine"
    if arguments.devices_per_process is not None:
        return [None] * at_once
    if has_device(TPU_DEVICES) and os.environ.get("JAX_PLATFORMS", "tpu").startswith("tpu"):
        raise InvalidError(f"--at-once {at_once}: one process holds all TPU chips of this machine; use --at-once 1")
    if not (has_device(GPU_DEVICES) and has_gpu(os.environ)):
        return [None] * at_once
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    files = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    gpus = sorted(files, key=int) if given is None else [each for each in given.split(",") if each]
    if at_once > len(gpus):
        raise InvalidError(f"--at-once {at_once}: {len(gpus)} GPUs are visible here; use at most that many")
    share = len(gpus) // at_once
    return [",".join(gpus[share * slot : share * (slot + 1)]) for slot in range(at_once)]


def _validate_rungs(rule: HalvingRule, metric: str, facts: JsonObject) -> None:
    """Raise `InvalidError` for steps at which no run has a row with the metric."""
    every: int | None = facts.get("evaluation_steps" if metric.startswith("val/") else "row_steps")
    total, problems = facts.get("total_steps"), []
    if facts and every is None:
        key = "config.eval.every_steps" if metric.startswith("val/") else "logging.every_steps"
        problems.append(f"the runs have no rows of {metric} before their end; set {key}")
    for step in rule.steps:
        if total is not None and step >= total:
            problems.append(f"step {step} is not below the {total} steps of the runs")
        elif every is not None and step % every:
            near = f"{step // every * every or every} or {(step // every + 1) * every}"
            problems.append(f"step {step} has no row of {metric}, there is one every {every} steps; use {near}")
    if problems:
        raise InvalidError("\n".join(f"--halving {rule.format()}: {line}" for line in problems))


def format_summary(sweep: Sweep, outcomes: Sequence[tuple[SweepRun, str, float | None]]) -> list[str]:
    """Return the table of the runs, and the best of them; with seeds, the best setting by its mean."""
    values = {run.name: value if state == "done" else None for run, state, value in outcomes}
    best = sweep.find_best(values.items())
    rows = [["run", *sweep.keys, sweep.metric, "state"]]
    for run, state, value in outcomes:
        cells = [_format_value(run.values[key]) if key in run.values else "" for key in sweep.keys]
        shown = "" if value is None or not math.isfinite(value) else f"{value:.6g}"
        stopped = f" at step {run.stopped_step}" if state == "stopped" else ""
        rows.append([run.name, *cells, shown, f"{state}{stopped}{', best' if run.name == best else ''}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if SEED in sweep.keys:
        settings: dict[str, list[float | None]] = {}
        for run in sweep.runs:
            name = format_setting_line({key: value for key, value in run.values.items() if key != SEED})
            settings.setdefault(name, []).append(values.get(run.name))
        means = {
            name: math.fsum(known) / len(known)
            for name, found in settings.items()
            if len(known := [value for value in found if value is not None]) == len(found)
        }
        if (first := sweep.find_best(means.items())) is not None:
            number = len(settings[first])
            of = f"{first}, " if first else ""
            lines.append(f"sweep: best setting over {number} seeds: {of}mean {sweep.metric} {means[first]:.6g}")
    elif best is not None:
        setting = next(run.values for run in sweep.runs if run.name == best)
        lines.append(f"sweep: best: {best}, {format_setting_line(setting)}, {sweep.metric} {values[best]:.6g}")
    return lines


def _format_value(value: Any) -> str:
    return format_setting_line({"": value})[1:]
