"""The command `status`, and access to a run for read-only commands, which claim no attempt.

`status` shows the history of a run as one screen of a terminal, or as JSON, and writes nothing. The screen is plain
text where there is no terminal, and never wider than the terminal. Control characters in anything that a run has
recorded are not passed on.
"""

import contextlib
import datetime
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from runner.attempts.layout import LAYOUT, OWNER, DamagedRecordError, read_owner
from runner.cli.arguments import StatusArguments
from runner.console import escape_controls, finish_output, format_duration, warn, write_text
from runner.dashboard.reader import DiscoveryResult, confine, find_runs
from runner.distributed.clock import TimeCategory
from runner.errors import EXIT_DONE, InvalidError, RetryableError, RunnerError
from runner.history.cost import compute_cost, format_cost
from runner.history.goodput import list_restarts
from runner.history.hosts import RULE, HostRecord, merge_hosts, read_hosts
from runner.history.ledger import get_float, to_single_line
from runner.history.lineage import format_ladder
from runner.history.reader import HistoryReader, format_changes, open_text_stores
from runner.history.records import History, RunState, StageRecord, Verification, to_json
from runner.history.sweep import SWEEP, read_sweep
from runner.metrics.rows import POLICY_COUNTS, format_metrics, list_own_metrics
from runner.spec import list_named_modules, load_document, validate_spec
from runner.storage import DiskError, JsonObject, Store, find_kind, local_directory, open_store

WATCH_SECONDS = 2.0
_MAX_ATTEMPTS, _MAX_CHECKPOINTS, _MAX_NOTICES, _MAX_HOSTS, _MAX_CHANGES = 8, 5, 5, 4, 8
_MIN_SHOWN_SECONDS = 0.05  # of a category of the wall time
_PLOT_COLUMNS, _PLOT_ROWS = 60, 6
_BAR_COLUMNS = 24
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of each dot, by row and column of a cell
_STATE_COLOURS = {
    RunState.RUNNING: "green",
    RunState.DONE: "green",
    RunState.PREEMPTED: "yellow",
    RunState.RETRYABLE: "yellow",
}
_VERIFICATION_COLOURS = {
    Verification.VERIFIED: "green",
    Verification.COMMITTED: "",
    Verification.UNSEEN: "",
    Verification.UNCOMMITTED: "yellow",
}


def find_directory(where: str) -> str:
    """Return the directory that a spec names, or `where` itself, which is a directory or URL then."""
    # Decided by the suffix, so that a bucket and a missing spec get specific errors.
    if not where.endswith((".yaml", ".yml")) or os.path.isdir(where):
        return where
    return str(validate_spec(load_document(where)).directory)


def find_run(where: str, trust: Sequence[str]) -> tuple[str, list[str]]:
    """Return the directory of a run, and the modules whose classes its `spec.yaml` may name.

    These are the modules that the user lists in `trust`, and those that a spec of the user's own names.
    """
    directory = find_directory(where)
    # The `spec.yaml` of a run's directory is no spec of the user's own. A copied run may lack `job.json`.
    path = Path(where)
    is_of_run = path.name == "spec.yaml" and any((path.parent / name).exists() for name in (OWNER, "checkpoints"))
    if directory == where or is_of_run:
        return directory, [*trust]
    return directory, [*trust, *list_named_modules(load_document(where).data)]


def open_run_store(where: str) -> Store:
    """Open the directory of a run by its spec, path or URL. Raises `InvalidError` if it holds no run."""
    store = open_store(find_directory(where))
    # `job.json` is written first, by the claim of the directory, so it exists even if no step was ever saved.
    if read_owner(store) is None:
        raise InvalidError(f"{store.url} holds no run: it has no job.json; give a run's directory, or its spec")
    return store


