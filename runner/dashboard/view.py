"""What `page.js` draws of runs, as JSON of bounded size: texts, and numbers with as many digits as an eye can see."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence

from runner.dashboard.charts import CHARTS, Point, ThinnedSeries, find_chart
from runner.dashboard.discovery import find_differences
from runner.dashboard.reader import RunSnapshot
from runner.distributed.clock import TimeBucket
from runner.history.records import AttemptRecord, CheckpointRecord, History, RunState, SaveRecord
from runner.storage import JsonObject

ATTEMPTS_MAX = 2000  # on a page, of all its runs
CHECKPOINTS_MAX = 500  # of a run, the newest
LINE_CHARACTERS_MAX = 1000
_CHANGES_MAX = 8
_HOSTS_MAX = 8

_KINDS = {
    RunState.DONE: "good",
    RunState.RUNNING: "live",
    RunState.STALLED: "bad",
    RunState.FAILED: "bad",
    RunState.INVALID: "bad",
    RunState.RETRYABLE: "bad",
    RunState.KILLED: "bad",
}
_BEFORE_STEPS = (
    TimeBucket.PROCESS_START,
    TimeBucket.DISTRIBUTED_INIT,
    TimeBucket.SET_UP,
    TimeBucket.COMPILE,
    TimeBucket.RESTORE,
)


def build_view(title: str, seen: Sequence[RunSnapshot], points_max: int) -> JsonObject:
    """The data of a page about some runs, which differ in name; curves have about `points_max` points in all."""
    num_series = sum(len(run.curves.keys) for run in seen) or 1
    bins_max = max(points_max // (2 * num_series), 10)
    attempts_max = max(ATTEMPTS_MAX // max(len(seen), 1), 20)
    runs = [_run(run, bins_max, attempts_max) for run in seen]
    found = {key: find_chart(key) for run in seen for key in run.curves.keys}
    own = sorted(
        {chart.title: chart for chart in found.values() if chart not in CHARTS}.values(), key=lambda c: c.title
    )
    return {
        "title": title,
        "runs": runs,
        "charts": [chart.to_json() for chart in (*CHARTS, *own)],
        "buckets": [
            {"name": bucket.value, "label": bucket.value.replace("_", " "), "meaning": bucket.meaning}
            for bucket in TimeBucket
        ],
        "differences": [list(each) for each in find_differences([run.spec for run in seen])] if len(seen) > 1 else [],
    }


def _run(seen: RunSnapshot, bins_max: int, attempts_max: int) -> JsonObject:
    history = seen.history
    began = history.attempts[0].began if history.attempts else None
    thinned = seen.curves.thinned(bins_max, seen.newest)
    charts: dict[str, list[JsonObject]] = {}
    for key, series in sorted(thinned.items(), key=lambda each: (not each[0].startswith("train/"), each[0])):
        charts.setdefault(find_chart(key).title, []).append({"key": key} | _series(series, began))
    attempts = history.attempts[-attempts_max:]
    notes = [*seen.notes, *history.unread]
    if len(attempts) < len(history.attempts):
        notes.append(f"The newest {len(attempts)} of {len(history.attempts)} attempts are drawn.")
    if seen.curves.left_out:
        notes.append(f"Not drawn, since there are so many: {', '.join(sorted(seen.curves.left_out))} and maybe more.")
    return {
        "id": seen.name,
        "label": seen.name,
        "began": began,
        "seconds": round(history.wall_seconds, 1),
        "facts": [[name, text] for name, text in list_facts(history) if text],
        "warnings": [truncate(text) for text in (*(f"{each.event}: {each.text}" for each in history.warnings), *notes)],
        "rows": seen.curves.num_rows + len(seen.newest),
        "thinning": _thinning(thinned.values()),
        "tokens_per_step": _tokens_per_step(history),
        "charts": charts,
        "attempts": [_attempt(each) for each in attempts],
        "buckets": _seconds(history.seconds),
        "goodput": _goodput(history.attempts, began, attempts_max),
        "saves": [_save(each) for each in history.saves],
        "checkpoints": [_checkpoint(each) for each in reversed(history.checkpoints[-CHECKPOINTS_MAX:])],
        "environment": [[truncate(name), truncate(text)] for name, text in list_environment(history)],
        "spec": seen.spec or "(spec.yaml cannot be read)",
        "events": [truncate(text) for text in list_events(history)],
        "log": None if seen.log is None else {"name": seen.log.name, "text": seen.log.text},
    }


def truncate(text: str) -> str:
    """A text of bounded length."""
    return text if len(text) <= LINE_CHARACTERS_MAX else f"{text[:LINE_CHARACTERS_MAX]} ..."


def round_value(value: float) -> float | None:
    """Six digits of a number, which no eye tells from more; None for what is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


