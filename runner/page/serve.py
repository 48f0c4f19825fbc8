"""The dashboard as a server: waitress answers in some threads, and this one reads. Ends on Ctrl-C or SIGTERM."""

import logging
import os
import signal
import threading
from types import FrameType

import waitress

from runner.errors import InvalidError
from runner.page.access import access_for, address_in, is_loopback
from runner.page.app import Dashboard
from runner.page.source import Source
from runner.page.watcher import Watcher
from runner.storage import Store
from runner.terminal import say

_NUM_THREADS = 16
_CONNECTIONS_MAX = 500
_REQUEST_BYTES_MAX = 1 << 14
_NICENESS = 10  # whatever trains on this machine comes first


def serve(root: Store, host: str, port: int, token: str | None) -> None:
    """Serve all runs below `root` until asked to stop. Main thread only.

    Raises `InvalidError` if the address or the token is none.
    """
    watcher = Watcher(Source(root).read)
    access = access_for(host, token)
    try:
        server = waitress.create_server(
            Dashboard(access, watcher.data),
            host=host,
            port=port,
            threads=_NUM_THREADS,
            connection_limit=_CONNECTIONS_MAX,
            max_request_header_size=_REQUEST_BYTES_MAX,
            max_request_body_size=_REQUEST_BYTES_MAX,
            ident=None,
        )
    except (OSError, ValueError) as error:
        raise InvalidError(f"--host {host} --port {port}: cannot be served: {error}") from error
    os.nice(_NICENESS)
    _end_on_signals()
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # that many clients wait is no news
    threading.Thread(target=server.run, name="server", daemon=True).start()
    shown = f"[{host}]" if address_in(host) is not None and ":" in host else host
    say(
        f"dashboard of {root.url}: http://{shown}:{server.effective_port}/"
        + (f"?token={access.token}" if access.token else "")
    )
    if not is_loopback(host):
        say("others can reach it; who has the token sees all runs, and what passes is not encrypted")
    try:
        watcher.serve()
    except KeyboardInterrupt:
        say("dashboard: stopped")


def _end_on_signals() -> None:
    """A signal ends the server, where it would ask a job to stop at its next step."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
