"""HTML that holds everything and fetches nothing, and that a run's name, spec or log cannot break out of.

What comes from a run's directory goes into one block of JSON, in which `<`, `>`, `&` and all that is not ASCII are
escapes; `page.js` puts it on the page as text, never as markup. The Content-Security-Policy lets only the scripts run
whose digests it names, and forbids every request.
"""

import base64
import functools
import hashlib
import html
import json
from importlib import resources
from typing import Any

from plotly.offline import get_plotlyjs

_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def read_static(name: str) -> str:
    """The text of a file that lies beside this module."""
    return (resources.files("runner.dashboard") / "static" / name).read_text(encoding="utf-8")


@functools.cache
def read_plotly() -> str:
    """The JavaScript that draws: plotly.js, whole."""
    return str(get_plotlyjs())


def encode_json(value: Any) -> str:
    """JSON that may stand inside a script element: ASCII, without a character that ends it. No NaN, no infinity."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def render_report_page(title: str, data: Any) -> str:
    """One page with these data, to be kept as a file."""
    scripts = [_inline(read_plotly()), _inline(read_static("page.js"))]
    sources = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:"
    inline = "\n".join(f"<script>{script}</script>" for script in scripts)
    return _page(
        title,
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{read_static("page.css")}</style>',
        f'<script type="application/json" id="data">{encode_json(data)}</script>\n{inline}',
    )


def render_live_page(title: str, top: str, source: str) -> str:
    """A page of the server that asks for its data again and again, at `source`; `top` leads to the first page."""
    return _page(
        title,
        f'<link rel="stylesheet" href="{top}static/page.css">',
        f'<script type="application/json" id="data">{encode_json({"source": source, "top": top})}</script>\n'
        f'<script src="{top}static/plotly.js"></script>\n<script src="{top}static/page.js"></script>',
    )


def _page(title: str, head: str, body: str) -> str:
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
<main id="page"><noscript>This page is drawn by the script that it holds; allow scripts to see it.</noscript></main>
{body}
</body>
</html>
"""


def _inline(script: str) -> str:
    """A script as it may stand inside its element."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
