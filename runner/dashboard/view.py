"""JSON that `page.js` draws: texts, and numbers rounded to visible digits, of bounded size."""

import collections
import functools
import itertools
import math
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from pydantic import BaseModel

from runner.config import TrainerConfig
from runner.console import format_duration
from runner.dashboard.charts import (
    CHARTS,
    HIDDEN_KEYS,
    LOSS,
    TIME,
    Point,
    RunCurves,
    StepHistogram,
    ThinnedSeries,
    find_chart,
)
from runner.dashboard.reader import RunSnapshot, find_differences, flatten_spec
from runner.distributed.clock import TimeCategory
from runner.history.cost import compute_cost
from runner.history.goodput import START_CATEGORIES, list_restarts
from runner.history.ledger import format_event, get_float, get_int, get_step, get_time, to_single_line
from runner.history.reader import format_changes
from runner.history.records import AttemptRecord, History, RunState, to_json
from runner.spec import ExecutionSpec
from runner.storage import JsonObject

_ATTEMPTS_MAX = 2000  # of all runs of a page together
_CHECKPOINTS_MAX = 500  # of a run, the newest
_LINE_CHARACTERS_MAX = 1000
_CHANGES_MAX = 8
_DISCARDED_BINS = 100  # of the losses that a roll-back has discarded
_HOSTS_MAX = 8
_OWN_TILES_MAX = 2
_TILE_POINTS_MAX = 60
_VERSIONS_MAX = 50
_KEYS_MAX = 300  # of a spec
_HISTOGRAM_BINS = 32
_POINTS_OF_LAW_MAX = 200

# Commands that tell more about a run, each with its purpose.
_COMMANDS = {
    "status": "attempts, time and checkpoints, in the terminal",
    "metrics": "all rows, as JSON or CSV",
    "checkpoints": "checkpoints; with --verify their bits are checked",
    "lineage": "runs from which this one was forked",
    "sample": "text generated with the newest weights",
}

# CSS class of a state.
_STATE_CLASSES = {
    RunState.DONE: "good",
    RunState.RUNNING: "live",
    RunState.STALLED: "bad",
    RunState.FAILED: "bad",
    RunState.INVALID: "bad",
    RunState.RETRYABLE: "bad",
    RunState.KILLED: "bad",
}