def validate_output(where: str, stores: Sequence[Store], kind: str = "a file", option: str = "-o") -> Path:
    """Return the path to write for `-o where`, or for another option, with symbolic links resolved.

    Raises InvalidError if something other than `kind` is there, such as a device, which the output would replace, or if
    it would become a part of one of the runs in `stores`.
    """
    path = local_directory(where)
    found = find_kind(path)
    if found not in (None, kind):
        raise InvalidError(f"{option} {where}: is {found}, needs the name of {kind}")
    path = Path(os.path.realpath(path))
    for store in stores:
        root = None if store.root is None else Path(os.path.realpath(store.root))
        if root is not None and path.is_relative_to(root) and {*path.relative_to(root).parts[:1]} & {*LAYOUT}:
            raise InvalidError(f"{option} {where}: would be a part of the run {store.url} itself; use another name")
    return path


def validate_new_file(where: str, stores: Sequence[Store], option: str = "-o") -> Path:
    """Return the path of the file to write for `-o where`, as `validate_output`, in a directory that exists."""
    path = validate_output(where, stores, option=option)
    if not path.parent.is_dir():
        raise InvalidError(f"{option} {where}: needs the name of a file in a directory that exists")
    return path


def find_text_phase(store: Store) -> Store | None:
    """Return the run that tokenises the text of the run in `store`, if that has not begun to train; None otherwise.

    Of several it is the one that began last.
    """
    # The history reports what is damaged or cannot be read.
    with contextlib.suppress(RunnerError, OSError, ValueError):
        jobs = open_text_stores(store)
        if jobs and read_owner(store) is None:
            begun = [(owner.time, job) for job in jobs if (owner := read_owner(job)) is not None]
            return max(begun, key=lambda each: each[0])[1] if begun else None
    return None


@contextlib.contextmanager
def convert_read_errors(*normal_ends: type[BaseException]) -> Iterator[None]:
    """Convert an `OSError` of a read-only command into a `RetryableError`; `normal_ends` end it without an error."""
    try:
        yield
    except normal_ends:
        pass
    except RunnerError:
        raise
    except OSError as error:
        raise RetryableError(str(error)) from error


def print_status(arguments: StatusArguments) -> int:
    """Print the status of a run, once or repeatedly until it is done, or list the runs below a directory."""
    # A terminal whose encoding lacks the characters of bars and plots shows question marks instead of an error.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    # Ctrl-C is the usual end of a status that is watched.
    with convert_read_errors(*([KeyboardInterrupt] if arguments.is_watch else [])):
        store = open_store(find_directory(arguments.where))
        if arguments.hosts:
            return _print_hosts(store, arguments.as_json)
        # A directory without anything of a run may have runs below it.
        if store.root is None or store.root.is_dir():
            has_run = bool({*LAYOUT, "events"} & {*store.list_names("")})
            if not has_run and (below := find_runs(store)).runs:
                return _print_runs(store, below, arguments.as_json)
        readers: dict[str, HistoryReader] = {}

        def read() -> tuple[History, bool]:
            """Return the history to show, and True if it is that of a job which tokenises the text of the run."""
            phase = find_text_phase(store)
            shown = phase or store
            if shown.url not in readers:
                readers[shown.url] = HistoryReader(shown)
            return readers[shown.url].read(), phase is not None

        console = Console(markup=False, highlight=False, emoji=False)

        def show(history: History, is_text: bool) -> bool:
            if arguments.as_json:
                content = to_json(history) | {"cost": to_json(compute_cost(history))}
                write_text(json.dumps(content | ({"phase": "tokenise"} if is_text else {})) + "\n")
            else:
                if is_text:
                    console.print("the text of the run is tokenised, before it trains; that job:")
                console.print(draw(history))
            return finish_output()

        def is_watched(history: History, is_text: bool) -> bool:
            # The run continues with training when the text is tokenised.
            return arguments.is_watch and (is_text or history.state is not RunState.DONE)

        found = read()
        if arguments.is_watch and console.is_terminal and not arguments.as_json:
            # A terminal gets one screen that is redrawn, and keeps the last one in its scrollback (`show` below).
            with Live(draw(found[0]), console=console, auto_refresh=False, screen=True) as live:
                while finish_output() and is_watched(*found):
                    time.sleep(WATCH_SECONDS)
                    found = read()
                    live.update(draw(found[0]), refresh=True)
        # `status RUN --watch | head` ends when `head` does.
        while show(*found) and is_watched(*found):
            time.sleep(WATCH_SECONDS)
            found = read()
    return EXIT_DONE


