"""Screen and JSON of a sweep, for `status`.

The table has a column for each key in which the runs differ. Where the terminal is too narrow for that, less important
columns are left out, and then the values of each run stand below it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from runner.console import format_duration
from runner.history.ledger import to_single_line
from runner.history.lineage import format_ladder
from runner.history.records import RunState, to_json
from runner.history.sweep import (
    NOT_STARTED,
    SEED,
    STOPPED,
    SweepRow,
    SweepStatus,
    format_value,
    shorten_keys,
)
from runner.storage import JsonObject

_COLOURS = {RunState.RUNNING.value: "green", RunState.DONE.value: "green", NOT_STARTED: "", STOPPED: ""}
_COLOURS |= {RunState.PREEMPTED.value: "yellow", RunState.RETRYABLE.value: "yellow"}
_REASONS_MAX = 5
_HEAD_COLUMNS = 9


def dump_sweep(url: str, status: SweepStatus) -> JsonObject:
    """Return the JSON of `status ROOT --json`."""
    sweep = status.sweep
    return {
        "root": url,
        "sweep": to_json(
            {
                "name": sweep.name,
                "spec": sweep.spec,
                "metric": sweep.metric,
                "is_maximised": sweep.is_maximised,
                "rule": sweep.rule,
                "keys": sweep.keys,
            }
        ),
        "forecasts": to_json(sweep.forecasts),
        "runs": [to_json(row) | {"has_ended": row.has_ended} for row in status.rows],
        "best": status.best,
        "settings": to_json(status.settings),
        "best_setting": to_json(status.best_setting),
        "counts": to_json(status.counts),
        "left_seconds": to_json(status.left_seconds),
    }


def draw_sweep(status: SweepStatus) -> RenderableType:
    """Return the screen, the most important lines first."""
    sweep = status.sweep
    short = shorten_keys(sweep.keys)
    direction = "highest" if sweep.is_maximised else "lowest"
    summary = Text().append_text(Text(f"{to_single_line(sweep.name)}  ", "bold"))
    summary.append(
        f"{len(sweep.runs):,} runs: {', '.join(f'{count:,} {state}' for state, count in status.counts.items())}"
    )
    if status.left_seconds:
        summary.append(f"; about {format_duration(status.left_seconds)} left")
    if sweep.metric:
        summary.append(f"\nbest by {to_single_line(sweep.metric)}, the {direction} at the end")
    if len(status.rows) < len(sweep.runs):
        summary.append(f"\nonly the first {len(status.rows):,} runs are shown")
    parts: list[RenderableType] = [summary, *map(Text, format_ladder(sweep))]

    if status.settings:
        keys = [key for key in sweep.keys if key != SEED]
        settings = [
            (
                each.values,
                (Text(f"{each.count} of {len(each.runs)}"),),
                _format_metric(
                    each.mean, " +- " + _format_number(each.deviation) if each.deviation is not None else ""
                ),
                each is status.best_setting,
            )
            for each in status.settings
        ]
        parts += [Text("\nsettings, by the mean over finished seeds", "bold")]
        parts += [_FittingTable({key: short[key] for key in keys}, ("seeds",), "mean +- deviation", settings)]
        parts += [Text("\nruns", "bold")]
    else:
        parts.append(Text(""))
    runs = [
        (row.values, _describe_run(row), _format_metric(row.metric, ""), row.name == status.best) for row in status.rows
    ]
    parts.append(_FittingTable(short, ("run", "state", "step", "time"), "metric", runs))
    failed = [
        row for row in status.rows if row.reason and row.state not in (RunState.RUNNING.value, RunState.DONE.value)
    ]
    for row in [row for row in failed if row.state != STOPPED][:_REASONS_MAX]:
        parts.append(Text(f"{row.name}: {to_single_line(row.reason)}", "red"))
    return Group(*parts)


def _describe_run(row: SweepRow) -> tuple[Text, ...]:
    """Return name, state, step and time of a run."""
    state = f"stopped at {row.stopped_step:,}" if row.state == STOPPED else row.state
    steps = "" if row.state == NOT_STARTED else f"{row.step:,}"
    steps += f" of {row.total_steps:,}" if row.total_steps is not None else ""
    seconds = format_duration(row.seconds) if row.seconds is not None else ""
    left = f", {format_duration(row.left_seconds)} left" if row.left_seconds and not row.has_ended else ""
    return Text(row.name), Text(state, _COLOURS.get(row.state, "red")), Text(steps), Text(seconds + left)


def _format_metric(value: float | None, more: str) -> str:
    return "" if value is None else _format_number(value) + more


def _format_number(value: float) -> str:
    return f"{value:.4f}" if 0.01 <= abs(value) < 1e5 or value == 0 else f"{value:.4g}"


class _FittingTable:
    """Table of values by key between other columns, in the widest form that fits the terminal."""

    def __init__(
        self,
        keys: Mapping[str, str],
        heads: Sequence[str],
        last: str,
        lines: Sequence[tuple[Mapping[str, Any], Sequence[Text], str, bool]],
    ):
        """Take names of keys, heads of other columns, and lines: values, other cells, metric, and True for the best."""
        self._keys, self._heads, self._last, self._lines = keys, heads, last, lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table: heads are broken and columns dropped until it fits; else values stand below each line."""
        forms = [(len(self._heads), False), *((count, True) for count in range(len(self._heads), 0, -1))]
        for num_heads, is_broken in forms[: -1 if len(self._heads) > 1 else None]:
            table = self._make(num_heads, is_broken)
            if Measurement.get(console, options.update(max_width=10_000), table).maximum <= options.max_width:
                yield table
                return
        for values, cells, metric, is_best in self._lines:
            words = [*cells[:3], Text(metric + " best" * is_best)]
            yield Text("  ").join(each for each in words if each)
            known = (f"{name}={format_value(values, key)}" for key, name in self._keys.items() if key in values)
            yield Padding(Text(" ".join(known)), (0, 0, 0, 4))

    def _make(self, num_heads: int, is_broken: bool) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        table.add_column(self._heads[0])
        for name in map(to_single_line, self._keys.values()):
            table.add_column(_break_name(name) if is_broken else name, justify="right")
        for head in self._heads[1:num_heads]:
            table.add_column(head, justify="left" if head == "state" else "right")
        table.add_column(self._last)
        for values, cells, metric, is_best in self._lines:
            texts = (Text(format_value(values, key)) for key in self._keys)
            last = Text(metric + " best" * is_best)
            table.add_row(*cells[:1], *texts, *cells[1:num_heads], last, style="bold green" if is_best else "")
        return table


def _break_name(name: str) -> str:
    """Return a name with lines of about `_HEAD_COLUMNS`, broken after underscores."""
    lines = [""]
    for part in re.split(r"(?<=[_.])", name):
        if lines[-1] and len(lines[-1]) + len(part) > _HEAD_COLUMNS:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
