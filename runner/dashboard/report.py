"""One self-contained page about one run or several, as they stand now."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from runner.dashboard.html import render_report_page
from runner.dashboard.reader import RunReader
from runner.dashboard.view import build_view
from runner.storage import Store

POINTS_MAX = 60_000  # of all curves, some 40 bytes each


def make_run_names(urls: Sequence[str]) -> list[str]:
    """A name for each run, as short as can be: the last parts of its path that no other has."""
    parts = [url.rstrip("/").split("/") for url in urls]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(urls, start=1)]


def render_report(stores: Sequence[Store]) -> str:
    """The page. Reads one run after the other, and holds no more of each than is drawn.

    Raises `OSError` if a store does not answer, `InvalidError` where no run is.
    """
    names = make_run_names([store.url for store in stores])
    seen = [RunReader(store, name).read() for store, name in zip(stores, names, strict=True)]
    title = names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"
    data = build_view(title, seen, POINTS_MAX) | {"made": time.time()}
    return render_report_page(title, data)


def write_report(stores: Sequence[Store], path: Path) -> int:
    """Put the page into a file, whole or not at all; its size in bytes. Raises `OSError`."""
    content = render_report(stores).encode()
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(content)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return len(content)