def build_view(
    title: str, snapshots: Sequence[RunSnapshot], points_max: int, ancestors: Mapping[str, RunSnapshot] | None = None
) -> JsonObject:
    """Return the data of a page about runs of different names, with about `points_max` points in all curves.

    The curves of the ancestors, by id, are drawn behind those of their forks.
    """
    ancestors = ancestors or {}
    # Curves share the budget of points; a bin takes two points.
    drawn = [*snapshots, *ancestors.values()]
    num_series = sum(len(run.curves.keys) for run in drawn) or 1
    bins_max = max(points_max // (2 * num_series), 10)
    attempts_max = max(_ATTEMPTS_MAX // max(len(snapshots), 1), 20)
    found = {chart.title: chart for run in drawn for chart, _ in map(find_chart, run.curves.keys)}
    # A parent is dimmed before the first step at which a fork branches off.
    names = {run.history.id: run.name for run in drawn}
    parts: dict[str | None, int] = {}
    for run in drawn:
        if (fork := run.history.fork) is not None:
            parts[fork.id] = min(fork.step, parts.get(fork.id, fork.step))
    # Charts of keys that a job has made up come below the others.
    own = sorted((chart for chart in found.values() if chart not in CHARTS), key=lambda chart: chart.title)
    charts = [chart for chart in CHARTS if chart.title in found] + own
    # The loss of a job that trains no language model, or whose rows count no tokens, may have any unit.
    if not any(get_int(run.history.row, "train/tokens") is not None for run in drawn) or not all(
        run.history.is_language_model for run in drawn
    ):
        charts = [replace(chart, unit="value") if chart is LOSS else chart for chart in charts]
    differences = find_differences([run.spec for run in snapshots]) if len(snapshots) > 1 else []
    # The changes of each stage have a table of their own.
    starts = [[f"{stage.from_step:,}" for stage in run.history.stages] for run in snapshots]
    texts = [f"from step {', '.join([*each[:_CHANGES_MAX], *['...'][: len(each) > _CHANGES_MAX]])}" for each in starts]
    differences = [
        each._replace(
            values=[text if own else value for own, text, value in zip(starts, texts, each.values, strict=True)]
        )
        if each.key == "config.stages"
        else each
        for each in differences
    ]
    # Throughput and memory are those of the hardware of each run, and do not continue in a fork.
    behind = {
        run_id: {
            key: series for key, series in run.curves.thin(bins_max, run.newest).items() if not key.startswith("perf/")
        }
        for run_id, run in ancestors.items()
    }
    return {
        "title": title,
        "runs": [
            _build_run(run, bins_max, attempts_max, names) | {"part": parts.get(run.history.id)} for run in snapshots
        ],
        "ancestors": [
            {
                "label": run.name,
                "part": parts.get(run_id),
                "charts": _build_charts(run, behind[run_id]),
            }
            for run_id, run in ancestors.items()
        ],
        "charts": [chart.to_json() for chart in charts],
        "buckets": [
            {"name": category.value, "label": category.value.replace("_", " "), "meaning": category.meaning}
            for category in TimeCategory
        ],
        "differences": [list(each) for each in differences],
    }


def _build_charts(run: RunSnapshot, thinned: Mapping[str, ThinnedSeries]) -> dict[str, list[JsonObject]]:
    """Return the curves of a run by title of their chart; those of training come first."""
    began = run.history.attempts[0].began if run.history.attempts else None
    charts: dict[str, list[JsonObject]] = {}
    for key, series in sorted(thinned.items(), key=lambda each: (not each[0].startswith("train/"), each[0])):
        chart, label = find_chart(key)
        drawn = _build_points(series.points, began, chart.factor)
        more: JsonObject = {"broken": _build_points(series.broken, began), "num_broken": series.num_broken}
        if chart.is_smoothed and series.means:
            more["means"] = _build_points(series.means, began, chart.factor)
        if key in HIDDEN_KEYS:
            more["hidden"] = True
        charts.setdefault(chart.title, []).append({"key": key, "label": truncate(label)} | drawn | more)
    for number, rows in run.discarded.items():
        curves = RunCurves()
        for row in rows:
            curves.add(row)
        if (loss := curves.thin(_DISCARDED_BINS).get("train/loss")) is not None:
            more = {"broken": _build_points(loss.broken, began), "num_broken": loss.num_broken}
            drawn = _build_points(loss.points, began) | {"key": f"given_up/{number}", "label": f"discarded, {number}"}
            charts.setdefault(LOSS.title, []).append(drawn | more)
    return charts


def _build_histogram(key: str, known: Sequence[StepHistogram], began: float | None) -> JsonObject:
    """Return histograms of several steps on common bins, as shares."""
    low = min(each.edges[0] for each in known)
    width = (max(each.edges[-1] for each in known) - low) / _HISTOGRAM_BINS or 1.0
    columns = _build_points([Point(each.step, each.tokens, each.seconds, 0.0) for each in known], began)
    shares = [[round(share, 3) for share in each.spread(low, width, _HISTOGRAM_BINS)] for each in known]
    names = {
        "train/grad_norm": "Logarithm of the gradient norms",
        "train/param_norm": "Logarithm of the parameter norms",
    }
    return columns | {
        "title": truncate(names.get(key, find_chart(key)[0].title)),
        "centers": [round_value(low + (index + 0.5) * width) for index in range(_HISTOGRAM_BINS)],
        "shares": shares,
    }


def _build_run(run: RunSnapshot, bins_max: int, attempts_max: int, names: Mapping[str | None, str]) -> JsonObject:
    history = run.history
    began = history.attempts[0].began if history.attempts else None
    thinned = run.curves.thin(bins_max, run.newest)
    num_points, num_drawn = 0, 0
    num_broken = sum(series.num_broken for series in thinned.values())
    for series in thinned.values():
        num_points, num_drawn = num_points + series.num_points, num_drawn + len(series.points)
    not_finite = f", {num_broken} of which are not finite (crosses)" if num_broken else ""
    if num_points - num_broken == num_drawn:
        thinning = f"all {num_points} values are drawn{not_finite}"
    else:
        thinning = (
            f"{num_drawn} of {num_points} values{not_finite} are drawn: the lowest and the highest of each bin, so "
            "peaks are kept"
        )

    # A preemptible run may have thousands of attempts.
    attempts = history.attempts[-attempts_max:]
    notes = [*run.notes, *history.unread]
    if len(attempts) < len(history.attempts):
        notes.append(f"Only the newest {len(attempts)} of {len(history.attempts)} attempts are drawn.")
    if run.curves.left_out:
        left_out = ", ".join(sorted(run.curves.left_out))
        notes.append(f"Too many metrics: these and perhaps others are not drawn: {left_out}")

    fork = None
    if history.fork is not None:
        parent = names.get(history.fork.id)
        note = "is gone or elsewhere, so it is not drawn" if parent is None else "is dimmed before that step"
        text = f"forked from {truncate(parent or history.fork.run)} at step {history.fork.step:,}; its parent {note}"
        fork = {"step": history.fork.step, "text": text}

    # The reason of a failure comes first, and each text once, since attempts may fail again and again.
    is_told = get_state_class(history) == "bad" and bool(history.reason)
    reasons = [f"{history.state.value}: {history.reason}"] * is_told
    reasons += [
        f"{each.event}: {each.text}" for each in history.warnings if not (is_told and each.text == history.reason)
    ]
    counts = collections.Counter(reasons)
    problems = [text if count == 1 else f"{text} ({count} times)" for text, count in counts.items()]

    defaults = _list_defaults()
    changed = (
        [truncate(key), truncate(text), defaults.get(key, "")]
        for key, text in flatten_spec(history.spec).items()
        # A section that is absent is written as null.
        if text != defaults.get(key) and (text not in ("null", "{}") or key in defaults)
    )
    end = None
    if history.state in (RunState.FAILED, RunState.INVALID, RunState.RETRYABLE, RunState.KILLED):
        end = {"step": history.step, "time": history.attempts[-1].ended, "label": history.state.value}

    # Tokens per step place marks on the axis of tokens, which only rows have.
    step, tokens = get_step(history.row), get_int(history.row, "train/tokens")
    tokens_per_step = tokens / step if step and tokens is not None else None
    return {
        "id": run.name,
        "label": run.name,
        "kind": get_state_class(history),
        "values": summarize(history),
        "tiles": _build_tiles(history),
        "began": began,
        "seconds": round(history.wall_seconds, 1),
        "facts": [[name, text] for name, text in list_facts(history) if text],
        "warnings": list(map(truncate, [*problems, *notes])),
        "end": end,
        "rows": run.curves.num_rows + len(run.newest),
        "thinning": thinning,
        "tokens_per_step": tokens_per_step,
        "charts": _build_charts(run, thinned),
        "histograms": [
            _build_histogram(key, known, began) for key, known in run.curves.list_histograms(run.newest).items()
        ],
        "fork": fork,
        "stages": [
            {
                "number": stage.number,
                "step": stage.from_step,
                "tokens": stage.tokens,
                "tokens_per_step": stage.tokens_per_step,
                "began": stage.began,
                "changes": [truncate(text) for text in stage.changes],
                "why": truncate(stage.why),
            }
            for stage in history.stages
        ],
        "attempts": [_build_attempt(each) for each in attempts],
        "buckets": _build_seconds(history.seconds),
        "goodput": _build_goodput(history.attempts, began, attempts_max),
        "saves": [
            {
                "step": save.step,
                "time": round(save.time, 2),
                "bytes": save.num_bytes,
                "seconds": None if save.seconds_to_durable is None else round_value(save.seconds_to_durable),
            }
            for save in history.saves
        ],
        "checkpoints": [
            {
                "name": truncate(each.name),
                "time": each.time,
                "bytes": each.num_bytes,
                "text": truncate(f"{each.trust.value}: {each.problem}" if each.problem else each.trust.value),
            }
            for each in reversed(history.checkpoints[-_CHECKPOINTS_MAX:])
        ],
        "environment": [[truncate(name), truncate(text)] for name, text in list_environment(history)],
        "samples": [
            [step, [[truncate(key.removeprefix("val/")), text] for key, text in texts.items()]]
            for step, texts in run.curves.list_samples(run.newest)
        ],
        "media": [
            {"key": truncate(key.removeprefix("val/")), "items": [[step, name] for step, name in items]}
            for key, items in run.media.items()
        ],
        "law": None if run.forecast is None else build_law(run.forecast, _find_final_loss(history)),
        "spec": run.spec or "(spec.yaml cannot be read)",
        "changed": list(itertools.islice(changed, _KEYS_MAX)),
        "explain": f"python -m runner explain {shlex.quote(history.url)} --step",
        "commands": [
            [f"python -m runner {name} {shlex.quote(history.url)}", purpose]
            for name, purpose in _COMMANDS.items()
            if name != "sample" or (history.is_language_model and history.checkpoints)
        ],
        "events": [
            [get_time(event), get_int(event, "attempt"), get_int(event, "step"), format_event(event)]
            for event in reversed(history.events)
        ],
        "log": None if run.log is None else {"name": run.log.name, "text": run.log.text},
    }


def _find_final_loss(history: History) -> float | None:
    """Return the validation loss at the end of a finished run; None if there is none."""
    return get_float(history.row, "val/loss") if history.state is RunState.DONE else None


def build_law(forecast: JsonObject, came: float | None) -> JsonObject:
    """Return the chart of a scaling law with a forecast (`FORECAST_KEYS`), and the loss that came, if it has come.

    The records are those of a directory, so that any value may be missing or of another kind.
    """

    def list_numbers(rows: Any, width: int) -> list[list[float | None]]:
        rows = rows if isinstance(rows, list) else []
        return [
            [round_value(each) if isinstance(each, int | float) else None for each in row[:width]]
            for row in rows[:_POINTS_OF_LAW_MAX]
            if isinstance(row, list) and len(row) >= width
        ]

    law = forecast.get("law") or {}
    text = truncate(str(law.get("formula", "")))
    expected, low, high = (forecast[key] for key in ("loss", "low", "high"))
    text += f"; forecast {expected:.4f}, {forecast['coverage']:.0%} interval {low:.4f} to {high:.4f}"
    if came is not None:
        place = "inside" if low <= came <= high else "outside"
        text += f"; came {came:.4f}, {(came - expected) / expected:+.2%}, {place} the interval"
    return {
        "text": text,
        "points": list_numbers(law.get("points"), 3),
        "curve": list_numbers(law.get("curve"), 4),
        "forecast": [forecast["parameters"], *(round_value(each) for each in (expected, low, high))],
        "came": None if came is None else round_value(came),
    }


@functools.cache
def _list_defaults() -> dict[str, str]:
    """Return the defaults of all keys of a spec that have one, as JSON by dotted key."""

    def dump(model: type[BaseModel]) -> JsonObject:
        found: JsonObject = {}
        for name, field in model.model_fields.items():
            value = field.get_default(call_default_factory=True)
            # A section that is required, or absent by default, has defaults inside.
            kinds = (type(value), field.annotation, *get_args(field.annotation))
            section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
            if section is not None and not isinstance(value, list):
                found[name] = dump(section)
            elif not field.is_required():
                found[name] = value
        return found

    return flatten_spec(dump(ExecutionSpec) | {"config": dump(TrainerConfig)})


def summarize(history: History) -> JsonObject:
    """Return the figures by which runs are compared; a figure that is not known is None."""
    best, speed, cost = history.best_validation, history.speed, compute_cost(history)
    commits = [save.time for save in history.saves]
    # `saves` may lack the newest one of very many.
    commits += [checkpoint.time for checkpoint in history.checkpoints if checkpoint.time is not None]
    values = {
        "state": history.state.value,
        "step": history.step,
        "total_steps": history.total_steps,
        "loss": get_float(history.row, "train/loss"),
        "validation_loss": history.validation[-1][1] if history.validation else None,
        "best_validation_loss": None if best is None else best[1],
        "tokens_per_second": speed.tokens_per_second,
        "examples_per_second": speed.examples_per_second,
        "mfu": speed.mfu,
        "left_seconds": speed.left_seconds,
        "goodput": history.goodput if history.wall_seconds > 0 else None,
        "seconds": {category.value: seconds for category, seconds in history.seconds.items()},
        "lost_steps": history.lost_steps,
        "dollars": None if cost is None else cost.dollars,
        "restarts": max(len(history.attempts) - 1, 0),
        "last_commit": max(commits, default=None),
        "last_row": get_time(history.row, TIME),
        "alive": max((attempt.ended for attempt in history.attempts), default=None),
    }
    return {key: to_json(value) for key, value in values.items()}


def _build_tiles(history: History) -> list[JsonObject]:
    """Return the headline of a run: tiles with a label, a value, a note, and a trend or a share of one."""
    speed, last = history.speed, history.attempts[-1]
    losses = [(row["step"], loss) for row in history.trend if (loss := get_float(row, "train/loss")) is not None]
    # A page is sent again only if it has changed, so it contains times instead of ages.
    is_over = history.state not in (RunState.RUNNING, RunState.DONE)
    since = time.strftime("since %Y-%m-%d %H:%M UTC", time.gmtime(history.since)) if is_over else ""
    # The reason of a failure stands below the tiles, in full.
    state_note = since or history.reason or f"attempt {last.number}"
    tiles: list[JsonObject] = [
        {"label": "State", "value": history.state.value, "note": truncate(state_note), "kind": get_state_class(history)}
    ]

    left = format_duration(speed.left_seconds)
    steps = f"step {history.step:,}" + (f" of {history.total_steps:,}" if history.total_steps else "")
    share = min(history.step / history.total_steps, 1.0) if history.total_steps else None
    progress = f"{history.step:,}" if share is None else f"{share:.1%}"
    note = ", ".join(part for part in (steps, left and f"{left} left", _format_stage(history)) if part)
    tiles.append({"label": "Progress", "value": progress, "note": note, "share": share})

    for label, points in (("Training loss", losses), ("Validation loss", list(history.validation))):
        if not points:
            continue
        step, loss = points[-1]
        best = history.best_validation
        if label == "Validation loss" and best is not None:
            note = (
                f"best {best[1]:.4f} at step {best[0]:,}" if best[0] != step else f"the best so far, at step {step:,}"
            )
        else:
            # The change of the mean between the two newest tenths, since single values of training are noisy.
            tenth = max(len(points) // 10, 1)
            newer, older = points[-tenth:], points[-2 * tenth : -tenth]
            change = sum(value for _, value in newer) / tenth - sum(value for _, value in older) / max(len(older), 1)
            arrow = "\u25bc" if change < 0 else "\u25b2"
            note = f"{arrow} {abs(change):.3g} over {newer[-1][0] - older[0][0]:,} steps" if older else f"step {step:,}"
        stride = max(len(points) // _TILE_POINTS_MAX, 1)
        trend = [round_value(value) for _, value in points[::-1][::stride][::-1]]
        tiles.append({"label": label, "value": f"{loss:.4f}", "note": note, "trend": trend})

    for key, name, text in _list_own_figures(history)[:_OWN_TILES_MAX]:
        values = [value for row in history.trend if (value := get_float(row, key)) is not None]
        trend = [round_value(value) for value in values[:: max(len(values) // _TILE_POINTS_MAX, 1)]]
        tiles.append({"label": name[:1].upper() + name[1:], "value": text, "note": "", "trend": trend})

    unit, per_second, per_second_per_device = speed.rate
    if per_second is not None:
        per_device = format_number(per_second_per_device, ",.0f")
        note = f"{per_device} per device" if per_device else ""
        label = f"{unit.capitalize()} / s"
        tiles.append({"label": label, "value": format_number(per_second, ",.0f"), "note": note})
    step_time = "" if speed.step_seconds is None else f"{speed.step_seconds:.3g} s per step"
    if speed.mfu is not None:
        tiles.append({"label": "MFU", "value": format_number(speed.mfu, ".1%"), "note": step_time, "share": speed.mfu})
    elif step_time:
        tiles.append({"label": "Step time", "value": f"{speed.step_seconds:.3g} s", "note": "mean of the newest steps"})
    if history.wall_seconds > 0:
        lost = f", {history.lost_steps:,} steps lost" if history.lost_steps else ""
        note = f"of {format_duration(history.wall_seconds)}{lost}"
        tiles.append({"label": "Goodput", "value": f"{history.goodput:.1%}", "note": note, "share": history.goodput})
    return [{key: to_json(value) for key, value in tile.items()} for tile in tiles]


def _list_own_figures(history: History) -> list[tuple[str, str, str]]:
    """Return key, name and text of the figures that the job itself has made of its validation set."""
    found = []
    for key, value in history.figures.items():
        kind, _, name = key.partition("/")
        if kind == "val" and "/" not in name and name not in ("loss", "token_count"):
            form = ".1%" if find_chart(key)[0].form == "share" else ".4g"
            found.append((key, truncate(f"validation {name.replace('_', ' ')}"), format_number(value, form)))
    return found


def truncate(text: str) -> str:
    """Return a text of bounded length."""
    return text if len(text) <= _LINE_CHARACTERS_MAX else f"{text[:_LINE_CHARACTERS_MAX]} ..."


def round_value(value: float) -> float | None:
    """Return a number with six digits, more of which no chart shows; None if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _build_points(points: Sequence[Point], began: float | None, factor: float = 1.0) -> JsonObject:
    """Return points as columns. An axis that no point has is null. Seconds count from the first start."""
    seconds = [None if point.seconds is None or began is None else round(point.seconds - began, 1) for point in points]
    tokens = [point.tokens for point in points]
    return {
        "step": [point.step for point in points],
        "tokens": tokens if any(each is not None for each in tokens) else None,
        "seconds": seconds if any(each is not None for each in seconds) else None,
        "value": [round_value(point.value * factor) for point in points],
    }


def _build_seconds(seconds: Mapping[TimeCategory, float]) -> dict[str, float]:
    return {category.value: round(value, 2) for category, value in seconds.items() if value > 0}


def _build_attempt(attempt: AttemptRecord) -> JsonObject:
    spent, began = attempt.seconds, attempt.ended - sum(attempt.seconds.values())
    reached, lost = attempt.reached_step, attempt.lost_steps
    # Lost steps are the last of an attempt, before it shuts down.
    lost_since = attempt.ended - spent.get(TimeCategory.SHUTDOWN, 0.0) - spent.get(TimeCategory.LOST_STEPS, 0.0)
    how = attempt.state.value + (f" ({attempt.code})" if attempt.code else "")
    return {
        "number": attempt.number,
        "began": round(began, 2),
        "ended": round(attempt.ended, 2),
        "how": truncate(f"{how}: {attempt.reason}" if attempt.reason else how),
        "resumed": attempt.resumed_step,
        "reached": reached,
        "kept": None if reached is None else reached - lost,
        "lost": lost,
        "stepping": round(_compute_first_step_time(attempt), 2),
        "lost_since": round(lost_since, 2),
        "seconds": _build_seconds(spent),
    }


def _compute_first_step_time(attempt: AttemptRecord) -> float:
    """Return the Unix time when an attempt began to train."""
    began = attempt.ended - sum(attempt.seconds.values())
    return began + sum(attempt.seconds.get(category, 0.0) for category in START_CATEGORIES)


def _build_goodput(
    attempts: Sequence[AttemptRecord], began: float | None, attempts_max: int
) -> list[tuple[float, float | None]]:
    """Return (Unix time, goodput so far) at the start and the end of each attempt's training."""
    # Goodput falls while an attempt starts, and rises while it trains.
    found = []
    good = 0.0
    for attempt in attempts:
        first_step = _compute_first_step_time(attempt)
        for moment, more in ((first_step, 0.0), (attempt.ended, attempt.seconds.get(TimeCategory.STEPS, 0.0))):
            good += more
            # At the very beginning no time has passed, so there is no share.
            if began is not None and moment > began:
                found.append((round(moment, 2), round_value(min(good / (moment - began), 1.0))))
    return found[-2 * attempts_max :]


def list_facts(history: History) -> list[tuple[str, str]]:
    """Return the main facts of a run as pairs of name and text; the text is empty where it is unknown."""
    row, speed = history.row, history.speed
    unit, per_second, per_second_per_device = speed.rate
    # An empty text leaves the fact out of the page.
    of_total = "" if history.total_steps is None else f" of {history.total_steps:,}"
    best = history.best_validation
    newest = history.validation[-1] if history.validation else None
    attempt = history.attempts[-1] if history.attempts else None
    restart_text = ""
    if restarts := [sum(seconds.values()) for _, seconds in list_restarts(history.attempts)]:  # up to the first step
        restart_text = f"{format_duration(restarts[-1])}, {format_duration(statistics.median(restarts))}"
    fork_text = ""
    if (fork := history.fork) is not None:
        lines = format_changes(fork)[:_CHANGES_MAX]
        changes = f"with {'; '.join(lines)}" if lines else "without changes"
        fork_text = f"{fork.run} at step {fork.step:,}, {changes}"
    return [
        ("state", history.state.value if get_state_class(history) == "bad" else format_state(history)),
        ("steps", f"{history.step:,}{of_total}"),
        ("stage", _format_stage(history)),
        (unit, format_number(get_int(row, f"train/{unit}"), ",.0f")),
        ("loss", format_number(get_float(row, "train/loss"), ".4f")),
        ("validation loss", "" if newest is None else f"{newest[1]:.4f} at step {newest[0]:,}"),
        ("best validation loss", "" if best is None else f"{best[1]:.4f} at step {best[0]:,}"),
        *((name, text) for _, name, text in _list_own_figures(history)),
        (f"{unit} / s", format_number(per_second, ",.0f")),
        (f"{unit} / s / device", format_number(per_second_per_device, ",.0f")),
        ("model FLOPs utilisation", format_number(speed.mfu, ".1%")),
        ("seconds per step", format_number(speed.step_seconds, ".4g")),
        ("time left", format_duration(speed.left_seconds)),
        ("wall time", format_duration(history.wall_seconds)),
        ("goodput", f"{history.goodput:.1%}" if history.wall_seconds > 0 else ""),
        ("attempts", f"{len(history.attempts):,}"),
        ("restart, last and median", restart_text),
        ("steps lost and recomputed", f"{history.lost_steps:,}"),
        ("checkpoints", f"{len(history.checkpoints):,}"),
        ("devices", "" if attempt is None or attempt.num_devices is None else _format_devices(attempt)),
        ("directory", truncate(history.url)),
        ("forked from", truncate(fork_text)),
    ]


def format_state(history: History) -> str:
    """Return the state of a run with its reason."""
    return truncate(f"{history.state.value}: {history.reason}" if history.reason else history.state.value)


def _format_stage(history: History) -> str:
    """Return the current stage and the number of stages; nothing for a run without stages, and before the first."""
    number = history.find_stage(history.step)
    return f"stage {number} of {len(history.stages)}" if number else ""


def get_state_class(history: History) -> str:
    """Return the CSS class of a run's state: `good`, `bad`, `live`, or "" for the others."""
    return _STATE_CLASSES.get(history.state, "")


def format_number(value: float | None, form: str) -> str:
    """Return a number in the format `form`, "" if it is unknown or not finite."""
    return "" if value is None or not math.isfinite(value) else format(value, form)


def _format_devices(attempt: AttemptRecord) -> str:
    processes = "" if attempt.num_processes in (None, 1) else f" in {attempt.num_processes} processes"
    return f"{attempt.num_devices} x {truncate(attempt.device_kind or 'unknown')}{processes}"


def list_environment(history: History) -> list[tuple[str, str]]:
    """Return the environment of the newest attempt as pairs of name and text.

    Where earlier attempts had another value, the text lists each value with the attempt that it began with, of many the
    newest.
    """
    values: dict[str, list[tuple[int, str]]] = {}
    for attempt in history.attempts:
        environment = attempt.environment
        versions = environment.get("versions")
        known_versions = list(versions.items())[:_VERSIONS_MAX] if isinstance(versions, dict) else []
        texts = [(str(name), to_single_line(text)) for name, text in known_versions]
        if isinstance(commit := environment.get("commit"), str):
            texts.append(("commit", commit + (" with uncommitted changes" if environment.get("dirty") is True else "")))
        if "cpus" in environment:
            texts.append(("CPUs", to_single_line(environment["cpus"])))
        if attempt.num_devices is not None:
            texts.append(("devices", _format_devices(attempt)))
        if attempt.hosts:
            # Large jobs have thousands of hosts.
            names = sorted(set(attempt.hosts))
            is_short = len(names) <= _HOSTS_MAX
            texts.append(("hosts", ", ".join(names) if is_short else f"{names[0]} and {len(names) - 1} more"))
        for name, text in texts:
            known = values.setdefault(name, [])
            # Only changes are listed, since most attempts run in the same environment.
            if not known or known[-1][1] != text:
                known.append((attempt.number, text))
    found = []
    for name, known in values.items():
        if len(known) == 1:
            found.append((name, known[0][1]))
        else:
            changes = (f"from attempt {number}: {text}" for number, text in known[-_CHANGES_MAX:])
            found.append((name, "; ".join(changes)))
    return found
