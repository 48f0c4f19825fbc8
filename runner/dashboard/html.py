"""HTML pages that no name, spec or log of a run can break out of.

Everything that comes from a run's directory goes into one block of JSON, in which `<`, `>`, `&` and all characters that
are not ASCII are escaped. `page.js` puts it on the page as text, never as markup. The Content-Security-Policy of a
self-contained page allows only the scripts whose digests it names, and forbids every request.
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
    """Return the text of a file in `static/`."""
    return (resources.files("runner.dashboard") / "static" / name).read_text(encoding="utf-8")


@functools.cache
def read_plotly() -> str:
    """Return plotly.js, the JavaScript library that draws, as a whole."""
    return str(get_plotlyjs())


def encode_json(value: Any) -> str:
    """Return JSON that may stand inside a script element.

    It is ASCII without characters that could end the element, and has no NaN or infinity.
    """
    # Not even `</script>` in a text can end the element, since `<` is escaped.
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def render_report_page(title: str, data: Any) -> str:
    """Return one self-contained page with these data, to be kept as a file."""
    # A script may not contain the end of its own element.
    scripts = [
        script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
        for script in (read_plotly(), read_static("page.js"))
    ]
    # The policy names the scripts by digest, so nothing else on the page can run.
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:"
    inline = "\n".join(f"<script>{script}</script>" for script in scripts)
    return _render_page(
        title,
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{read_static("page.css")}</style>',
        f'<script type="application/json" id="data">{encode_json(data)}</script>\n{inline}',
    )


def render_live_page(title: str, top: str, source: str) -> str:
    """Return a page of the server that polls its data.

    Args:
        title: title of the page.
        top: relative address of the first page.
        source: relative address of the data.
    """
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