def _print_runs(root: Store, found: DiscoveryResult, as_json: bool) -> int:
    """Print a line for each run below a directory, the one with the newest sign of life first."""
    histories: list[tuple[str, History]] = []
    notes, laws = [*found.notes], list[str]()
    try:
        sweep = read_sweep(root)
        laws = [] if sweep is None else format_ladder(sweep)
    except (DamagedRecordError, InvalidError) as error:
        notes.append(to_single_line(f"{SWEEP}: {error}"))
    for run in found.runs:
        try:
            histories.append((run.path, HistoryReader(run.store).read()))
        except (InvalidError, DiskError) as error:  # One damaged run must not hide the others.
            notes.append(to_single_line(str(error)))
    histories.sort(key=lambda each: each[1].attempts[-1].ended, reverse=True)
    if as_json:
        runs = [{"path": path, **to_json(history)} for path, history in histories]
        write_text(json.dumps({"root": root.url, "runs": runs, "notes": notes}) + "\n")
        return EXIT_DONE
    table = _table("left", "left", "right", "right", "right")
    for path, history in histories:
        state = Text(history.state.value, _STATE_COLOURS.get(history.state, "red"))
        steps = f"step {history.step:,}" + ("" if history.total_steps is None else f" of {history.total_steps:,}")
        best = history.best_validation or (0, get_float(history.row, "train/loss"))
        loss = "" if best[1] is None else f"{'best val' if history.best_validation else 'loss'} {best[1]:.4f}"
        age = f"{format_duration(max(history.now - history.attempts[-1].ended, 0.0))} ago"
        table.add_row(to_single_line(path), state, steps, loss, age)
    console = Console(markup=False, highlight=False, emoji=False)
    console.print(_PrintableText(Group(table, *map(Text, laws))))
    for note in notes if finish_output() else []:
        warn(f"cannot read {note}")
    return EXIT_DONE


def _print_hosts(root: Store, as_json: bool) -> int:
    """Print a line for each host of the run in a directory, or of the runs below it, the most suspect first."""
    found = find_runs(root)
    notes, now = [*found.notes], time.time()

    def read_all() -> Iterator[list[HostRecord]]:
        # A copied run may lack `job.json`, by which runs are found.
        for path, store in [(run.path, run.store) for run in found.runs] or [("", root)]:
            try:
                yield read_hosts(confine(store), path or store.url.rpartition("/")[2])
            except (InvalidError, DiskError) as error:  # One damaged run must not hide the others.
                notes.append(to_single_line(str(error)))

    hosts = merge_hosts(read_all(), now)
    if as_json:
        shown = [record.to_json(now) for record in hosts]
        write_text(json.dumps({"root": root.url, "rule": RULE, "hosts": shown, "notes": notes}) + "\n")
        return EXIT_DONE
    table = _table("left", "left", "left", "left", "left")
    named = [record for record in hosts if record.incidents]
    for record in named:
        word = Text("suspect", "red") if record.is_suspect(now) else Text("")
        attempts = f"{record.attempts:,} attempt{'s' * (record.attempts != 1)}, {format_duration(record.seconds)}"
        last = record.incidents[0]
        step = "before its first step" if last.step is None else f"step {last.step:,}"
        devices = f", {', '.join(last.devices)}" if last.devices else ""
        text = f"last: {_format_time(last.time)}, {last.run}, attempt {last.attempt}, {step}{devices}"
        table.add_row(to_single_line(record.name), word, attempts, record.describe_counts(), text)
    num_others = len(hosts) - len(named)
    others = f"{num_others:,} host{'s have' if num_others != 1 else ' has'} no incidents" if num_others else ""
    avoided = [
        Text(f"to avoid {record.name}: {' or '.join(record.list_exclusions())}", "yellow")
        for record in named
        if record.is_suspect(now) and record.list_exclusions()
    ]
    parts: list[RenderableType] = [
        table,
        *avoided,
        *([Text(others)] if others else []),
        Text(RULE),
        *(Text(f"cannot read {note}", "yellow") for note in notes),
    ]
    Console(markup=False, highlight=False, emoji=False).print(_PrintableText(Group(*parts)))
    return EXIT_DONE


