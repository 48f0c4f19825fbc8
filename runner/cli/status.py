"""A run's history as one screen of a terminal: plain text without one, never wider than it, nothing obeyed in it.

`python -m runner status`: where a run stands and where its time went. Claims nothing, writes nothing.
"""

import datetime
import json
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runner.cli.arguments import Parser, directory_of, looking
from runner.distributed.clock import TimeBucket
from runner.errors import EXIT_DONE
from runner.history.ledger import get_float, to_single_line
from runner.history.reader import HistoryReader
from runner.history.records import AttemptRecord, History, RunState, Verification, to_json
from runner.process import STOP_SIGNALS
from runner.storage import JsonObject, Store, open_store

_ATTEMPTS_MAX, _CHECKPOINTS_MAX, _NOTICES_MAX, _HOSTS_MAX = 8, 5, 5, 4
_PLOT_COLUMNS, _PLOT_ROWS = 60, 6
_BAR_COLUMNS = 24
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # dot by row and column of a cell
_COLOURS = {
    RunState.RUNNING: "green",
    RunState.DONE: "green",
    RunState.PREEMPTED: "yellow",
    RunState.RETRYABLE: "yellow",
}
_TRUSTED = {
    Verification.VERIFIED: "green",
    Verification.COMMITTED: "",
    Verification.UNSEEN: "",
    Verification.UNCOMMITTED: "yellow",
}


def draw(history: History) -> RenderableType:
    """All of it, the most important first."""
    parts = [
        _head(history),
        *_plot(history.trend),
        *_buckets(history),
        *_attempts(history.attempts),
        *_checkpoints(history),
        *_hosts(history),
        *_notices(history),
    ]
    return Group(*parts)


# Words.


def lasting(seconds: float) -> str:
    """`8.2 s`, `4 min 10 s`, `3 h 5 min`, `12 d 4 h`."""
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f} s"
    limits = ((6000, "min", 60, "s", 1), (72 * 3600, "h", 3600, "min", 60), (math.inf, "d", 86400, "h", 3600))
    _, large, size, small, part = next(limit for limit in limits if seconds < limit[0])
    return f"{seconds // size:,.0f} {large} {seconds % size // part:.0f} {small}"


def amount(value: float) -> str:
    """`950`, `12.3 k`, `4.56 M`: three digits."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def moment(seconds: float) -> str:
    """A time of this machine's time zone."""
    try:
        return datetime.datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        return "?"


