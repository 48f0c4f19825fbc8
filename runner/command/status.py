"""`python -m runner status`: where a run stands and where its time went. Claims nothing, writes nothing."""

import json
import signal
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live

from runner.command.arguments import Parser, directory_of
from runner.command.looking import looking
from runner.command.screen import draw
from runner.errors import EXIT_DONE
from runner.history.read import HistoryReader
from runner.history.record import History, State, as_json
from runner.process import STOP_SIGNALS
from runner.storage import Store, open_store

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
        print(json.dumps(as_json(history)), flush=True)
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
        while history.state is not State.DONE:
            time.sleep(WATCH_SECONDS)
            history = reader.read()
            _show(history, is_json, console)
        return
    with Live(draw(history), console=console, auto_refresh=False, screen=True) as live:
        while history.state is not State.DONE:
            time.sleep(WATCH_SECONDS)
            history = reader.read()
            live.update(draw(history), refresh=True)
    console.print(draw(history))