# Curves.


def _series(series: ThinnedSeries, began: float | None) -> JsonObject:
    broken = _points(series.broken, began)
    return _points(series.points, began) | {"broken": broken, "num_broken": series.num_broken}


def _points(points: Sequence[Point], began: float | None) -> JsonObject:
    """Columns; an axis that no point knows is null. Seconds count from the first start."""
    seconds = [None if point.seconds is None or began is None else point.seconds - began for point in points]
    tokens = [point.tokens for point in points]
    return {
        "step": [point.step for point in points],
        "tokens": tokens if any(each is not None for each in tokens) else None,
        "seconds": [None if each is None else round(each, 1) for each in seconds]
        if any(each is not None for each in seconds)
        else None,
        "value": [round_value(point.value) for point in points],
    }


def _thinning(found: Iterable[ThinnedSeries]) -> str:
    series = list(found)
    num_points, num_drawn = sum(each.num_points for each in series), sum(len(each.points) for each in series)
    num_broken = sum(each.num_broken for each in series)
    broken = f", {num_broken} of which are not finite (crosses)" if num_broken else ""
    if num_points - num_broken == num_drawn:
        return f"every one of {num_points} values is drawn{broken}"
    return (
        f"{num_drawn} of {num_points} values{broken} are drawn: the lowest and the highest of each bin, so peaks stay"
    )


def _tokens_per_step(history: History) -> float | None:
    step, tokens = history.row.get("step"), history.row.get("train/tokens")
    return tokens / step if isinstance(tokens, int) and isinstance(step, int) and step > 0 else None


# Time.


def _seconds(seconds: Mapping[TimeBucket, float]) -> dict[str, float]:
    return {bucket.value: round(value, 2) for bucket, value in seconds.items() if value > 0}


def _attempt(attempt: AttemptRecord) -> JsonObject:
    spent, began = attempt.seconds, attempt.ended - sum(attempt.seconds.values())
    reached, lost = attempt.reached_step, attempt.lost_steps
    lost_since = attempt.ended - spent.get(TimeBucket.SHUTDOWN, 0.0) - spent.get(TimeBucket.LOST_STEPS, 0.0)
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
        "stepping": round(_first_step(attempt), 2),
        "lost_since": round(lost_since, 2),
        "seconds": _seconds(spent),
    }


def _first_step(attempt: AttemptRecord) -> float:
    """When it began to train."""
    began = attempt.ended - sum(attempt.seconds.values())
    return began + sum(attempt.seconds.get(bucket, 0.0) for bucket in _BEFORE_STEPS)


def _goodput(
    attempts: Sequence[AttemptRecord], began: float | None, attempts_max: int
) -> list[tuple[float, float | None]]:
    """(Unix time, share of the wall time so far) at the begin and the end of each attempt's training."""
    found = []
    good = 0.0
    for attempt in attempts:
        for moment, more in ((_first_step(attempt), 0.0), (attempt.ended, attempt.seconds.get(TimeBucket.STEPS, 0.0))):
            good += more
            if began is not None and moment > began:
                found.append((round(moment, 2), round_value(min(good / (moment - began), 1.0))))
    return found[-2 * attempts_max :]


def _save(save: SaveRecord) -> JsonObject:
    return {
        "step": save.step,
        "time": round(save.time, 2),
        "bytes": save.num_bytes,
        "seconds": None if save.seconds_to_durable is None else round_value(save.seconds_to_durable),
    }


def _checkpoint(checkpoint: CheckpointRecord) -> JsonObject:
    trust = checkpoint.trust.value
    return {
        "name": truncate(checkpoint.name),
        "time": checkpoint.time,
        "bytes": checkpoint.num_bytes,
        "text": truncate(f"{trust}: {checkpoint.problem}" if checkpoint.problem else trust),
    }