def _bar(share: float, columns: int) -> str:
    eighths = round(min(max(share, 0.0), 1.0) * columns * 8)
    return "█" * (eighths // 8) + ("" if eighths % 8 == 0 else chr(0x2590 - eighths % 8))


# Parts.


def _head(history: History) -> Text:
    line = Text().append_text(Text(f"{history.name or '?'}  ", "bold"))
    line.append_text(Text(history.state.value, _COLOURS.get(history.state, "red")))
    if history.state not in (RunState.RUNNING, RunState.DONE):
        line.append(f" since {moment(history.since)}, {lasting(history.now - history.since)} ago")
    line.append(f"  {to_single_line(history.url)}\n")
    if history.reason and history.state is not RunState.RUNNING:
        line.append_text(Text(f"{history.reason}\n", "red"))
    line.append(_progress(history))
    for each in (_quality(history), _pace(history)):
        line.append(f"\n{each}" if each else "")
    return line


def _progress(history: History) -> str:
    if not history.total_steps:
        return f"step {history.step:,}"
    share = history.step / history.total_steps
    words = f"step {history.step:,} of {history.total_steps:,}  {_bar(share, _BAR_COLUMNS)} {share:.1%}"
    left = history.speed.left_seconds
    return words if left is None or history.state is RunState.DONE else f"{words}  {lasting(left)} left"


def _quality(history: History) -> str:
    row, words = history.row, []
    tokens, loss = get_float(row, "train/tokens"), get_float(row, "train/loss")
    words += [] if tokens is None else [f"{amount(tokens)} tokens"]
    words += [] if loss is None else [f"loss {loss:.4f}"]
    if history.validation:
        words.append(f"validation {history.validation[-1][1]:.4f}")
    if history.best_validation is not None:
        words.append(f"best {history.best_validation[1]:.4f} at step {history.best_validation[0]:,}")
    return "  ".join(words)


def _pace(history: History) -> str:
    speed, words = history.speed, []
    words += [] if speed.step_seconds is None else [f"{speed.step_seconds:.3g} s a step"]
    words += [] if speed.tokens_per_second is None else [f"{amount(speed.tokens_per_second)} tokens/s"]
    per_device = speed.tokens_per_second_per_device
    words += [] if per_device is None else [f"{amount(per_device)} tokens/s a device"]
    words += [] if speed.mfu is None else [f"MFU {speed.mfu:.1%}"]
    return "  ".join(words)


def _plot(rows: Sequence[JsonObject]) -> Iterator[RenderableType]:
    """The training loss by step. What is higher than nearly all is drawn at the top."""
    points = [(row["step"], loss) for row in rows if (loss := get_float(row, "train/loss")) is not None]
    if len(points) < 2 or points[0][0] == points[-1][0]:
        return
    losses = sorted(loss for _, loss in points)
    low, high = losses[0], losses[math.ceil(0.95 * (len(losses) - 1))]
    first, last = points[0][0], points[-1][0]
    cells = [[0] * _PLOT_COLUMNS for _ in range(_PLOT_ROWS)]
    for step, loss in points:
        x = round((step - first) / (last - first) * (2 * _PLOT_COLUMNS - 1))
        share = 0.5 if high <= low else (min(loss, high) - low) / (high - low)
        y = round((1 - share) * (4 * _PLOT_ROWS - 1))
        cells[y // 4][x // 2] |= _BRAILLE[y % 4][x % 2]
    marks = {0: f"{high:.4g}", _PLOT_ROWS - 1: f"{low:.4g}"}
    drawn = ("".join(chr(0x2800 + cell) if cell else " " for cell in line) for line in cells)
    lines = [f"{marks.get(y, ''):>9} {line}".rstrip() for y, line in enumerate(drawn)]
    ends = f"{f'step {first:,}':<{_PLOT_COLUMNS // 2}}{f'{last:,}':>{_PLOT_COLUMNS // 2}}"
    yield Text("\n".join(["", "     loss", *lines, f"{'':>9} {ends}"]))


def _buckets(history: History) -> Iterator[RenderableType]:
    lost = f", {history.lost_steps:,} steps lost" if history.lost_steps else ""
    yield _title(f"goodput {history.goodput:.1%} of {lasting(history.wall_seconds)}{lost}")
    table = _table("left", "right", "right", "left")
    whole = history.wall_seconds or 1.0
    for bucket, seconds in history.seconds.items():
        if seconds >= 0.05 or bucket in (TimeBucket.STEPS, TimeBucket.UNATTRIBUTED):
            bar = Text(_bar(seconds / whole, _BAR_COLUMNS), "green" if bucket is TimeBucket.STEPS else "yellow")
            table.add_row(bucket.value.replace("_", " "), lasting(seconds), f"{seconds / whole:.1%}", bar)
    yield table


def _attempts(attempts: Sequence[AttemptRecord]) -> Iterator[RenderableType]:
    yield _title(_counted("attempt", len(attempts), _ATTEMPTS_MAX))
    table = _table("right", "left", "right", "right", "right", "left")
    for each in attempts[-_ATTEMPTS_MAX:]:
        steps = "no step" if each.resumed_step is None else f"{each.resumed_step:,} to {each.reached_step or 0:,}"
        lost = f"{each.lost_steps:,} lost" if each.lost_steps else ""
        ended = Text(each.state.value, _COLOURS.get(each.state, "red"))
        ended.append_text(Text(f": {each.reason}" if each.reason else "", "default"))
        table.add_row(str(each.number), moment(each.began), lasting(each.ended - each.began), steps, lost, ended)
    yield table


def _checkpoints(history: History) -> Iterator[RenderableType]:
    found = history.checkpoints
    yield _title(_counted("checkpoint", len(found), _CHECKPOINTS_MAX))
    table = _table("right", "right", "left", "left")
    for each in found[-_CHECKPOINTS_MAX:]:
        size = "" if each.num_bytes is None else f"{amount(each.num_bytes)}B"
        age = "" if each.time is None else f"{lasting(history.now - each.time)} ago"
        trust = Text(each.trust.value, _TRUSTED.get(each.trust, "red"))
        is_damaged = each.problem is not None and each.trust is Verification.DAMAGED
        trust.append_text(Text(f": {to_single_line(each.problem)}" if is_damaged else "", "default"))
        table.add_row(to_single_line(each.name), size, age, trust)
    yield table


def _hosts(history: History) -> Iterator[RenderableType]:
    last = history.attempts[-1]
    if last.hosts:
        named = ", ".join(dict.fromkeys(last.hosts[:_HOSTS_MAX])) + (" ..." if len(last.hosts) > _HOSTS_MAX else "")
        devices = "" if last.num_devices is None else f", {last.num_devices:,} {last.device_kind or ''} devices"
        yield Text(f"\n{len(last.hosts)} process{'es' * (len(last.hosts) != 1)} on {named}{devices}")
    if history.straggling is not None:
        late = ", ".join(f"{who} {seconds:.2f} s" for who, seconds in history.straggling.late.items())
        yield Text(f"late at step {history.straggling.step:,}: {late}", "yellow")


def _notices(history: History) -> Iterator[RenderableType]:
    newest = history.warnings[-_NOTICES_MAX:]
    if newest or history.unread:
        yield _title("notices")
    for each in newest:
        yield Text(f"{moment(each.time)}  attempt {each.attempt}  {each.event}: {each.text}", "yellow")
    for line in history.unread[:_NOTICES_MAX]:
        yield Text(f"not read: {line}", "yellow")


def _title(words: str) -> Text:
    return Text(f"\n{words}", "bold")


def _counted(what: str, count: int, shown: int) -> str:
    """`12 attempts, the newest 8`."""
    if count == 0:
        return f"no {what}"
    return f"{count:,} {what}{'s' * (count != 1)}" + (f", the newest {shown}" if count > shown else "")


def _table(*columns: Literal["left", "right"]) -> Table:
    """Without lines and without a head; the last column alone may be broken."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    for index, justify in enumerate(columns):
        table.add_column(justify=justify, no_wrap=index + 1 < len(columns))
    return table


WATCH_SECONDS = 2.0


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    parser = Parser("runner status", description="Where a run stands, and where its time went.")
    parser.add_argument("where", metavar="SPEC_OR_DIRECTORY")
    parser.add_argument("--json", action="store_true", help="print the records as JSON, one line each time")
    parser.add_argument("--watch", action="store_true", help="look again every two seconds until the run is done")
    parsed = parser.parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    with looking(KeyboardInterrupt, BrokenPipeError):
        store = open_store(directory_of(parsed.where))
        if parsed.watch:
            _watch(store, parsed.json)
        else:
            _show(HistoryReader(store).read(), parsed.json, Console(markup=False, highlight=False, emoji=False))
    return EXIT_DONE


def _show(history: History, is_json: bool, console: Console) -> None:
    if is_json:
        print(json.dumps(to_json(history)), flush=True)
    else:
        console.print(draw(history))


def _watch(store: Store, is_json: bool) -> None:
    """Look again and again until the run is done, or Ctrl-C comes, which here asks no job to stop."""
    signal.set_wakeup_fd(-1)
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, signal.default_int_handler)
    console = Console(markup=False, highlight=False, emoji=False)
    reader = HistoryReader(store)
    history = reader.read()
    if is_json or not console.is_terminal:
        _show(history, is_json, console)
        while history.state is not RunState.DONE:
            time.sleep(WATCH_SECONDS)
            history = reader.read()
            _show(history, is_json, console)
        return
    with Live(draw(history), console=console, auto_refresh=False, screen=True) as live:
        while history.state is not RunState.DONE:
            time.sleep(WATCH_SECONDS)
            history = reader.read()
            live.update(draw(history), refresh=True)
    console.print(draw(history))
