"""Page with pictures of an inspected step: a heat map of each kind of array by layer, and a histogram of each array.

The page is one file without scripts. All names in it come from a run, and are escaped.
"""

import html
import math
from collections.abc import Iterator, Sequence

from runner.retrace.leaves import HISTOGRAM_EDGES, LeafFigures, StepInspection

_TEXT_LAYERS_MAX = 16  # with more layers the cells of a heat map hold no numbers
_BAR_WIDTH, _BAR_HEIGHT = 4, 28
_STYLE = """
:root { color-scheme: light dark; --text: #1b1d1f; --quiet: #5a6068; --panel: #f5f7f8; --heat: 0 90 181; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8eaed; --quiet: #a0a6ad; --panel: #202427; --heat: 88 166 255; }
}
body { font: 14px/1.4 system-ui, sans-serif; color: var(--text); margin: 1.5rem; }
section { background: var(--panel); border-radius: 8px; padding: 0.7rem 1rem 1rem; margin: 1rem 0; overflow-x: auto; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0 0 0.3rem; }
p { color: var(--quiet); margin: 0 0 0.6rem; }
table { border-collapse: separate; border-spacing: 2px; }
th { font-weight: normal; text-align: left; white-space: nowrap; padding-right: 0.8rem; }
thead th { color: var(--quiet); text-align: center; padding: 0; }
td { min-width: 1.1rem; height: 1.5rem; text-align: center; padding: 0 0.3rem; border-radius: 3px; }
td.heat { background: rgb(var(--heat) / calc(0.06 + 0.6 * var(--share))); }
td.bad { background: #b3261e; color: #fff; }
svg { display: block; fill: rgb(var(--heat)); }
"""


def render_inspection(title: str, found: StepInspection) -> str:
    """Return the page as HTML."""
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>",
    ]
    for kind in ("parameters", "gradients", "updates"):
        rows = []
        for leaf in found.leaves:
            layers = [getattr(layer, kind) for layer in leaf.layers]
            rows.append((leaf.name, layers or [getattr(leaf, kind)], bool(layers), f"{kind}.{leaf.name}"))
        parts += _draw_section(kind.capitalize(), rows, found)
    modules = [(each.name, each.figures, each.has_layers, f"activations.{each.name}") for each in found.activations]
    parts += _draw_section("Activations", modules, found)
    lines = [*(each.format() for each in found.observed), *found.format_left_out()]
    parts += [f"<p>{html.escape(line)}</p>" for line in lines]
    return "".join([*parts, "</body></html>\n"])


def _draw_section(
    title: str, rows: Sequence[tuple[str, Sequence[LeafFigures], bool, str]], found: StepInspection
) -> Iterator[str]:
    """Yield a table: name, a cell for each layer, and the histogram of each array."""
    logs = [_take_log(each.rms) for _, figures, _, _ in rows for each in figures]
    known = [value for value in logs if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    num_layers = max((len(figures) for _, figures, _, _ in rows), default=0)
    edges = [f"10<sup>{math.log10(edge):.0f}</sup>" for edge in (HISTOGRAM_EDGES[0], HISTOGRAM_EDGES[-1])]
    yield f"<section><h2>{title}</h2><p>Root mean square, from 10<sup>{low:.1f}</sup> (pale) to "
    yield f"10<sup>{high:.1f}</sup>; histograms of absolute values from {' to '.join(edges)}, two bars a decade.</p>"
    yield "<table><thead><tr><th></th>"
    yield "".join(f"<th>{layer}</th>" for layer in range(num_layers))
    yield "<th>histogram</th></tr></thead><tbody>"
    for name, figures, has_layers, key in rows:
        yield f"<tr><th>{html.escape(name)}</th>"
        for layer, each in enumerate(figures):
            log = _take_log(each.rms)
            share = 0.0 if log is None or high == low else (log - low) / (high - low)
            place = f"layer {layer}: " if has_layers else ""
            bad = f", {each.num_not_finite} not finite" if each.num_not_finite else ""
            words = f"{place}rms {each.rms:.4g}, largest {each.largest:.4g}, {each.zeros:.1%} zeros{bad}"
            text = f"{each.rms:.1e}" if num_layers <= _TEXT_LAYERS_MAX else ""
            kind = "bad" if each.num_not_finite else "heat"
            span = "" if has_layers else f" colspan={num_layers}"
            yield f'<td class={kind} style="--share: {share:.3f}" title="{words}"{span}>{text}</td>'
        yield "<td></td>" * (num_layers - len(figures) if has_layers else 0)
        yield f"<td>{_draw_histogram(found.histograms.get(key, ()))}</td></tr>"
    yield "</tbody></table></section>"


def _take_log(value: float) -> float | None:
    return math.log10(value) if value > 0 and math.isfinite(value) else None


def _draw_histogram(counts: Sequence[int]) -> str:
    most = max(counts, default=0)
    if not most:
        return ""
    bars = "".join(
        f"<rect x={index * _BAR_WIDTH} y={_BAR_HEIGHT * (1 - count / most):.1f} width={_BAR_WIDTH - 1} "
        f"height={_BAR_HEIGHT * count / most:.1f} />"
        for index, count in enumerate(counts)
        if count
    )
    size = f"width={len(counts) * _BAR_WIDTH} height={_BAR_HEIGHT}"
    return f"<svg {size} role=img aria-label='histogram of {sum(counts)} values'>{bars}</svg>"
