"""HTML pages of the dashboard, and the report: one self-contained page about one or several runs as they are now.

No name, spec or log of a run can break out of a page. Everything that comes from a run's directory goes into one block
of JSON, in which `<`, `>`, `&` and all characters that are not ASCII are escaped. `page.js` puts it on the page as
text, never as markup. The Content-Security-Policy of a self-contained page allows only the scripts whose digests it
names, and forbids every request.
"""

import base64
import functools
import hashlib
import html
import json
import os
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from runner.attempts.layout import OWNER
from runner.dashboard.reader import RunReader, confine, find_runs, read_ancestors
from runner.dashboard.sweep import build_sweep_curves, build_sweep_view, count_bins, read_law
from runner.dashboard.view import build_view, truncate
from runner.errors import InvalidError
from runner.history.ledger import to_single_line
from runner.history.records import ForkRecord, History
from runner.history.sweep import SWEEP, Sweep, SweepReader, read_sweep_or_problem
from runner.metrics.media import CONTENT_TYPES, read_media
from runner.storage import JsonObject, Store, make_store

_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})
_MEDIA_BYTES_MAX = 1 << 23  # of the images and audio in a report
_MEDIA_FILES_MAX = 64  # that are read for a report; in a bucket each takes two requests
_MEDIA_STEPS_MAX = 8  # of a key in a report, the newest
_DAMAGED_RUNS_MAX = 20  # of a sweep whose record cannot be read
POINTS_MAX = 60_000  # of all curves together; a point takes about 40 bytes


def read_static(name: str) -> str:
    """Return the text of a file in `static/`."""
    return (resources.files("runner.dashboard") / "static" / name).read_text(encoding="utf-8")


@functools.cache
def read_plotly() -> str:
    """Return plotly.js, the JavaScript library that draws, as a whole."""
    return str(get_plotlyjs())


def encode_json(value: Any) -> str:
    """Return JSON for a script element: ASCII, without characters that could end it, and without NaN or infinity."""
    # Not even `</script>` in a text can end the element, since `<` is escaped.
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def _read_report_scripts() -> tuple[str, ...]:
    """Return the scripts of a self-contained page. None of them contains the end of its own element."""
    return tuple(
        script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
        for script in (read_plotly(), read_static("page.js"))
    )


def make_report_policy() -> str:
    """Return the Content-Security-Policy of a self-contained page, which names its scripts by digest."""
    digests = [hashlib.sha256(script.encode()).digest() for script in _read_report_scripts()]
    sources = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; media-src data:"


def render_report_page(title: str, data: Any) -> str:
    """Return one self-contained page with these data, to be kept as a file."""
    inline = "\n".join(f"<script>{script}</script>" for script in _read_report_scripts())
    policy = make_report_policy()
    return _render_page(
        title,
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{read_static("page.css")}</style>',
        f'<script type="application/json" id="data">{encode_json(data)}</script>\n{inline}',
    )


def render_live_page(title: str, top: str, source: str) -> str:
    """Return a page of the server that polls its data. `top` and `source` are relative addresses."""
    return _render_page(
        title,
        f'<link rel="stylesheet" href="{top}static/page.css">',
        f'<script type="application/json" id="data">{encode_json({"source": source, "top": top})}</script>\n'
        f'<script src="{top}static/plotly.js"></script>\n<script src="{top}static/page.js"></script>',
    )