class _PrintableText:
    """Renderable whose texts cannot control the terminal, in the styles of another one."""

    def __init__(self, shown: RenderableType):
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the segments of the other renderable with their texts escaped."""
        for segment in console.render(self._shown, options):
            yield segment if segment.control else Segment(escape_controls(segment.text), segment.style)


def draw(history: History) -> RenderableType:
    """Return the screen, the most important lines first."""
    parts: list[RenderableType] = [_draw_summary(history), *_plot_loss(history.trend)]

    lost = f", {history.lost_steps:,} steps lost" if history.lost_steps else ""
    parts.append(_title(f"goodput {history.goodput:.1%} of {format_duration(history.wall_seconds)}{lost}"))
    table = _table("left", "right", "right", "left")
    for category, seconds in history.seconds.items():
        if seconds >= _MIN_SHOWN_SECONDS or category in (TimeCategory.STEPS, TimeCategory.UNATTRIBUTED):
            # A run that has just been claimed has a wall time of 0.
            share = seconds / (history.wall_seconds or 1.0)
            bar = Text(_bar(share), "green" if category is TimeCategory.STEPS else "yellow")
            table.add_row(category.value.replace("_", " "), format_duration(seconds), f"{share:.1%}", bar)
    parts.append(table)
    if (cost := compute_cost(history)) is not None:
        parts.append(Text(format_cost(cost)))

    parts.append(_title(_count("attempt", len(history.attempts), _MAX_ATTEMPTS)))
    table = _table("right", "left", "right", "right", "right", "left")
    for attempt in history.attempts[-_MAX_ATTEMPTS:]:
        steps = "no step"
        if attempt.resumed_step is not None:
            steps = f"{attempt.resumed_step:,} to {attempt.reached_step or 0:,}"
        lost = f"{attempt.lost_steps:,} lost" if attempt.lost_steps else ""
        end = Text(attempt.state.value, _STATE_COLOURS.get(attempt.state, "red"))
        end.append_text(Text(f": {attempt.reason}" if attempt.reason else "", "default"))
        duration = format_duration(attempt.ended - attempt.began)
        table.add_row(str(attempt.number), _format_time(attempt.began), duration, steps, lost, end)
    parts.append(table)
    if restarts := list_restarts(history.attempts):
        times = [
            f"{category.value.replace('_', ' ')} {format_duration(seconds)}"
            for category, seconds in restarts[-1][1].items()
            if seconds >= _MIN_SHOWN_SECONDS
        ]
        totals = [sum(seconds.values()) for _, seconds in restarts]
        median = f", median of {len(totals)} {format_duration(statistics.median(totals))}" if len(totals) > 1 else ""
        restored_from = restarts[-1][0].restored_from
        source = f"; restored from the {restored_from}" if restored_from else ""
        parts.append(
            Text(f"last restart {format_duration(totals[-1])} to its first step{median}: {', '.join(times)}{source}")
        )

    parts.append(_title(_count("checkpoint", len(history.checkpoints), _MAX_CHECKPOINTS)))
    table = _table("right", "right", "left", "left")
    for checkpoint in history.checkpoints[-_MAX_CHECKPOINTS:]:
        size = "" if checkpoint.num_bytes is None else f"{format_si(checkpoint.num_bytes)}B"
        age = "" if checkpoint.time is None else f"{format_duration(history.now - checkpoint.time)} ago"
        trust = Text(checkpoint.trust.value, _VERIFICATION_COLOURS.get(checkpoint.trust, "red"))
        # Uncommitted parts have a reason too, but a save in progress is nothing to worry about.
        if checkpoint.problem is not None and checkpoint.trust is Verification.DAMAGED:
            trust.append_text(Text(f": {to_single_line(checkpoint.problem)}", "default"))
        table.add_row(to_single_line(checkpoint.name), size, age, trust)
    parts.append(table)

    newest = history.attempts[-1]
    if newest.hosts:
        names = ", ".join(dict.fromkeys(newest.hosts[:_MAX_HOSTS])) + (" ..." if len(newest.hosts) > _MAX_HOSTS else "")
        devices = "" if newest.num_devices is None else f", {newest.num_devices:,} {newest.device_kind or ''} devices"
        parts.append(Text(f"\n{len(newest.hosts)} process{'es' * (len(newest.hosts) != 1)} on {names}{devices}"))
    if history.straggling is not None:
        late = ", ".join(f"{process} by {seconds:.2f} s" for process, seconds in history.straggling.late.items())
        parts.append(Text(f"straggling at step {history.straggling.step:,}: {late}", "yellow"))

    if history.warnings or history.unread:
        parts.append(_title("notices"))
    for notice in history.warnings[-_MAX_NOTICES:]:
        line = f"{_format_time(notice.time)}  attempt {notice.attempt}  {notice.event}: {notice.text}"
        parts.append(Text(line, "yellow"))
    parts += [Text(f"cannot read {line}", "yellow") for line in history.unread[:_MAX_NOTICES]]
    return _PrintableText(Group(*parts))


def _draw_summary(history: History) -> Text:
    """Return name, state, progress, quality and pace."""
    summary = Text().append_text(Text(f"{history.name or '?'}  ", "bold"))
    summary.append_text(Text(history.state.value, _STATE_COLOURS.get(history.state, "red")))
    # For a run that makes no progress, show the time since it stopped.
    if history.state not in (RunState.RUNNING, RunState.DONE):
        age = format_duration(history.now - history.since)
        summary.append(f" since {_format_time(history.since)}, {age} ago")
    summary.append(f"  {to_single_line(history.url)}\n")
    if (fork := history.fork) is not None:
        lines = format_changes(fork)
        changes = f", with {_join_changes(lines)}" if lines else ", without changes"
        summary.append(f"forked from {fork.run} at step {fork.step:,}{changes}\n")
    if steps := history.program_changes:
        shown = ", ".join(f"{step:,}" for step in steps[-_MAX_CHANGES:])
        summary.append_text(Text(f"the code of the train step has changed after step {shown}\n", "yellow"))
    if history.reason and history.state is not RunState.RUNNING:
        summary.append_text(Text(f"{history.reason}\n", "red"))

    speed = history.speed
    progress = [f"step {history.step:,}"]
    if history.total_steps:
        share = history.step / history.total_steps
        progress = [f"step {history.step:,} of {history.total_steps:,}", f"{_bar(share)} {share:.1%}"]
        if speed.left_seconds is not None and history.state is not RunState.DONE:
            progress.append(f"{format_duration(speed.left_seconds)} left")

    plan = []
    number, stages = history.find_stage(history.step), history.stages
    if stages:
        plan = [f"before the first of {_count('stage', len(stages), len(stages))}"]
    if number:
        plan = [f"stage {number} of {len(stages)} since step {_describe_stage(stages[number - 1])}"]
    if number < len(stages) and history.state is not RunState.DONE:
        after = stages[number].from_step - history.step
        ahead = f", in {after:,} steps"
        if speed.step_seconds is not None and speed.left_seconds is not None:
            ahead += f" and {format_duration(after * speed.step_seconds)}"
        plan.append(f"next: stage {number + 1} from step {_describe_stage(stages[number], ahead)}")

    quality = []
    unit, per_second, per_second_per_device = speed.rate
    if (consumed := get_float(history.row, f"train/{unit}")) is not None:
        quality.append(f"{format_si(consumed)} {unit}")
    if (loss := get_float(history.row, "train/loss")) is not None:
        quality.append(f"loss {loss:.4f}")
    for key, name in POLICY_COUNTS.items():
        if count := get_float(history.row, key):
            quality.append(f"{count:,.0f} {name}")
    if history.validation:
        quality.append(f"validation loss {history.validation[-1][1]:.4f}")
    if history.best_validation is not None:
        step, loss = history.best_validation
        quality.append(f"best {loss:.4f} at step {step:,}")
    own = format_metrics(list_own_metrics(dict(history.figures)))

    pace = []
    if speed.step_seconds is not None:
        pace.append(f"{speed.step_seconds:.3g} s per step")
    if per_second is not None:
        pace.append(f"{format_si(per_second)} {unit}/s")
    if per_second_per_device is not None:
        pace.append(f"{format_si(per_second_per_device)} {unit}/s per device")
    if speed.mfu is not None:
        pace.append(f"MFU {speed.mfu:.1%}")
    lines = ["  ".join(progress), *plan, *("  ".join(words) for words in (quality, own, pace) if words)]
    summary.append("\n".join(lines))
    return summary


def _describe_stage(stage: StageRecord, ahead: str = "") -> str:
    """Return first step, changes and reason of a stage; `ahead` is inserted after the step."""
    changes = f": {_join_changes(stage.changes)}" if stage.changes else ""
    return f"{stage.from_step:,}{ahead}{changes}" + (f" ({stage.why})" if stage.why else "")


def _join_changes(lines: Sequence[str]) -> str:
    return "; ".join([*lines[:_MAX_CHANGES], *(["..."] if len(lines) > _MAX_CHANGES else [])])


def _plot_loss(rows: Sequence[JsonObject]) -> list[RenderableType]:
    """Return a plot of the training loss by step; the highest 5% of the losses are drawn at its top."""
    points = [(row["step"], loss) for row in rows if (loss := get_float(row, "train/loss")) is not None]
    if len(points) < 2 or points[0][0] == points[-1][0]:
        return []
    # One spike, as at the first steps, must not flatten the rest of the curve.
    losses = sorted(loss for _, loss in points)
    low, high = losses[0], losses[math.ceil(0.95 * (len(losses) - 1))]
    first, last = points[0][0], points[-1][0]
    cells = [[0] * _PLOT_COLUMNS for _ in range(_PLOT_ROWS)]  # of 2 x 4 dots each
    for step, loss in points:
        x = round((step - first) / (last - first) * (2 * _PLOT_COLUMNS - 1))
        # A constant loss is drawn in the middle instead of dividing by zero.
        share = 0.5 if high <= low else (min(loss, high) - low) / (high - low)
        y = round((1 - share) * (4 * _PLOT_ROWS - 1))
        cells[y // 4][x // 2] |= _BRAILLE[y % 4][x % 2]
    labels = {0: f"{high:.4g}", _PLOT_ROWS - 1: f"{low:.4g}"}
    drawn = ("".join(chr(0x2800 + cell) if cell else " " for cell in line) for line in cells)
    lines = [f"{labels.get(y, ''):>9} {line}".rstrip() for y, line in enumerate(drawn)]
    ends = f"{f'step {first:,}':<{_PLOT_COLUMNS // 2}}{f'{last:,}':>{_PLOT_COLUMNS // 2}}"
    return [Text("\n".join(["", "     loss", *lines, f"{'':>9} {ends}"]))]


def format_si(value: float) -> str:
    """Return a number with three digits and the prefix of its unit: `950`, `12.3 k`, `4.56 M`."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def _format_time(seconds: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        return "?"


def _bar(share: float) -> str:
    # Unicode has blocks of one to eight eighths of a column: U+258F to U+2588.
    eighths = round(min(max(share, 0.0), 1.0) * _BAR_COLUMNS * 8)
    return "█" * (eighths // 8) + ("" if eighths % 8 == 0 else chr(0x2590 - eighths % 8))


def _title(words: str) -> Text:
    return Text(f"\n{words}", "bold")


def _count(noun: str, count: int, limit: int) -> str:
    """Return `12 attempts, newest 8 shown`."""
    if count == 0:
        return f"no {noun}"
    return f"{count:,} {noun}{'s' * (count != 1)}" + (f", newest {limit} shown" if count > limit else "")


def _table(*columns: Literal["left", "right"]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    for index, justify in enumerate(columns):
        table.add_column(justify=justify, no_wrap=index + 1 < len(columns))
    return table