# Words.


def list_facts(history: History) -> list[tuple[str, str]]:
    """What a person asks first, a name and a text each; the text is empty where it is not known."""
    row, speed = history.row, history.speed
    of_total = "" if history.total_steps is None else f" of {history.total_steps:,}"
    best = history.best_validation
    newest = history.validation[-1] if history.validation else None
    devices = history.attempts[-1] if history.attempts else None
    return [
        ("state", format_state(history)),
        ("steps", f"{history.step:,}{of_total}"),
        ("tokens", format_number(row.get("train/tokens"), ",.0f")),
        ("loss", format_number(row.get("train/loss"), ".4f")),
        ("validation loss", "" if newest is None else f"{newest[1]:.4f} at step {newest[0]:,}"),
        ("best validation loss", "" if best is None else f"{best[1]:.4f} at step {best[0]:,}"),
        ("tokens / s", format_number(speed.tokens_per_second, ",.0f")),
        ("tokens / s / device", format_number(speed.tokens_per_second_per_device, ",.0f")),
        ("model FLOPs utilisation", format_number(speed.mfu, ".1%")),
        ("seconds a step", format_number(speed.step_seconds, ".4g")),
        ("time left", format_duration(speed.left_seconds)),
        ("wall time", format_duration(history.wall_seconds)),
        ("goodput", f"{history.goodput:.1%}" if history.wall_seconds > 0 else ""),
        ("attempts", f"{len(history.attempts):,}"),
        ("steps lost and done again", f"{history.lost_steps:,}"),
        ("checkpoints", f"{len(history.checkpoints):,}"),
        ("devices", "" if devices is None or devices.num_devices is None else _devices(devices)),
        ("directory", truncate(history.url)),
    ]


def format_state(history: History) -> str:
    """The state, with its reason."""
    return truncate(f"{history.state.value}: {history.reason}" if history.reason else history.state.value)


def get_state_class(history: History) -> str:
    """Whether the state is good, bad, live, or none of these."""
    return _KINDS.get(history.state, "")


def format_number(value: object, form: str) -> str:
    """A finite number as `form` has it; empty if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return ""
    return format(value, form)


def format_duration(seconds: float | None) -> str:
    """So many days, hours, minutes or seconds; empty if it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    for name, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.1f} s"


def _devices(attempt: AttemptRecord) -> str:
    processes = "" if attempt.num_processes in (None, 1) else f" in {attempt.num_processes} processes"
    return f"{attempt.num_devices} x {truncate(attempt.device_kind or 'unknown')}{processes}"


def list_environment(history: History) -> list[tuple[str, str]]:
    """What the newest attempt runs with, and what the attempts before it ran with where that was another."""
    found: dict[str, list[str]] = {}
    for attempt in history.attempts:
        for name, text in _environment(attempt):
            told = found.setdefault(name, [])
            if not told or told[-1].partition(": ")[2] != text:
                told.append(f"{attempt.number}: {text}")
    return [(name, _since_which(told)) for name, told in found.items()]


def _since_which(told: list[str]) -> str:
    """One value alone, else each with the attempt that it began with; of many the newest."""
    if len(told) == 1:
        return told[0].partition(": ")[2]
    return "; ".join(f"from attempt {each}" for each in told[-_CHANGES_MAX:])


def _environment(attempt: AttemptRecord) -> list[tuple[str, str]]:
    given = attempt.environment
    versions = given.get("versions")
    found = [(str(name), str(text)) for name, text in versions.items()] if isinstance(versions, dict) else []
    if isinstance(commit := given.get("commit"), str):
        found.append(("commit", commit + (" with uncommitted changes" if given.get("dirty") is True else "")))
    if "cpus" in given:
        found.append(("CPUs", str(given["cpus"])))
    if attempt.num_devices is not None:
        found.append(("devices", _devices(attempt)))
    if attempt.hosts:
        names = sorted(set(attempt.hosts))
        found.append(
            ("hosts", ", ".join(names) if len(names) <= _HOSTS_MAX else f"{names[0]} and {len(names) - 1} more")
        )
    return found


def list_events(history: History) -> list[str]:
    """The newest lines of the ledger, the newest first."""
    return [json.dumps(event) for event in reversed(history.events)]