def _render_page(title: str, head: str, body: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
{head}
<title>{html.escape(title)}</title>
</head>
<body>
<main id="page"><noscript>This page is drawn by its own script. Allow scripts to see it.</noscript></main>
{body}
</body>
</html>
"""


def make_run_names(urls: Sequence[str]) -> list[str]:
    """Return a short unique name for each run: as many last parts of its path as all runs need to differ."""
    parts = [url.rstrip("/").split("/") for url in urls]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(urls, start=1)]


def list_parent_places(fork: ForkRecord, url: str) -> list[Store]:
    """Return the directories in which the parent of the fork at `url` may be: the recorded one, or one beside the fork.

    Only directories on this disk or in the bucket of the fork are returned, so that a record in a run's directory
    cannot make this machine access other hosts or buckets.
    """
    beside = f"{url.rpartition('/')[0]}/{fork.run.rpartition('/')[2]}"
    places = []
    for place in dict.fromkeys((fork.run, beside)):
        if place.split("/")[:3] == url.split("/")[:3] or not ("://" in place or "://" in url):
            try:
                places.append(make_store(place))
            except InvalidError:
                continue
    return places


def render_report(stores: Sequence[Store]) -> str:
    """Return the page about the runs in these directories, or about the sweep whose root is the only one.

    Raises OSError, or InvalidError where there is no run.
    """
    notes: list[str] = []
    roots = [store for store in stores if store.exists(SWEEP) and not store.exists(OWNER)]
    if roots and len(stores) > 1:
        raise InvalidError(f"{roots[0].url}: is the root of a sweep; make its page alone, or give some of its runs")
    for root in roots:
        sweep = read_sweep_or_problem(confine(root))
        if isinstance(sweep, Sweep):
            return _render_sweep(confine(root), sweep)
        stores = [run.store for run in find_runs(root).runs[:_DAMAGED_RUNS_MAX]]
        notes = [f"{sweep or root.url}; the first {len(stores)} runs are compared without it"]
        if not stores:
            raise InvalidError(sweep or f"{root.url}: no run is here")
    names = make_run_names([store.url for store in stores])
    snapshots = [RunReader(store, name).read() for store, name in zip(stores, names, strict=True)]
    title = names[0] if len(names) == 1 else f"{len(names)} runs" + (f": {', '.join(names)}" if len(names) < 4 else "")

    def make_reader(store: Store) -> RunReader:
        return RunReader(store, make_run_names([store.url])[0])

    ancestors = read_ancestors(snapshots, list_parent_places, make_reader)
    view = build_view(title, snapshots, POINTS_MAX, ancestors)
    for run, each in zip(view["runs"], stores, strict=True):
        run["address"] = confine(each)
    embed_media(view, read_media)
    return render_report_page(title, view | {"made": time.time(), "notes": notes})


def _render_sweep(root: Store, sweep: Sweep) -> str:
    curves: dict[str, JsonObject] = {}
    bins_max = count_bins(len(sweep.runs), POINTS_MAX)

    def look(name: str, history: History) -> None:
        curves[name] = build_sweep_curves(sweep.metric, history, bins_max)

    status = SweepReader(root).read(sweep, look)
    title = truncate(to_single_line(sweep.name))
    return render_report_page(
        title, build_sweep_view(title, status, curves) | {"law": read_law(root, sweep), "made": time.time()}
    )


def embed_media(view: JsonObject, read: Callable[[Any, str], bytes | None]) -> None:
    """Replace the names of the newest images and audio by their content, as data URLs, and drop the others.

    `read` returns a file by the `address` of its run, which the page then lacks, and by its name.
    """
    runs, left_bytes, left_files = view.get("runs", []), _MEDIA_BYTES_MAX, _MEDIA_FILES_MAX
    addresses = [run.pop("address", None) for run in runs]
    # The newest of every key comes before the second newest of any.
    for index in range(_MEDIA_STEPS_MAX):
        for run, address in zip(runs, addresses, strict=True):
            items = [media["items"][index] for media in run["media"] if index < len(media["items"])]
            for item in items[:left_files]:
                left_files -= 1
                try:
                    content = read(address, item[1])
                except OSError:
                    continue
                if content is not None and len(content) <= left_bytes:
                    left_bytes -= len(content)
                    kind = CONTENT_TYPES[Path(item[1]).suffix]
                    item[1] = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    for run in runs:
        for media in run["media"]:
            media["items"] = [item for item in media["items"] if item[1].startswith("data:")]
        run["media"] = [media for media in run["media"] if media["items"]]


def write_report(stores: Sequence[Store], path: Path) -> int:
    """Write the page to a file, whole or not at all, and return its size in bytes. Raises as `render_report`."""
    # The name of a directory may contain bytes that are not text.
    content = render_report(stores).encode(errors="replace")
    # A reader of the file sees the old page or the new one, never a part.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return len(content)
