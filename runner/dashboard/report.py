"""One self-contained page about one or several runs, as they are now."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from runner.dashboard.html import render_report_page
from runner.dashboard.reader import RunReader
from runner.dashboard.view import build_view
from runner.storage import Store

POINTS_MAX = 60_000  # of all curves together; a point takes about 40 bytes


def make_run_names(urls: Sequence[str]) -> list[str]:
    """Return a short unique name for each run: as many last parts of its path as all runs need to differ."""
    parts = [url.rstrip("/").split("/") for url in urls]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(urls, start=1)]


def render_report(stores: Sequence[Store]) -> str:
    """Return the page about the runs in these directories. Runs are read one after the other.

    Raises:
        OSError: a store does not respond.
        InvalidError: there is no run in a directory.
    """
    names = make_run_names([store.url for store in stores])
    snapshots = [RunReader(store, name).read() for store, name in zip(stores, names, strict=True)]
    title = names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"
    data = build_view(title, snapshots, POINTS_MAX) | {"made": time.time()}
    return render_report_page(title, data)


def write_report(stores: Sequence[Store], path: Path) -> int:
    """Write the page to a file, whole or not at all, and return its size in bytes.

    Raises:
        OSError: a store does not respond, or the file cannot be written.
    """
    content = render_report(stores).encode()
    # A reader of the file sees the old page or the new one, never a part.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return len(content)
