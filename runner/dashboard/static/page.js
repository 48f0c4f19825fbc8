// Draws one page from the JSON in #data: runs side by side, or the table of all runs. Nothing that comes from a run
// becomes markup: text goes through textContent, and text that Plotly would parse as its subset of HTML through `plain`.
"use strict";

(() => {
  const first = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  // Colours of Okabe and Ito, which colour-blind people can tell apart: without the pale ones on white, without blue on black.
  const ON_WHITE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
  const ON_BLACK = ["#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00"];
  const isDark = window.matchMedia("(prefers-color-scheme: dark)");
  const colours = () => (isDark.matches ? ON_BLACK : ON_WHITE);
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const SYMBOLS = ["circle", "diamond", "square", "triangle-up", "cross", "star"];
  const GREY = "#8a8a8a";
  const DIMMED = 0.35;
  const FORKS_MAX = 6;
  const POLL_MILLISECONDS = 2000;
  const state = { open: new Set(["charts", "media"]), data: null, axisSize: 1, heights: new Map(), shownSteps: new Map() };

  // The view: what is drawn, and how. It is kept in the part of the address after `#`, so that a link shows the same.

  const CHOICES = { axis: ["step", "tokens", "time"], scale: ["auto", "linear", "log"], smoothing: [0.012, 0, 0.004, 0.04] }; // the first is initial
  const SETS = ["hidden", "toggled", "chosen", "columns", "marked"]; // runs, entries of legends, ticked runs, columns that are toggled, runs of a sweep

  function readView() {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const [name, choices] of Object.entries(CHOICES)) state[name] = choices.find((choice) => String(choice) === given.get(name)) ?? choices[0];
    for (const name of SETS) state[name] = new Set(given.getAll(name));
    const zoom = (given.get("zoom") || "").split(",").map(Number);
    state.zoom = zoom.length === 2 && zoom.every(Number.isFinite) && zoom[0] < zoom[1] ? zoom : null;
    state.filter = given.get("filter") || "";
    state.colour = given.get("colour") || "";
    state.sort = { key: given.get("sort"), isDescending: given.get("order") === "descending" };
  }

  function writeView() {
    const shown = new URLSearchParams();
    for (const [name, choices] of Object.entries(CHOICES)) if (state[name] !== choices[0]) shown.set(name, state[name]);
    if (state.zoom) shown.set("zoom", state.zoom.map((value) => Number(value.toPrecision(8))).join(","));
    for (const name of SETS) for (const value of state[name]) shown.append(name, value);
    if (state.filter) shown.set("filter", state.filter);
    if (state.colour) shown.set("colour", state.colour);
    if (state.sort.key) shown.set("sort", state.sort.key);
    if (state.sort.isDescending) shown.set("order", "descending");
    const hash = shown.toString();
    try {
      if (hash !== location.hash.slice(1)) history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
    } catch { /* a page without an address of its own, as in the preview of a mail */ }
  }

  const toggle = (name, value) => { if (!state[name].delete(value)) state[name].add(value); draw(); };
  const plots = new Map(); // id -> element, which is kept when the page is redrawn, so that its zoom is kept

  // Text and elements.

  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  function table(heads, rows, kind) {
    if (!rows.length) return element("p", { class: "note" }, "None.");
    const cells = (tag, row) => row.map((cell) => element(tag, {}, cell instanceof Node ? cell : String(cell ?? "")));
    const body = rows.map((row) => element("tr", {}, ...cells("td", row)));
    const head = heads ? element("thead", {}, element("tr", {}, ...cells("th", heads))) : null;
    return element("div", { class: "scroll" }, element("table", { class: kind }, head, element("tbody", {}, ...body)));
  }

  function section(id, title, ...children) {
    const made = element("details", { id, open: state.open.has(id) ? "" : null }, element("summary", {}, title), ...children);
    made.addEventListener("toggle", () => {
      state.open[made.open ? "add" : "delete"](id);
      if (made.open) for (const plot of made.querySelectorAll(".plot")) Plotly.Plots.resize(plot);
    });
    return made;
  }

  // Returns a duration like `format_duration` in console.py, with one more digit below 10 s.
  function duration(seconds) {
    if (!Number.isFinite(seconds)) return "";
    if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
    const forms = [[6000, "min", 60, "s", 1], [72 * 3600, "h", 3600, "min", 60], [Infinity, "d", 86400, "h", 3600]];
    const [, large, size, small, part] = forms.find(([limit]) => seconds < limit);
    return `${count(Math.floor(seconds / size))} ${large} ${Math.floor((seconds % size) / part)} ${small}`;
  }

  // Returns a number with three digits and a unit: 950, 12.3 k, 4.56 M.
  function amount(value) {
    const units = [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]];
    for (const [name, size] of units) if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))} ${name}`;
    return String(Number(value.toPrecision(3)));
  }

  const bytes = (number) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let index = 0;
    for (; number >= 1024 && index < units.length - 1; index++) number /= 1024;
    return `${number.toFixed(index && number < 100 ? 1 : 0)} ${units[index]}`;
  };
  // What a run has recorded as a time need not be one.
  const clock = (seconds) => (seconds > 0 && seconds < 253402300800 ? new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19) + "Z" : "");
  const count6 = (number) => Number(Number(number).toPrecision(6)).toLocaleString("en-US", { maximumSignificantDigits: 6 });
  const count = (number) => (number === null || number === undefined ? "" : Number(number).toLocaleString("en-US"));

  // Charts.

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function timeUnit(seconds) {
    if (seconds > 3 * 86400) return ["days", 86400];
    if (seconds > 3 * 3600) return ["hours", 3600];
    return seconds > 300 ? ["minutes", 60] : ["seconds", 1];
  }

  function layout(x, more) {
    const axis = { gridcolor: style("--grid"), zerolinecolor: style("--grid"), linecolor: style("--grid"), automargin: true, fixedrange: isTouch };
    return Object.assign(
      {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", uirevision: "stays",
        font: { color: style("--text"), family: style("--font"), size: 12 }, modebar: { bgcolor: "rgba(0,0,0,0)", color: style("--quiet"), activecolor: style("--link") },
        margin: { l: 12, r: 14, t: 26, b: 12 }, hovermode: "closest", hoverdistance: 30, showlegend: false, height: 260, autosize: true,
        hoverlabel: { bgcolor: style("--panel"), font: { color: style("--text") }, namelength: 40 },
        xaxis: { ...axis, title: { text: plain(x), standoff: 6 }, nticks: isNarrow() ? 6 : 9 }, yaxis: { ...axis, nticks: 6 },
      },
      more,
    );
  }

  const isTouch = window.matchMedia("(pointer: coarse)").matches; // on which a chart that takes the drag cannot be scrolled past
  const isNarrow = () => document.documentElement.clientWidth < 600;
  const resizes = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) if (contentRect.width > 0 && target.data) Plotly.Plots.resize(target);
  });

  function plot(id, traces, drawn, isZoomLinked = false) {
    if (!plots.has(id)) {
      plots.set(id, element("div", { class: "plot" }));
      resizes.observe(plots.get(id));
    }
    const made = plots.get(id);
    made.style.height = `${drawn.height}px`;
    const reset = isZoomLinked ? { name: "resetZoom", title: "Reset the zoom of all charts", icon: Plotly.Icons && Plotly.Icons.home, click: resetZoom } : "resetScale2d";
    const config = { displaylogo: false, displayModeBar: "hover", modeBarButtons: [["zoom2d", "pan2d", reset, "toImage"]], doubleClick: isZoomLinked ? false : "reset+autosize", showTips: false };
    queue.push(() => {
      Plotly.react(made, traces, drawn, config);
      if (!isZoomLinked || made.dataset.linked) return;
      made.dataset.linked = "yes";
      made.on("plotly_hover", showValues);
      made.on("plotly_click", () => explainStep(id));
      made.on("plotly_unhover", () => tooltip.remove());
      made.on("plotly_relayout", (change) => zoomTo(id, change));
      made.on("plotly_doubleclick", resetZoom);
    });
    return made;
  }

  // Shows the values of all curves at the place of the pointer, since curves of several runs lie close together. The box of
  // Plotly would be cut off at the border of its chart.
  const tooltip = element("div", { class: "tooltip", "aria-hidden": "true" });
  const VALUES_MAX = 16;

  let hovered = null; // the point nearest to the pointer

  function showValues({ points, event, xvals, yvals }) {
    const known = points.filter((point) => point.data.meta && point.y !== null && point.y !== undefined);
    if (!known.length) return tooltip.remove();
    const [place] = known.reduce((best, point) => (Math.abs(point.x - xvals[0]) < best[1] ? [point.x, Math.abs(point.x - xvals[0])] : best), [0, Infinity]);
    const distance = (point) => Math.abs(Math.log(Math.abs(point.y) || 1e-12) - Math.log(Math.abs(point.yaxis.type === "log" ? 10 ** yvals[0] : yvals[0]) || 1e-12));
    const nearest = known.reduce((best, point) => (distance(point) < distance(best) ? point : best));
    hovered = nearest;
    // Of very many values those that are nearest to the pointer are shown, in the order of the curves.
    const shown = [...known].sort((a, b) => distance(a) - distance(b)).slice(0, VALUES_MAX).sort((a, b) => b.y - a.y);
    const rows = shown.map((point) => {
      const { label, form } = point.data.meta;
      const value = form === "share" ? `${(100 * point.y).toPrecision(4)}%` : form === "broken" ? "not finite" : count6(point.y);
      const from = point.x === place ? "" : ` at ${count6(point.x)}`;
      const { color, dash } = point.data.line || point.data.marker;
      return element("tr", { class: point === nearest ? "nearest" : null }, element("td", {}, stroke(color, dash || "solid")), element("td", {}, value), element("td", {}, label + from));
    });
    const left = known.length - shown.length;
    tooltip.replaceChildren(element("div", { class: "note" }, `${count6(place)} ${axisOf(state.data.runs).title}${left ? `, ${left} more curves` : ""}`), element("table", {}, element("tbody", {}, ...rows)));
    placeTooltip(event);
  }

  // Shows the tooltip to the right of the pointer, or to its left where there is no room.
  function placeTooltip(event) {
    document.body.append(tooltip);
    const { offsetWidth: width, offsetHeight: height } = tooltip;
    const [x, y] = [event.clientX, event.clientY];
    tooltip.style.left = `${Math.max(x + 18 + width < window.innerWidth ? x + 18 : x - 18 - width, 4)}px`;
    tooltip.style.top = `${Math.min(Math.max(y - height / 2, 4), Math.max(window.innerHeight - height - 4, 4))}px`;
  }

  // Shows below the chart which command explains the step that was clicked.
  function explainStep(id) {
    const run = hovered && state.data.runs.find((each) => each.id === hovered.data.meta.run);
    if (!run) return;
    const rows = Object.values(run.charts).flat().filter((series) => series[COLUMNS[state.axis]]).reduce((best, series) => (series.step.length > best.step.length ? series : best));
    const away = rows[COLUMNS[state.axis]].map((value) => (value === null ? Infinity : Math.abs(value / state.axisSize - hovered.x)));
    state.explained = { id, run: run.id, step: rows.step[away.indexOf(Math.min(...away))] };
    setTimeout(draw);
  }

  function explanation(id) {
    const { step, run } = state.explained && state.explained.id === id ? state.explained : {};
    const known = state.data.runs.find((each) => each.id === run);
    if (!known) return null;
    return element("div", { class: "explained", "aria-live": "polite" }, element("span", { class: "note" }, `step ${count(step)} of ${known.label}: its examples and what they cost`), copied(`${known.explain} ${step}`));
  }

  // Zooms all charts of curves to the steps, tokens or seconds that were chosen in one of them, and that one to its values.
  function zoomTo(id, change) {
    const range = (axis) => [0, 1].map((end) => change[`${axis}.range[${end}]`] ?? (change[`${axis}.range`] || [])[end]);
    const [horizontal, vertical] = [range("xaxis"), range("yaxis")];
    if (horizontal[0] === undefined && vertical[0] === undefined) return;
    if (horizontal[0] !== undefined) state.zoom = horizontal.map((value) => value * state.axisSize);
    if (vertical[0] !== undefined) state.heights.set(id, vertical);
    setTimeout(draw); // once Plotly is done with the event
  }

  function resetZoom() {
    state.zoom = null;
    state.heights.clear();
    setTimeout(draw);
  }

  const COLUMNS = { step: "step", tokens: "tokens", time: "seconds" }; // of a series, by axis

  // Returns a range of one axis as the range of another one in which the longest curve has the same rows; null if it is unknown.
  function convertRange(range, from, to) {
    const known = state.data.runs.flatMap((run) => Object.values(run.charts).flat()).filter((series) => series[COLUMNS[from]] && series[COLUMNS[to]]);
    if (!range || !known.length) return null;
    const longest = known.reduce((best, series) => (series.step.length > best.step.length ? series : best));
    const pairs = longest[COLUMNS[from]].map((value, index) => [value, longest[COLUMNS[to]][index]]).filter((pair) => !pair.includes(null));
    const converted = range.map((value) => {
      const after = pairs.findIndex(([place]) => place >= value);
      if (after <= 0) return (after ? pairs[pairs.length - 1] : pairs[0] || [0, 0])[1];
      const [[left, low], [right, high]] = [pairs[after - 1], pairs[after]];
      return low + ((high - low) * (value - left)) / (right - left || 1);
    });
    return converted[0] < converted[1] ? converted : null;
  }
  let queue = []; // plots to draw once their elements are on the page, since Plotly reads their width

  function axisOf(runs) {
    if (state.axis === "step") return { title: "optimizer steps", of: (run, series) => series.step };
    if (state.axis === "tokens") return { title: "tokens", of: (run, series) => series.tokens };
    const longest = Math.max(1, ...runs.map((run) => run.seconds || 0));
    const [name, size] = timeUnit(longest);
    return {
      title: `wall time since the first start (${name})`, size,
      of: (run, series) => series.seconds && series.seconds.map((value) => (value === null ? null : value / size)),
    };
  }

  // Returns the mean of values under a Gaussian, which is centred and so does not lag behind a fall as a running mean does.
  function smooth(values) {
    const width = Math.max(state.smoothing * values.length, 0.5);
    const reach = Math.ceil(3 * width);
    const weights = Array.from({ length: reach + 1 }, (_, distance) => Math.exp(-0.5 * (distance / width) ** 2));
    return values.map((value, index) => {
      if (value === null) return null;
      let [sum, weight] = [0, 0];
      for (let other = Math.max(index - reach, 0); other <= Math.min(index + reach, values.length - 1); other++) {
        if (values[other] === null) continue;
        const own = weights[Math.abs(other - index)];
        sum += own * values[other];
        weight += own;
      }
      return sum / weight;
    });
  }

  const idOf = (chart, series) => `${chart.title} ${series.key}`;
  const isValidation = (series) => series.key.startsWith("val/");

  // Returns true if a curve is hidden until its entry in the legend is clicked. All curves of a run have its colour, so a
  // comparison shows one of training and one of validation in each chart.
  function isSecondary(chart, series) {
    if (series.hidden) return true;
    if (state.data.runs.length < 2 || chart.form === "stack") return false;
    const first = state.data.runs.flatMap((run) => run.charts[chart.title] || []).find((other) => !other.hidden && isValidation(other) === isValidation(series));
    return first !== undefined && first.key !== series.key;
  }

  const isOff = (chart, series) => isSecondary(chart, series) !== state.toggled.has(idOf(chart, series));

  // Returns the series of a chart by key, each with the place of its colour, its name and the runs that have it.
  function seriesOf(chart, runs) {
    const found = new Map();
    for (const run of runs) {
      for (const series of run.charts[chart.title] || []) {
        if (!found.has(series.key)) found.set(series.key, { key: series.key, label: series.label, hidden: series.hidden, index: found.size });
      }
    }
    return found;
  }

  // Returns a trace in two parts: before step `part`, at which a fork parts from this run, it is dimmed.
  function dimmed(trace, steps, part) {
    if (part === null || part === undefined || state.axis === "time") return [trace];
    const after = steps.findIndex((step) => step > part);
    const border = after < 0 ? steps.length : after;
    if (!border) return [trace];
    const of = (from, to) => ({ x: trace.x.slice(from, to), y: trace.y.slice(from, to) });
    const before = { ...trace, ...of(0, border), opacity: DIMMED * (trace.opacity || 1) };
    return border === steps.length ? [before] : [before, { ...trace, ...of(border - 1) }];
  }

  // Returns the curves of ancestors that have no place of their own on the page, behind those of their forks.
  function ancestorTraces(chart, ancestors, axis) {
    if (chart.form === "stack" || state.axis === "time") return [];
    return ancestors.flatMap((run) => (run.charts[chart.title] || []).flatMap((series) => {
      const x = axis.of(run, series);
      if (!x || isOff(chart, series)) return [];
      const isTraining = !isValidation(series);
      const isSmoothed = chart.smooth && isTraining && state.smoothing > 0 && series.value.length > 20;
      const shown = isSmoothed && series.means ? series.means : series;
      const trace = {
        type: "scatter", name: plain(series.label), showlegend: false, mode: series.value.length === 1 ? "markers" : "lines",
        x: axis.of(run, shown), y: isSmoothed ? smooth(shown.value) : shown.value, line: { color: GREY, width: 2, dash: isTraining ? "solid" : "dot" }, marker: { color: GREY },
        hoverinfo: "none", meta: { label: `${run.label}, ${series.label}`, form: chart.form },
      };
      return dimmed(trace, shown.step, run.part);
    }));
  }

  const colourOf = (index) => colours()[index % colours().length];
  const strokeOf = (index) => ({ dash: DASHES[Math.floor(index / colours().length) % DASHES.length], width: 2 });
  // Returns the stroke of a curve among those of several runs, each of which has a colour.
  const compared = (chart, series, dash) => (isSecondary(chart, series) ? { dash: "dashdot", width: 1 } : { dash: isValidation(series) ? "dot" : dash, width: 2 });

  function seriesTraces(chart, runs, axis) {
    const traces = [];
    const alone = runs.length === 1;
    const named = seriesOf(chart, runs);
    for (const run of runs) {
      for (const series of run.charts[chart.title] || []) {
        if (isOff(chart, series)) continue;
        const { index } = named.get(series.key);
        const isByTime = state.axis === "time";
        // A curve over time is broken where an attempt ended and the next one began.
        const columns = (part) => (isByTime ? part.time && { x: part.time.x.map((value) => value && value / axis.size), y: part.time.y } : { x: axis.of(run, part), y: part.value });
        const raw = columns(series);
        if (!raw || !raw.x) continue;
        const colour = alone ? colourOf(index) : run.colour;
        const isTraining = !isValidation(series);
        const isSparse = series.value.length <= 60 || !isTraining;
        const { dash, width } = alone ? strokeOf(index) : compared(chart, series, run.dash);
        // A legend entry that is the only one of its chart adds nothing to the name of the run.
        const name = alone ? series.label : named.size > 1 ? `${run.label}, ${series.label}` : run.label;
        const hover = (what) => ({ hoverinfo: "none", meta: { label: name + what, form: chart.form, run: run.id } });
        const common = { type: "scatter", name: plain(series.label), showlegend: false, connectgaps: false, line: { color: colour, width, dash } };
        if (chart.form === "stack") {
          traces.push({ ...common, x: raw.x, y: raw.y, mode: "lines", stackgroup: "one", groupnorm: "fraction", line: { color: colour, width: 0.5 }, fillcolor: colour, hoverinfo: "none", meta: { label: series.label, form: chart.form } });
          continue;
        }
        const isSmoothed = chart.smooth && isTraining && state.smoothing > 0 && series.value.length > 20;
        const hasValues = !isSmoothed || runs.length <= 4;
        if (hasValues) {
          const trace = {
            ...common, x: raw.x, y: raw.y, mode: isSparse && !isSmoothed ? "lines+markers" : "lines", opacity: isSmoothed ? 0.32 : 1,
            line: { color: colour, width: isSmoothed ? 1 : width, dash: isSmoothed ? "solid" : dash },
            marker: { color: colour, symbol: SYMBOLS[index % SYMBOLS.length], size: series.value.length === 1 ? 9 : 5 }, ...hover(""),
          };
          traces.push(...dimmed(trace, series.step, run.part));
        }
        if (isSmoothed) {
          const means = columns(series.means || series);
          const trace = { ...common, x: means && means.x, y: means && smooth(means.y), mode: "lines", ...(hasValues ? { hoverinfo: "skip" } : hover(", smoothed")) };
          if (trace.x) traces.push(...dimmed(trace, (series.means || series).step, run.part));
        }
        // Where curves of several runs lie over each other, a line at the end of one would belong to none.
        const last = raw.y.findLastIndex((value) => value !== null);
        if (!alone && run.end && chart.title === "Loss" && isTraining && last >= 0) {
          traces.push({ type: "scatter", mode: "markers", x: [raw.x[last]], y: [raw.y[last]], showlegend: false, marker: { color: colour, symbol: "x", size: 11 }, ...hover(`, ${run.end.label}`) });
        }
        if (series.broken.value.length) {
          const places = axis.of(run, series.broken) || [];
          const level = Math.max(...series.value.filter((value) => value !== null), 1e-9);
          traces.push({
            type: "scatter", mode: "markers", x: places, y: places.map(() => level), showlegend: false,
            marker: { color: "#D55E00", symbol: "x", size: 10 }, hoverinfo: "none", meta: { label: name, form: "broken", run: run.id },
          });
        }
      }
    }
    return traces;
  }

  // Returns the settings of the vertical axis: linear, or logarithmic where a linear curve would be flat; ticks that can be read.
  function scaleOf(chart, traces, zoom) {
    if (chart.form === "stack") return { tickformat: ".0%", range: [0, 1] };
    let [low, high] = [Infinity, -Infinity];
    for (const { x, y } of traces) {
      y.forEach((value, index) => {
        if (value !== null && (!zoom || (x[index] >= zoom[0] && x[index] <= zoom[1]))) [low, high] = [Math.min(low, value), Math.max(high, value)];
      });
    }
    const isLog = low > 0 && high > low && (state.scale === "log" || (state.scale === "auto" && chart.auto && high / low > 25));
    if (!isLog) {
      const form = chart.form === "share" ? { tickformat: ".0%" } : { exponentformat: high < 1e-2 ? "e" : "SI" };
      const startsAtZero = chart.zero || chart.form === "share";
      const margin = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
      const range = zoom && high >= low ? { range: [startsAtZero && low >= 0 ? 0 : low - margin, high + margin] } : {};
      return { ...form, type: "linear", rangemode: startsAtZero ? "tozero" : "normal", ...range };
    }
    const [from, to] = [Math.log10(low), Math.log10(high)];
    const parts = to - from < 1.2 ? [1, 1.5, 2, 3, 5, 7] : to - from < 2.5 ? [1, 2, 5] : [1];
    const every = Math.max(1, Math.ceil((to - from) / 6));
    const ticks = [];
    for (let decade = Math.floor(from); decade <= Math.ceil(to); decade++) {
      if (decade % every === 0) for (const part of parts) ticks.push(part * 10 ** decade);
    }
    const margin = Math.max(0.04 * (to - from), 0.01);
    const text = (value) => (value >= 1e-3 && value < 1e4 ? String(Number(value.toPrecision(3))) : value >= 1e4 ? amount(value) : value.toExponential(0));
    return { type: "log", range: [from - margin, to + margin], tickmode: "array", tickvals: ticks, ticktext: ticks.map(text) };
  }

  const LEGEND_MAX = 12;
  function chartLegend(chart, runs) {
    const named = [...seriesOf(chart, runs).values()];
    if (named.length < 2) return null;
    const alone = runs.length === 1;
    const chips = named.slice(0, LEGEND_MAX).map((series) => {
      const { dash, width } = alone ? strokeOf(series.index) : compared(chart, series, "solid");
      const isShown = !isOff(chart, series);
      const attributes = { type: "button", class: "chip", "aria-pressed": String(isShown), title: `${series.key}: click to ${isShown ? "hide" : "show"}` };
      return element("button", { ...attributes, onclick: () => toggle("toggled", idOf(chart, series)) },
        stroke(alone ? colourOf(series.index) : style("--text"), dash, width), series.label);
    });
    const more = named.length > LEGEND_MAX ? element("span", { class: "note" }, `and ${named.length - LEGEND_MAX} more`) : null;
    return element("div", { class: "names" }, ...chips, more);
  }

  function stroke(colour, dash, width = 2) {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const made = document.createElementNS("http://www.w3.org/2000/svg", "line");
    for (const [name, value] of Object.entries({ width: 22, height: 8 })) line.setAttribute(name, value);
    const dashes = { solid: "", dash: "6 3", dot: "2 2", dashdot: "6 2 2 2" }[dash];
    for (const [name, value] of Object.entries({ x1: 0, x2: 22, y1: 4, y2: 4, stroke: colour, "stroke-width": width + 1, "stroke-dasharray": dashes })) made.setAttribute(name, value);
    line.append(made);
    return line;
  }

  // Returns the tokens before a step: the mean of the run, or the sum over its stages, whose batches may differ.
  function tokensAt(run, step) {
    const stage = run.stages.filter((each) => each.step <= step && each.tokens !== null).pop();
    if (stage) return stage.tokens + (step - stage.step) * stage.tokens_per_step;
    const next = run.stages.find((each) => each.tokens !== null);
    if (next) return (step * next.tokens) / next.step;
    return run.tokens_per_step ? step * run.tokens_per_step : null;
  }

  // Returns the stages that have begun, each with its place on the axis of a chart.
  function begunStages(runs, axis, isOwn = false) {
    if (runs.length !== 1) return [];
    const [run] = runs;
    const since = isOwn && run.fork ? run.fork.step : 0; // the stages before were those of the parent
    const places = { step: (stage) => stage.step, tokens: (stage) => stage.tokens, time: (stage) => (stage.began === null || run.began === null ? null : (stage.began - run.began) / axis.size) };
    const of = places[state.axis];
    return run.stages.filter((stage) => stage.step >= since && stage.step <= run.values.step).map((stage) => ({ ...stage, at: of(stage) })).filter((stage) => stage.at !== null);
  }

  // Returns the numbers above the lines of stages, except those that would lie over the one before.
  function stageNumbers(runs, axis, isOwn) {
    const stages = begunStages(runs, axis, isOwn);
    if (!stages.length) return [];
    const last = { step: runs[0].values.step, tokens: tokensAt(runs[0], runs[0].values.step), time: (runs[0].seconds || 0) / axis.size }[state.axis];
    let before = -Infinity;
    return stages.filter((stage) => {
      const isFree = stage.at - before > (isNarrow() ? 0.06 : 0.03) * last;
      if (isFree) before = stage.at;
      return isFree;
    }).map((stage) => ({
      x: stage.at, y: 1, xref: "x", yref: "paper", yanchor: "bottom", showarrow: false, text: String(stage.number), font: { size: 11, color: style("--quiet") },
      hovertext: [`stage ${stage.number} from step ${count(stage.step)}`, ...stage.changes.slice(0, 6), stage.why].filter(Boolean).map((line) => plain(line.slice(0, 90))).join("<br>"),
    }));
  }

  // Returns the label of the line at which a run has ended badly.
  function endLabel(runs, axis) {
    if (runs.length !== 1 || !runs[0].end) return [];
    const [{ end, began }] = runs;
    const at = { step: end.step, tokens: tokensAt(runs[0], end.step), time: began === null ? null : (end.time - began) / axis.size }[state.axis];
    return at === null ? [] : [{ x: at, y: 1, xref: "x", yref: "paper", xanchor: "right", yanchor: "bottom", showarrow: false, text: plain(end.label), font: { size: 11, color: style("--bad") } }];
  }

  // Returns shapes that mark where attempts resumed and which steps were recomputed, on the current axis.
  function marks(runs, axis, isOwn) {
    if (runs.length !== 1) return [];
    const [run] = runs;
    const place = (step, seconds) => {
      if (state.axis === "step") return step;
      if (state.axis === "time") return seconds === null || run.began === null ? null : (seconds - run.began) / axis.size;
      return tokensAt(run, step);
    };
    let lines = "";
    let bands = "";
    for (const attempt of run.attempts) {
      const at = place(attempt.resumed, attempt.began);
      if (attempt.number > 1 && at !== null && attempt.resumed !== null) lines += `M${at},0L${at},1`;
      if (!attempt.lost) continue;
      const from = place(attempt.kept, attempt.lost_since);
      const to = place(attempt.reached, attempt.ended);
      if (from !== null && to !== null) bands += `M${from},0L${to},0L${to},1L${from},1Z`;
    }
    const end = run.end && place(run.end.step, run.end.time);
    const begin = run.fork && state.axis !== "time" ? place(run.fork.step, null) : null;
    const borders = begunStages(runs, axis, isOwn).map((stage) => `M${stage.at},0L${stage.at},1`).join("");
    const isCrowded = run.attempts.length > 60;
    const shape = { type: "path", xref: "x", yref: "paper", layer: "below" };
    return [
      bands && { ...shape, path: bands, opacity: isCrowded ? 0.4 : 1, fillcolor: style("--ghost"), line: { width: 0 } },
      lines && { ...shape, path: lines, opacity: isCrowded ? 0.15 : 1, line: { color: GREY, width: 1, dash: isCrowded ? "solid" : "dot" } },
      borders && { ...shape, path: borders, opacity: 0.6, line: { color: style("--quiet"), width: 1 } },
      end !== null && { ...shape, layer: "above", path: `M${end},0L${end},1`, line: { color: style("--bad"), width: 2 } },
      begin !== null && { ...shape, layer: "above", path: `M${begin},0L${begin},1`, line: { color: style("--text"), width: 1, dash: "dash" } },
    ].filter(Boolean);
  }

  function charts(data, runs) {
    const axis = axisOf(runs);
    state.axisSize = axis.size || 1;
    const zoom = state.zoom && state.zoom.map((value) => value / state.axisSize);
    const shapes = marks(runs, axis);
    const ownShapes = marks(runs, axis, true);
    const annotations = [...stageNumbers(runs, axis), ...endLabel(runs, axis)];
    const ownAnnotations = [...stageNumbers(runs, axis, true), ...endLabel(runs, axis)];
    const made = [];
    const single = [];
    for (const chart of data.charts) {
      // Shares of several runs cannot be stacked over each other.
      for (const shown of chart.form === "stack" ? runs.map((run) => [run]) : [runs]) {
        const behind = ancestorTraces(chart, data.ancestors || [], axis);
        const traces = [...behind, ...seriesTraces(chart, shown, axis)];
        const legend = chartLegend(chart, shown);
        // A chart whose curves are all hidden stays, so that they can be shown again.
        const isHidden = [...seriesOf(chart, shown).values()].some((series) => isOff(chart, series));
        if (!traces.length && !isHidden) continue;
        // One value, or none that is finite, makes no curve.
        const values = traces.flatMap((trace) => (trace.meta && trace.meta.form === "broken" ? [] : trace.y)).filter((value) => value !== null);
        if (made.length && !isHidden && traces.every((trace) => trace.y.length < 2 || (trace.meta && trace.meta.form === "broken"))) {
          single.push([chart.title, ...(values.length ? values.slice(0, 3).map((value) => (chart.form === "share" ? share100(value) : count6(value))) : ["not finite"]), chart.unit]);
          continue;
        }
        const isFirst = !made.length;
        const name = chart.form === "stack" && runs.length > 1 ? `${chart.title}: ${shown[0].label}` : chart.title;
        const id = `chart ${name}`;
        const drawn = layout(axis.title, { shapes: behind.length ? shapes : ownShapes, annotations: behind.length ? annotations : ownAnnotations, hovermode: "x", height: isFirst ? (isNarrow() ? 280 : 380) : 260 });
        const height = state.heights.get(id);
        drawn.uirevision = `${state.axis} ${state.scale} ${zoom} ${height}`;
        if (state.axis === "time") drawn.xaxis.rangemode = "tozero";
        else drawn.xaxis.tickformat = "~s"; // 1.5k
        Object.assign(drawn.xaxis, { showspikes: true, spikemode: "across", spikethickness: 1, spikedash: "solid", spikecolor: GREY, spikesnap: "cursor" });
        if (zoom) drawn.xaxis.range = zoom;
        Object.assign(drawn.yaxis, scaleOf(chart, traces, zoom), height ? { range: height } : {});
        const caption = element("figcaption", {}, name, element("span", { class: "unit" }, ` ${chart.unit}`));
        made.push(element("figure", { class: isFirst ? "wide" : null }, caption, legend, plot(id, traces, drawn, true), explanation(id)));
      }
    }
    // Histograms of several runs cannot be drawn over each other.
    if (runs.length === 1) made.push(...histograms(runs[0], axis, zoom));
    const rows = runs.reduce((sum, run) => sum + run.rows, 0);
    const thinned = [...new Set(runs.map((run) => run.thinning))];
    const drawnPoints = runs.length > 1 && thinned.length > 1 ? "Long curves show the lowest and the highest value of each bin, so peaks are kept." : thinned[0];
    if (single.length) made.push(element("figure", {}, element("figcaption", {}, "Single values"), table(null, single.map(([title, ...rest]) => [title, rest.slice(0, -1).join(", "), rest[rest.length - 1]]), "facts")));
    const notes = made.length ? [element("p", { class: "note" }, `${count(rows)} ${rows === 1 ? "row" : "rows"}. ${drawnPoints[0].toUpperCase()}${drawnPoints.slice(1)}`)] : [];
    if (runs.some((run) => run.attempts.length > 1 || run.attempts.some((attempt) => attempt.lost)) && shapes.length) {
      notes.push(element("p", { class: "note" }, "Dotted lines, or thin ones if there are many: an attempt resumed here. Grey bands: steps that were lost and " +
        "recomputed; their rows are removed from metrics.jsonl, so there is no curve of them."));
    }
    if (stageNumbers(runs, axis).length) notes.push(element("p", { class: "note" }, "Lines with a number: a stage of the run begins; the table of stages below says what it changes."));
    if (!made.length) notes.push(element("p", { class: "empty" }, !runs.length ? "Every run is hidden." : state.axis === "time" ? "These rows have no timestamps." : runs.some((run) => run.kind === "live") ? "No rows yet." : "No rows."));
    return element("section", { id: "charts" }, made.length ? controls() : null, forkNote(data, runs), element("div", { class: "grid" }, ...made), ...notes);
  }

  // Returns a chart of each histogram over the steps, as in a spectrogram: the stronger the colour, the more values.
  function histograms(run, axis, zoom) {
    return run.histograms.map((histogram) => {
      const x = axis.of(run, histogram);
      if (!x || x.length < 2) return null;
      const z = histogram.centers.map((_, bin) => histogram.shares.map((shares) => shares[bin]));
      const trace = { type: "heatmap", x, y: histogram.centers, z, colorscale: [[0, style("--panel")], [1, colours()[0]]], showscale: false, hovertemplate: "%{x:,} · %{y:.4g}: %{z:.1%}<extra></extra>" };
      const drawn = layout(axis.title, {});
      drawn.uirevision = `${state.axis} ${zoom}`;
      if (zoom) drawn.xaxis.range = zoom;
      if (state.axis !== "time") drawn.xaxis.tickformat = "~s";
      const caption = element("figcaption", {}, histogram.title, element("span", { class: "unit" }, " histogram over steps"));
      return element("figure", {}, caption, plot(`histogram ${histogram.title}`, [trace], drawn, true));
    }).filter(Boolean);
  }

  // Returns the chart of each scaling law: losses over parameters, the line with its band, the forecast and what came.
  function laws(found) {
    const made = found.filter(({ law }) => law).map(({ id, law }) => {
      const [line, other] = colours();
      const column = (index) => law.curve.map((row) => row[index]);
      const hover = (name) => `${name}: %{y:.4f} at %{x:,}<extra></extra>`;
      const band = { type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
      const [parameters, expected, low, high] = law.forecast || [];
      const traces = [
        { ...band, x: column(0), y: column(2) },
        { ...band, x: column(0), y: column(3), fill: "tonexty", fillcolor: style("--ghost") },
        { type: "scatter", mode: "lines", x: column(0), y: column(1), line: { color: line, width: 2 }, hovertemplate: hover("law") },
        { type: "scatter", mode: "markers", x: law.points.map((row) => row[0]), y: law.points.map((row) => row[2]), marker: { color: line, size: 8 }, hovertemplate: hover("run") },
      ];
      if (law.forecast) traces.push({ type: "scatter", mode: "markers", x: [parameters], y: [expected], marker: { color: line, size: 10, symbol: "circle-open" }, error_y: { type: "data", symmetric: false, array: [high - expected], arrayminus: [expected - low], color: line }, hovertemplate: hover("forecast") });
      if (law.came !== null) traces.push({ type: "scatter", mode: "markers", x: [parameters], y: [law.came], marker: { color: other, size: 10, symbol: "diamond" }, hovertemplate: hover("came") });
      const drawn = layout("parameters", { height: 320 });
      drawn.xaxis.type = drawn.yaxis.type = "log";
      drawn.xaxis.tickformat = "~s";
      const caption = element("figcaption", {}, "Scaling law", element("span", { class: "unit" }, " validation loss at the end, nats / token"));
      const key = "Line and band: the law and where one more run is expected. Circles: runs. Open circle: the forecast. Diamond: what came.";
      return element("figure", { class: "wide" }, caption, plot(`law ${id}`, traces, drawn), element("p", { class: "note" }, law.text), element("p", { class: "note" }, key));
    });
    return made.length ? element("section", { id: "laws" }, element("div", { class: "grid" }, ...made)) : null;
  }

  function forkNote(data, runs) {
    const forks = runs.filter((run) => run.fork);
    if (!forks.length) return null;
    const texts = forks.slice(0, FORKS_MAX).map((run) => (runs.length > 1 ? `${run.label}: ${run.fork.text}.` : `${run.fork.text[0].toUpperCase()}${run.fork.text.slice(1)} (dashed line).`));
    const grey = (data.ancestors || []).length ? [`Grey: ${data.ancestors.map((run) => run.label).join(", ")}${state.axis === "time" ? ", not drawn by time" : ""}.`] : [];
    return element("p", { class: "note", id: "forks" }, [...texts, ...grey].join(" "));
  }

  function controls() {
    const button = (text, isOn, act) => element("button", { type: "button", "aria-pressed": String(isOn), onclick: () => { act(); draw(); } }, text);
    const group = (label, choices, name) => element(
      "div", { class: "choice", role: "group", "aria-label": label }, element("span", {}, label),
      ...choices.map(([value, text]) => button(text, state[name] === value, () => {
        if (name === "axis") state.zoom = convertRange(state.zoom, state.axis, value);
        if (name !== "smoothing") state.heights.clear();
        state[name] = value;
      })),
    );
    return element(
      "div", { class: "controls" },
      group("by", [["step", "step"], ["tokens", "tokens"], ["time", "time"]], "axis"),
      group("scale", [["auto", "auto"], ["linear", "linear"], ["log", "log"]], "scale"),
      group("smoothing", [[0, "off"], [0.004, "low"], [0.012, "medium"], [0.04, "high"]], "smoothing"),
      state.zoom || state.heights.size ? element("button", { type: "button", onclick: resetZoom }, "reset zoom") : null,
    );
  }

  // Returns the table of the stages of each run that has some.
  function stages(runs) {
    const shown = runs.filter((run) => run.stages.length);
    if (!shown.length) return null;
    if (!state.open.has("stages seen")) state.open.add("stages").add("stages seen");
    const made = shown.flatMap((run) => {
      const rows = run.stages.map((stage) => [
        stage.number, count(stage.step), element("div", {}, ...stage.changes.map((text) => element("div", {}, text))), stage.why, count(stage.tokens), count(stage.tokens_per_step),
        stage.began ? clock(stage.began) : stage.step > run.values.step ? `in ${count(stage.step - run.values.step)} steps` : "",
      ]);
      return [runs.length > 1 ? element("p", { class: "note" }, run.label) : null, table(["stage", "from step", "changes", "why", "tokens before it", "tokens in a step", "began"], rows, "stages")];
    });
    return section("stages", "Stages", ...made.filter(Boolean));
  }

  // Time.

  const PATTERNS = ["", "/", "x", "."];
  function bucketStyle(data, name) {
    const fixed = { gap: ["#b8b8b8", "."], unattributed: ["#8a8a8a", "x"], steps: ["#009E73", ""], lost_steps: ["#D55E00", "x"] };
    if (fixed[name]) return fixed[name];
    const others = data.buckets.map((bucket) => bucket.name).filter((other) => !fixed[other]);
    const palette = ["#0072B2", "#56B4E9", "#E69F00", "#CC79A7", "#F0E442"];
    const index = others.indexOf(name);
    return [palette[index % palette.length], PATTERNS[Math.floor(index / palette.length) % PATTERNS.length]];
  }

  function bars(data, name, label) {
    const [colour, pattern] = bucketStyle(data, name);
    return {
      type: "bar", orientation: "h", name: plain(label), base: [], x: [], y: [], customdata: [],
      marker: { color: colour, line: { width: 0 }, pattern: { shape: pattern, size: 6, solidity: 0.3, fillmode: "overlay", fgcolor: style("--panel"), fgopacity: 1 } },
      hovertemplate: "attempt %{y}: %{customdata}<extra>" + plain(label) + "</extra>",
    };
  }

  function swatch(data, name) {
    const [colour, pattern] = bucketStyle(data, name);
    const made = element("span", { class: `swatch ${{ "": "", "/": "striped", x: "crossed", ".": "dotted" }[pattern]}` });
    made.style.backgroundColor = colour;
    return made;
  }

  const withSwatch = (data, bucket) => element("span", { class: "named" }, swatch(data, bucket.name), bucket.label);

  function timeline(data, run) {
    const [unit, size] = timeUnit(run.seconds);
    const traces = new Map(data.buckets.map((bucket) => [bucket.name, bars(data, bucket.name, bucket.label)]));
    for (const attempt of run.attempts) {
      let at = (attempt.began - run.began) / size;
      for (const bucket of data.buckets) {
        const seconds = attempt.seconds[bucket.name] || 0;
        if (!seconds) continue;
        const trace = traces.get(bucket.name);
        trace.base.push(at); trace.x.push(seconds / size); trace.y.push(attempt.number); trace.customdata.push(duration(seconds));
        at += seconds / size;
      }
    }
    const numbers = run.attempts.map((attempt) => attempt.number);
    const few = numbers.length <= 25;
    const drawn = layout(`wall time since the first start (${unit})`, {
      barmode: "overlay", height: Math.min(90 + 24 * numbers.length, 700) + 20, bargap: few ? 0.25 : 0,
    });
    Object.assign(drawn.yaxis, { autorange: "reversed", tickformat: "d", showgrid: false });
    if (few) Object.assign(drawn.yaxis, { tickmode: "array", tickvals: numbers });
    const seen = data.buckets.filter((bucket) => traces.get(bucket.name).x.length);
    const names = element("div", { class: "names" }, ...seen.map((bucket) => withSwatch(data, bucket)));
    return [names, plot(`timeline ${run.id}`, seen.map((bucket) => traces.get(bucket.name)), drawn)];
  }

  function progress(run) {
    const [unit, size] = timeUnit(run.seconds);
    const since = (seconds) => (seconds - run.began) / size;
    const kept = { type: "scatter", mode: "lines", name: "surviving steps", x: [], y: [], line: { color: "#009E73", width: 2 }, hovertemplate: "%{x:.4g} · step %{y:,}<extra></extra>" };
    const lostSteps = { ...kept, name: "lost steps", x: [], y: [], line: { color: "#D55E00", width: 2, dash: "dot" } };
    // Rows of the surviving trajectory have timestamps. An attempt without rows is a line from its start to its end.
    const timed = (run.charts.Loss || []).find((series) => series.seconds) || { step: [], seconds: [] };
    const rows = timed.seconds.map((seconds, index) => [seconds, timed.step[index]]).filter(([seconds]) => seconds !== null);
    for (const attempt of run.attempts) {
      if (attempt.resumed === null || attempt.reached === null) continue;
      const [from, to] = [attempt.began - run.began, attempt.ended - run.began];
      const own = rows.filter(([seconds, step]) => seconds >= from && seconds <= to && step <= attempt.kept);
      // A later stage may be compiled beside the steps, so the time of compilation may reach beyond the first rows.
      const points = [[Math.min(attempt.stepping - run.began, own.length ? own[0][0] : Infinity), attempt.resumed], ...own];
      if (!own.length && attempt.kept > attempt.resumed) points.push([(attempt.lost ? attempt.lost_since : attempt.ended) - run.began, attempt.kept]);
      for (const [seconds, step] of points) { kept.x.push(seconds / size); kept.y.push(step); }
      kept.x.push(null); kept.y.push(null);
      if (attempt.lost) {
        lostSteps.x.push(points[points.length - 1][0] / size, to / size, null);
        lostSteps.y.push(points[points.length - 1][1], attempt.reached, null);
      }
    }
    const saves = {
      type: "scatter", mode: "markers", name: "checkpoints", x: run.saves.map((save) => since(save.time)), y: run.saves.map((save) => save.step),
      marker: { color: colours()[0], symbol: "diamond", size: run.saves.length > 100 ? 3 : 7 }, text: run.saves.map((save) => [save.bytes === null ? "" : bytes(save.bytes), save.seconds === null ? "" : `durable after ${duration(save.seconds)}`].filter(Boolean).join(", ")),
      hovertemplate: "step %{y:,} committed: %{text}<extra></extra>",
    };
    // A fork without a step of its own stands at the step of its parent.
    const hasSteps = kept.y.some((step) => step !== null && step !== kept.y[0]) || lostSteps.x.length;
    if (!hasSteps && !saves.x.length) return element("p", { class: "empty" }, "No steps yet.");
    const drawn = layout(`wall time since the first start (${unit})`, { showlegend: true, legend: { orientation: "h", y: -0.25, yanchor: "top", x: 0 } });
    drawn.yaxis.exponentformat = "SI";
    return plot(`progress ${run.id}`, [kept, lostSteps, saves], drawn);
  }

  function goodput(runs) {
    const [unit, size] = timeUnit(Math.max(1, ...runs.map((run) => run.seconds || 0)));
    const traces = runs.filter((run) => run.goodput.length).map((run) => ({
      type: "scatter", mode: "lines+markers", x: run.goodput.map(([time]) => (time - run.began) / size), y: run.goodput.map(([, share]) => share),
      line: { color: run.colour, dash: run.dash, width: 2 }, marker: { size: 5 }, name: plain(run.label),
      hovertemplate: `%{x:.4g} · %{y:.1%}<extra>${plain(run.label).replace(/%/g, "%\u200b")}</extra>`,
    }));
    const drawn = layout(`wall time since the first start (${unit})`, {});
    Object.assign(drawn.yaxis, { tickformat: ".0%", range: [0, 1.02] });
    return plot("goodput", traces, drawn);
  }

  function share(data, runs) {
    const names = runs.map((run) => (runs.length > 1 ? plain(shorten(run.label)) : ""));
    const traces = [];
    for (const bucket of data.buckets) {
      const shares = runs.map((run) => (run.buckets[bucket.name] || 0) / total(run));
      const trace = bars(data, bucket.name, bucket.label);
      Object.assign(trace, { base: undefined, x: shares, y: runs.map((run, index) => index), hovertemplate: "%{x:.2%}<extra>" + plain(bucket.label) + "</extra>" });
      if (shares.some((value) => value)) traces.push(trace);
    }
    const drawn = layout("share of wall time", { barmode: "stack", height: 100 + 24 * runs.length, bargap: 0.2 });
    Object.assign(drawn.xaxis, { tickformat: ".0%", range: [0, 1] });
    Object.assign(drawn.yaxis, { tickmode: "array", tickvals: runs.map((run, index) => index), ticktext: names, autorange: "reversed", showgrid: false, zeroline: false });
    return plot("share", traces, drawn);
  }

  const shorten = (text) => (text.length > (isNarrow() ? 14 : 40) ? `…${text.slice(isNarrow() ? -13 : -39)}` : text);
  const total = (run) => Object.values(run.buckets).reduce((sum, seconds) => sum + seconds, 0) || 1;

  function buckets(data, runs) {
    const seen = data.buckets.filter((bucket) => runs.some((run) => run.buckets[bucket.name]));
    const part = (run, bucket) => `${(100 * (run.buckets[bucket.name] || 0) / total(run)).toFixed(2)}%`;
    if (runs.length > 1) return table(["run", ...seen.map((bucket) => withSwatch(data, bucket))], runs.map((run) => [run.label, ...seen.map((bucket) => part(run, bucket))]), "shares");
    const rows = seen.map((bucket) => [withSwatch(data, bucket), duration(runs[0].buckets[bucket.name] || 0), part(runs[0], bucket), bucket.meaning]);
    return table(["category", "time", "share", "meaning"], rows, "buckets");
  }

  function time(data, runs) {
    const known = runs.filter((run) => run.began !== null && run.attempts.length);
    if (!known.length) return null;
    const figure = (text, ...children) => element("figure", {}, element("figcaption", {}, text), ...children);
    // Runs that have never made a step would have empty charts.
    const made = [figure("Where the time went", share(data, known), buckets(data, known))];
    if (known.some((run) => run.values.step > 0)) made.push(figure("Goodput so far: time of surviving steps / wall time", goodput(known)));
    const parts = known.map((run) => [
      run.values.step > 0 ? figure("Progress: optimizer steps, lost ones dotted", progress(run)) : null,
      figure("Attempts, one lane each: time by category, in no order within a lane", ...timeline(data, run)),
    ].filter(Boolean));
    if (known.length === 1) made.push(...parts[0]);
    const each = known.length === 1 ? [] : known.map((run, index) => section(`time ${run.id}`, `Progress and attempts: ${run.label}`, element("div", { class: "pairs" }, ...parts[index])));
    if (!state.open.has("time seen")) state.open.add("time").add("time seen");
    return section("time", "Time", element("div", { class: "pairs" }, ...made), ...each);
  }

  // Facts and tables.

  function tile({ label, value, note, kind, share, trend }) {
    const bar = share === undefined || share === null ? null : element("div", { class: "bar" }, element("div", {}));
    if (bar) bar.firstChild.style.width = `${(100 * Math.min(Math.max(share, 0), 1)).toFixed(1)}%`;
    return element("div", { class: `tile ${kind || ""}`.trim() }, element("div", { class: "label" }, label), element("div", { class: "value" }, value),
      bar, trend && trend.length > 1 ? sparkline(trend, `trend of the ${label.toLowerCase()}`) : null, element("div", { class: "note", title: note }, note));
  }

  const warnings = (runs) => {
    const found = runs.flatMap((run) => run.warnings.map((text) => element("li", {}, runs.length > 1 ? `${run.label}: ${text}` : text)));
    return found.length ? element("ul", { class: "warnings" }, ...found.slice(0, 8), found.length > 8 ? element("li", {}, `and ${found.length - 8} more`) : null) : null;
  };

  // Returns the run with the lowest validation loss, or the lowest loss where no run has one.
  function bestOf(runs) {
    const key = runs.some((run) => run.values.best_validation_loss !== null) ? "best_validation_loss" : "loss";
    const known = runs.filter((run) => run.values[key] !== null);
    return known.length > 1 ? known.reduce((best, run) => (run.values[key] < best.values[key] ? run : best)) : null;
  }

  const fixed = (value) => (value === null || value === undefined ? "" : value.toFixed(4));
  const share100 = (value) => (value === null || value === undefined ? "" : `${(100 * value).toFixed(1)}%`);
  const number = (value) => (value === null || value === undefined ? "" : amount(value));
  const DIFFERENCES_MAX = 4;
  const cut = (text, length) => (text.length > length ? element("span", { title: text }, `${text.slice(0, length)}…`) : text);

  function comparison(data, runs) {
    const best = bestOf(runs);
    // Unlike runs differ in dozens of keys, which would push everything else off the screen. A column is worth a key that
    // every run has, with a short value, such as the learning rate of a sweep.
    const short = data.differences.filter(([, values]) => values.every((text) => text !== "(absent)" && text.length <= 16));
    const differences = short.slice(0, DIFFERENCES_MAX).map(([key, values]) => ({
      title: cut(key.replace(/^config\./, ""), 28), key, of: (run) => sortValue(values[data.runs.indexOf(run)]), show: (run) => values[data.runs.indexOf(run)],
    }));
    const columns = [
      {
        title: "run", key: "label", of: (run) => run.label, show: (run) => {
          const line = element("button", { type: "button", class: "chip", "aria-pressed": String(!state.hidden.has(run.id)), onclick: () => toggle("hidden", run.id), title: "show or hide its curves" }, stroke(run.colour, run.dash), run.label);
          return run === best ? element("span", {}, line, element("span", { class: "best" }, "★ best")) : line;
        },
      },
      { title: "loss", key: "loss", of: (run) => run.values.loss, show: (run) => fixed(run.values.loss) },
      { title: "best validation", key: "best_validation_loss", of: (run) => run.values.best_validation_loss, show: (run) => fixed(run.values.best_validation_loss) },
      ...differences,
      { title: "state", key: "state", of: (run) => run.values.state, show: (run) => badge(run.kind, run.values.state) },
      { title: "steps", key: "step", of: (run) => run.values.step, show: (run) => count(run.values.step) },
      { title: "tokens / s", key: "tokens_per_second", of: (run) => run.values.tokens_per_second ?? run.values.examples_per_second, show: (run) => number(run.values.tokens_per_second ?? run.values.examples_per_second) + (run.values.examples_per_second === null ? "" : " examples") },
      { title: "MFU", key: "mfu", of: (run) => run.values.mfu, show: (run) => share100(run.values.mfu) },
      { title: "goodput", key: "goodput", of: (run) => run.values.goodput, show: (run) => share100(run.values.goodput) },
    ];
    const open = () => { state.open.add("differences"); draw(); document.getElementById("differences").scrollIntoView(); };
    const left = data.differences.length - differences.length;
    const note = left > 0 ? element("p", {}, element("button", { type: "button", onclick: open }, `${left}${differences.length ? " more" : ""} ${left > 1 ? "keys differ" : "key differs"}`)) : null;
    return element("section", {}, sortable(columns, runs, (run) => (run === best ? "best-row" : null)), note);
  }

  const textOf = (title) => (title instanceof Node ? title.textContent : title);
  const badge = (kind, text) => element("span", { class: `state ${kind || ""}`.trim(), title: text }, text);

  // Returns a table whose rows are sorted by a click on a head, and which is a list of cards where it is narrow.
  function sortable(columns, items, kindOf, initial = { key: null, isDescending: false, name: "as found" }, rowsMax = Infinity) {
    const order = state.sort.key ? state.sort : initial;
    const chosen = columns.find((column) => column.key === order.key);
    const sorted = [...items];
    if (chosen) {
      const isKnown = (value) => value !== null && value !== undefined && value !== "";
      sorted.sort((a, b) => {
        const [left, right] = [chosen.of(a), chosen.of(b)];
        if (!isKnown(left) || !isKnown(right)) return isKnown(right) - isKnown(left);
        const difference = typeof left === "number" && typeof right === "number" ? left - right : String(left).localeCompare(String(right), "en", { numeric: true });
        return order.isDescending ? -difference : difference;
      });
    }
    const sortBy = (key, isDescending) => { state.sort = { key, isDescending }; draw(); };
    const head = columns.map((column) => {
      if (!column.of) return element("th", {}, column.title);
      const isChosen = column === chosen;
      const direction = !isChosen ? "none" : order.isDescending ? "descending" : "ascending";
      const arrow = !isChosen ? "" : order.isDescending ? " ▾" : " ▴";
      return element("th", { "aria-sort": direction }, element("button", { type: "button", class: "sort", onclick: () => sortBy(column.key, isChosen && !order.isDescending) }, column.title, arrow));
    });
    const rows = sorted.slice(0, rowsMax).map((item) => element("tr", { class: kindOf ? kindOf(item) : null }, ...columns.map((column) => {
      const cell = column.show(item);
      const isEmpty = cell === "" || cell === null || cell === undefined;
      return element("td", { "data-label": textOf(column.title), class: isEmpty ? "none" : null }, isEmpty ? "" : cell);
    })));
    const choice = element("select", { "aria-label": "sort by", onchange: (event) => sortBy(event.target.value || null, false) },
      element("option", { value: "" }, initial.name), ...columns.filter((column) => column.of).map((column) => element("option", { value: column.key, selected: column === chosen ? "" : null }, textOf(column.title))));
    return element("div", {}, element("label", { class: "narrow sorting" }, "sort by ", choice),
      element("div", { class: "scroll" }, element("table", { class: "runs" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows))));
  }

  function facts(runs) {
    const names = [...new Set(runs.flatMap((run) => run.facts.map(([name]) => name)))];
    const rows = names.map((fact) => [fact, ...runs.map((run) => (run.facts.find(([name]) => name === fact) || ["", ""])[1])]);
    return section("facts", "All figures", table(runs.length > 1 ? ["", ...runs.map((run) => run.label)] : null, rows, "facts"));
  }

  function tables(data, runs) {
    const made = [];
    if (data.differences.length) {
      made.push(section("differences", `Differences of the specs (${data.differences.length})`, table(["key", ...data.runs.map((run) => run.label)], data.differences.map(([key, values]) => [key, ...values]), "code")));
    }
    for (const run of runs) {
      const attempts = run.attempts.map((each) => [each.number, clock(each.began), duration(each.ended - each.began), each.how, count(each.resumed), count(each.reached), count(each.lost)]);
      const heads = ["attempt", "began", "lasted", "how it ended", "from step", "to step", "steps lost"];
      const saves = run.checkpoints.map((save) => [save.name, save.bytes === null ? "" : bytes(save.bytes), clock(save.time), save.text]);
      const own = [
        section(`attempts ${run.id}`, `Attempts (${count(run.attempts.length)})`, table(heads, attempts.reverse(), "attempts")),
        section(`checkpoints ${run.id}`, `Checkpoints (${count(run.checkpoints.length)})`, table(["checkpoint", "size", "committed", ""], saves)),
        section(`environment ${run.id}`, "Environment and versions", table(null, run.environment, "facts")),
        section(`spec ${run.id}`, "Spec", copyButton(() => run.spec), element("p", { class: "note" }, "Keys whose values are not the defaults, then all of them:"),
          table(["key", "value", "default"], run.changed, "code"), element("pre", {}, run.spec)),
        section(`events ${run.id}`, "Newest events", table(["time", "attempt", "step", "event"], run.events.map(([time, attempt, step, text]) => [clock(time), count(attempt), count(step), text]), "events")),
        section(`commands ${run.id}`, "Commands that tell more", ...run.commands.map(([text, purpose]) => element("div", {}, element("span", { class: "note" }, purpose), copied(text)))),
      ];
      if (run.samples.length) own.unshift(samples(run));
      if (run.log && (runs.length > 1 || !run.end)) own.unshift(log(run));
      made.push(...(runs.length > 1 ? [section(`run ${run.id}`, run.label, ...own)] : own));
    }
    return made;
  }

  const LINES_MAX = 8;

  // Returns the last lines of a log, with the lines before them behind a click.
  function log(run) {
    const lines = run.log.text.trimEnd().split("\n");
    const earlier = lines.slice(0, -LINES_MAX);
    const id = `log ${run.id}`;
    if (run.end && !state.open.has(`${id} seen`)) state.open.add(id).add(`${id} seen`);
    return section(id, `Last lines of ${run.log.name}`, earlier.length ? section(`${id} earlier`, `${count(earlier.length)} lines before them`, element("pre", { class: "log" }, earlier.join("\n"))) : null,
      element("pre", { class: "log" }, lines.slice(-LINES_MAX).join("\n")));
  }

  // Returns the text samples of a run, those of the newest step first.
  function samples(run) {
    const names = [...new Set(run.samples.flatMap(([, texts]) => texts.map(([name]) => name)))];
    const rows = run.samples.map(([step, texts]) => [count(step), ...names.map((name) => element("div", { class: "sample" }, (texts.find(([other]) => other === name) || ["", ""])[1]))]);
    return section(`samples ${run.id}`, "Samples over steps", table(["step", ...names.map((name) => name.replace(/^sample\//, "prompt "))], rows, "samples"));
  }

  // Images and audio.

  const SMALL_PIXELS = 256;

  // Returns the images or audio of one key: one step, and a slider over all steps, the newest at its right end.
  function gallery(run, media, isOne) {
    const items = [...media.items].reverse();
    const id = `${run.id} ${media.key}`;
    const place = element("div", { class: "media" });
    const label = element("span", { class: "unit" });
    function show(index) {
      const [step, name] = items[index];
      const source = run.address ? `${first.top}media/${run.address}/${name.replace(/^media\//, "")}` : name;
      const text = `${media.key} at step ${count(step)}`;
      const gone = () => place.replaceChildren(element("p", { class: "note" }, "The file is gone."));
      const small = ({ target }) => target.classList.toggle("small", Math.max(target.naturalWidth, target.naturalHeight) < SMALL_PIXELS);
      // The name ends in its kind; a data URL begins with it.
      const isAudio = source.startsWith("data:audio/") || (!source.startsWith("data:") && source.endsWith(".wav"));
      // The page below does not move while the next image loads.
      if (place.offsetHeight) place.style.minHeight = `${place.offsetHeight}px`;
      place.replaceChildren(isAudio ? element("audio", { controls: "", preload: "metadata", src: source, "aria-label": text, onerror: gone })
        : element("img", { src: source, alt: text, onload: small, onerror: gone }));
      label.textContent = ` step ${count(step)}`;
      if (slider) slider.setAttribute("aria-valuetext", `step ${step}`);
    }
    // A chosen step stays when the page is redrawn; otherwise the newest one is shown.
    const chosen = items.findIndex(([step]) => step === state.shownSteps.get(id));
    const index = chosen < 0 ? items.length - 1 : chosen;
    function choose({ target }) {
      const next = Number(target.value);
      if (next === items.length - 1) state.shownSteps.delete(id);
      else state.shownSteps.set(id, items[next][0]);
      show(next);
    }
    const slider = items.length > 1 ? element("input", { type: "range", min: 0, max: items.length - 1, value: index, "aria-label": `step of ${media.key}`, oninput: choose }) : null;
    show(index);
    const ends = [items[0], items[items.length - 1]].map(([step]) => element("span", { class: "note" }, count(step)));
    return element("figure", {}, element("figcaption", {}, isOne ? media.key : `${run.label}: ${media.key}`, label), place,
      slider ? element("div", { class: "slider" }, ends[0], slider, ends[1]) : null);
  }

  function mediaSection(runs) {
    const made = runs.flatMap((run) => run.media.map((media) => gallery(run, media, runs.length === 1)));
    return made.length ? section("media", "Images and audio", element("div", { class: "gallery" }, ...made)) : null;
  }

  // A redraw would stop what is played, and take the slider from the hand that holds it.
  const isHeld = () => document.querySelector("input[type=range]:active") || [...document.querySelectorAll("audio")].some((each) => !each.paused);

  // Returns a button that copies a text, by a selection, which also works over plain HTTP.
  function copyButton(getText) {
    const act = ({ target }) => {
      const field = element("textarea", { readonly: "" });
      field.value = getText();
      target.after(field);
      field.select();
      target.textContent = document.execCommand("copy") ? "copied" : "cannot copy";
      field.remove();
      setTimeout(() => { target.textContent = "copy"; }, 1500);
    };
    return element("button", { type: "button", class: "copy", onclick: act }, "copy");
  }

  const copied = (text) => element("div", { class: "command" }, element("code", { class: "scroll" }, text), copyButton(() => text));

  // The table of all runs.

  function sparkline(values, label) {
    const drawn = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (const [name, value] of Object.entries({ viewBox: "0 0 100 24", preserveAspectRatio: "none", class: "spark", role: "img", "aria-label": label })) drawn.setAttribute(name, value);
    const known = values.filter((value) => value !== null);
    if (known.length < 2) return drawn;
    const low = Math.min(...known);
    // One spike, as at the first steps, must not flatten the rest.
    const high = [...known].sort((a, b) => a - b)[Math.ceil(0.95 * (known.length - 1))];
    const points = values.map((value, index) => [index, value]).filter(([, value]) => value !== null);
    const text = points.map(([index, value]) => `${(1 + 98 * index / (values.length - 1)).toFixed(1)},${(22 - 20 * (Math.min(value, high) - low) / (high - low || 1)).toFixed(1)}`).join(" ");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    for (const [name, value] of Object.entries({ points: text, fill: "none", stroke: colours()[0], "stroke-width": 1.5, "vector-effect": "non-scaling-stroke" })) line.setAttribute(name, value);
    drawn.append(line);
    return drawn;
  }

  function progressCell(run) {
    const { step, total_steps: all } = run.values;
    if (!all) return run.steps;
    const bar = element("div", { class: "bar" }, element("div", {}));
    bar.firstChild.style.width = `${(100 * Math.min(step / all, 1)).toFixed(1)}%`;
    return element("div", { class: "progress" }, bar, element("span", {}, run.steps));
  }

  const tagsOf = (run) => (run.tags || []).join(", ");
  // Returns a text of a spec as a number, if it is one, so that it is sorted as one.
  const sortValue = (text) => (text.trim() && Number.isFinite(Number(text)) ? Number(text) : text);

  const COMPARED_MAX = 10;
  function overview(data) {
    const now = Date.now() / 1000;
    const known = new Set(data.table.map((run) => run.id));
    for (const id of state.chosen) if (!known.has(id)) state.chosen.delete(id);
    const value = (key) => (run) => (run.values ? run.values[key] : null);
    const columns = [
      {
        title: "run", key: "name", of: (run) => run.name, show: (run) => {
          const box = element("input", { type: "checkbox", "aria-label": `compare ${run.name}`, title: "compare", onchange: () => toggle("chosen", run.id), checked: state.chosen.has(run.id) ? "" : null });
          return element("span", {}, box, element("a", { href: `run/${run.id}` }, run.name));
        },
      },
      { title: "project", key: "project", isExtra: true, of: (run) => run.project, show: (run) => run.project },
      { title: "group", key: "group", isExtra: true, of: (run) => run.group, show: (run) => run.group },
      { title: "tags", key: "tags", isExtra: true, of: (run) => tagsOf(run), show: (run) => tagsOf(run) },
      ...data.keys.map((key) => ({ title: key.replace(/^config\./, ""), key, isExtra: true, of: (run) => sortValue(run.keys[key] ?? ""), show: (run) => cut(run.keys[key] ?? "", 24) })),
      { title: "state", key: "state", of: (run) => run.state, show: (run) => badge(run.kind, run.state) },
      { title: "progress", key: "progress", of: (run) => (run.values && run.values.total_steps ? run.values.step / run.values.total_steps : null), show: (run) => (run.values ? progressCell(run) : "") },
      { title: "loss trend", show: (run) => (run.trend.length > 1 ? sparkline(run.trend, "trend of the loss") : "") },
      { title: "loss", key: "loss", of: value("loss"), show: (run) => run.loss },
      { title: "best validation", key: "best", of: value("best_validation_loss"), show: (run) => run.validation },
      { title: "tokens / s", key: "speed", of: value("tokens_per_second"), show: (run) => run.speed },
      { title: "MFU", key: "mfu", of: value("mfu"), show: (run) => run.mfu },
      { title: "goodput", key: "goodput", of: value("goodput"), show: (run) => run.goodput },
      { title: "time left", key: "left", of: value("left_seconds"), show: (run) => run.left },
      {
        title: "last sign of life", key: "alive", of: value("alive"), show: (run) => {
          const alive = run.values && run.values.alive;
          return alive ? element("span", { title: clock(alive) }, `${duration(Math.max(now - alive, 0))} ago`) : "";
        },
      },
    ];
    const isShown = (column) => column.key === "name" || Boolean(column.isExtra) === state.columns.has(column.key ?? column.title);
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const textIn = (run) => [run.name, run.state, run.project, run.group, tagsOf(run), ...Object.entries(run.keys).map(([key, text]) => `${key}=${text}`)].join(" ").toLowerCase();
    const shown = words.length ? data.table.filter((run) => { const text = textIn(run); return words.every((word) => text.includes(word)); }) : data.table;
    filterField.value = state.filter;
    const choices = columns.slice(1).map((column) => {
      const box = element("input", { type: "checkbox", checked: isShown(column) ? "" : null, onchange: () => toggle("columns", column.key ?? column.title) });
      return element("label", {}, box, column.title);
    });
    const chosen = [...state.chosen].slice(0, COMPARED_MAX);
    const compare = chosen.length > 1 ? element("a", { class: "button", href: `run/${chosen.join(",")}` }, `compare ${chosen.length} runs`)
      : element("span", { class: "note" }, "tick up to ten runs to compare them");
    const notes = data.notes.map((text) => element("p", { class: "note" }, text));
    const tally = element("span", { class: "note" }, shown.length === data.table.length ? `${count(shown.length)} runs` : `${count(shown.length)} of ${count(data.table.length)} runs`);
    if (!data.table.length && !data.sweeps.length) {
      const next = element("div", { class: "empty" }, element("p", {}, "No runs here yet. Start the first one:"), copied(data.next));
      return [data.notes.length ? null : next, ...notes];
    }
    const sweeps = data.sweeps.length ? element("section", { id: "sweeps" }, element("h2", {}, "Sweeps"), table(["sweep", "runs", "best", "settings of the best"],
      data.sweeps.map((sweep) => [element("a", { href: `sweep/${sweep.id}` }, sweep.name), sweep.counts, sweep.best, sweep.values]))) : null;
    if (!data.table.length) return [sweeps, ...notes];
    return [
      sweeps, sweeps && element("h2", {}, "Other runs"), element("div", { class: "controls" }, filterField, tally, compare), section("columns", "Columns", element("div", { class: "choices" }, ...choices)),
      sortable(columns.filter(isShown), shown, null, { key: "alive", isDescending: true, name: "newest activity" }), ...notes,
    ];
  }

  // Returns the table of hosts, in the order of the server: the most suspect first.
  function hosts(data) {
    const last = (host) => host.incidents[0];
    const columns = [
      { title: "host", key: "host", of: (host) => host.name, show: (host) => element("span", { title: host.machine ? `machine ${host.machine}` : null }, host.name) },
      { title: "state", key: "suspect", of: (host) => (host.suspect ? 0 : 1), show: (host) => (host.suspect ? badge("bad", "suspect") : "") },
      { title: "incidents", key: "incidents", of: (host) => Object.values(host.counts).reduce((sum, each) => sum + each, 0), show: (host) => host.words },
      { title: "attempts", key: "attempts", of: (host) => host.attempts, show: (host) => count(host.attempts) },
      { title: "time", key: "time", of: (host) => host.seconds, show: (host) => duration(host.seconds) },
      {
        title: "last incident", key: "last", of: (host) => (last(host) ? last(host).time : null), show: (host) => {
          if (!last(host)) return "";
          const { time, kind, run, attempt, step, devices } = last(host);
          const words = [kind.replaceAll("_", " "), ...devices, run, `attempt ${attempt}`, step === null ? "before its first step" : `step ${count(step)}`, clock(time)];
          return words.join(", ");
        },
      },
      { title: "to avoid it", show: (host) => (host.suspect && host.exclude.length ? element("span", {}, ...host.exclude.map(copied)) : "") },
    ];
    const notes = [data.rule, data.hosts.length < data.num_hosts ? `${count(data.num_hosts - data.hosts.length)} more hosts are not shown` : null, ...data.notes];
    return [
      data.hosts.length ? sortable(columns, data.hosts) : element("p", { class: "empty" }, "No hosts are recorded yet."),
      ...notes.filter(Boolean).map((text) => element("p", { class: "note" }, text)), section("kinds", "Kinds of incidents", table(null, data.kinds, "facts")),
    ];
  }

  // A sweep: all its runs in each chart, coloured by their rank or by the value of a key.

  const RAMP = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"]; // viridis
  const LEVELS = 24; // runs of one level share a trace
  const rowsMax = () => (isNarrow() ? 4 : 12); // of the table until all are asked for
  const AXES_MAX = 12; // of the parallel coordinates

  // Returns the colour of a share from 0 to 1, the strongest at 1: the end of the ramp that is pale on the page is left out.
  function ramp(share) {
    const place = (isDark.matches ? 0.15 + 0.85 * share : 0.88 * (1 - share)) * (RAMP.length - 1);
    const [low, part] = [Math.min(Math.floor(place), RAMP.length - 2), place - Math.min(Math.floor(place), RAMP.length - 2)];
    const channel = (colour, index) => parseInt(colour.slice(1 + 2 * index, 3 + 2 * index), 16);
    return `rgb(${[0, 1, 2].map((index) => Math.round(channel(RAMP[low], index) * (1 - part) + channel(RAMP[low + 1], index) * part)).join(",")})`;
  }

  const quantile = (sorted, share) => sorted[Math.round(share * (sorted.length - 1))];
  const ascending = (values) => values.filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  // Returns a number between -1 and 1 that is always the same for one run, so that its points do not lie over those of others.
  const jitter = (index) => 2 * ((index * 0.618034) % 1) - 1;

  // Returns the colours of the runs by the chosen key, and the legend of them.
  function sweepColours(sweep) {
    const { runs, keys } = sweep;
    const key = keys.findIndex((each) => each.key === state.colour);
    const chosen = keys[key];
    const gradient = (from, to) => {
      const bar = element("span", { class: "gradient" });
      bar.style.background = `linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map(ramp).join(", ")})`;
      return element("span", { class: "named" }, `${from} `, bar, ` ${to}`);
    };
    if (!chosen) {
      const last = Math.max(...runs.map((run) => run.rank ?? 0), 1);
      const shares = runs.map((run) => (run.rank === null ? null : 1 - run.rank / last));
      const legend = [gradient("worst", "best"), element("span", { class: "note" }, "grey: not ranked")];
      return { shares, of: (index) => (shares[index] === null ? GREY : ramp(level(shares[index]))), legend };
    }
    if (chosen.categories) {
      const of = (index) => (chosen.numbers[index] === null ? GREY : colourOf(chosen.numbers[index]));
      const legend = chosen.categories.map((text, index) => element("span", { class: "named" }, stroke(colourOf(index), "solid", 3), ` ${text}`));
      return { shares: runs.map(() => null), of, legend };
    }
    const [scale, known] = [scaleOfKey(chosen), ascending(chosen.numbers)];
    const span = scale(known[known.length - 1]) - scale(known[0]) || 1;
    const shares = chosen.numbers.map((value) => (value === null ? null : (scale(value) - scale(known[0])) / span));
    return { shares, of: (index) => (shares[index] === null ? GREY : ramp(level(shares[index]))), legend: [gradient(count6(known[0]), count6(known[known.length - 1]))] };
  }

  const level = (share) => Math.round(share * (LEVELS - 1)) / (LEVELS - 1);
  const scaleOfKey = (key) => (key.log ? Math.log10 : (value) => value);
  const describeRun = (sweep, index) => sweep.keys.map((key, place) => [key.title, sweep.runs[index].values[place]]).filter(([, text]) => text !== "");

  function showRun(sweep, { points, event }) {
    const index = points[0] && points[0].customdata;
    const run = sweep.runs[index];
    if (!run) return tooltip.remove();
    const rows = [["state", run.state], ["step", count(run.step)], [sweep.metric, run.metric === null ? "" : count6(run.metric)], ...describeRun(sweep, index)];
    tooltip.replaceChildren(element("strong", {}, `run ${run.name}${run.rank === null ? "" : `, rank ${run.rank + 1}`}`),
      element("table", {}, element("tbody", {}, ...rows.filter(([, text]) => text !== "").map((row) => element("tr", {}, ...row.map((text) => element("td", {}, text)))))));
    placeTooltip(event);
  }

  function sweepPlot(sweep, id, traces, drawn) {
    const made = plot(id, traces, drawn);
    queue.push(() => {
      made.sweep = sweep;
      if (made.dataset.linked) return;
      made.dataset.linked = "yes";
      made.on("plotly_hover", (found) => showRun(made.sweep, found));
      made.on("plotly_unhover", () => tooltip.remove());
      made.on("plotly_click", ({ points }) => {
        const run = made.sweep.runs[points[0].customdata];
        if (run) setTimeout(() => toggle("marked", run.name));
      });
    });
    return made;
  }

  // Returns the runs in the order in which they are drawn: the best and the marked ones last, over the others.
  const drawnOrder = (sweep) => sweep.runs.map((run, index) => index).sort((a, b) => {
    const place = ({ name, rank }) => [state.marked.has(name) ? 1 : 0, rank === null ? -Infinity : -rank];
    const [left, right] = [place(sweep.runs[a]), place(sweep.runs[b])];
    return left[0] - right[0] || (left[1] === right[1] ? 0 : left[1] - right[1]);
  });

  // Returns traces of lines, one for each colour; `of` returns x and y of a run.
  function sweepLines(sweep, tint, of, more = {}) {
    const few = sweep.runs.length <= 40;
    const traces = new Map();
    for (const index of drawnOrder(sweep)) {
      const run = sweep.runs[index];
      const [x, y] = of(run, index);
      if (!x.length) continue;
      const [isBest, isMarked] = [run.name === sweep.best, state.marked.has(run.name)];
      const colour = isMarked ? style("--text") : tint.of(index);
      const name = isBest || isMarked ? `run ${run.name}` : colour;
      if (!traces.has(name)) {
        const width = isMarked ? 3 : isBest ? 3.5 : few ? 1.8 : 1.2;
        // Marked runs stand out among others that are faint.
        const opacity = isMarked || (isBest && !state.marked.size) ? 1 : state.marked.size ? 0.25 : few ? 0.9 : 0.7;
        traces.set(name, { type: "scatter", mode: x.length === 1 ? "markers" : "lines", x: [], y: [], customdata: [], opacity, line: { color: colour, width, ...more }, marker: { color: colour, size: 4 }, hoverinfo: "none", connectgaps: false });
      }
      const trace = traces.get(name);
      trace.x.push(...x, null); trace.y.push(...y, null); trace.customdata.push(...x.map(() => index), null);
    }
    return [...traces.values()];
  }

  const SIGNS = { done: "circle", stopped: "circle-open", broken: "x", on: "diamond" };

  // Returns the range of values worth looking at: the end of most runs, not their first steps or the worst of them.
  function endRange(sweep, name) {
    const last = Math.max(...sweep.runs.map((run) => (run.curves[name] && run.curves[name].step[run.curves[name].step.length - 1]) || 0));
    const late = ascending(sweep.runs.flatMap((run) => (run.curves[name] ? run.curves[name].value.filter((value, index) => run.curves[name].step[index] >= 0.12 * last) : [])));
    if (late.length < 3) return null;
    const all = [late[0], late[late.length - 1]];
    const [low, high] = sweep.maximised ? [quantile(late, 0.08), all[1]] : [all[0], quantile(late, 0.92)];
    const margin = 0.06 * (high - low);
    return margin ? [low - margin, high + margin] : null;
  }

  function sweepCurves(sweep, name, title, unit, tint) {
    const known = sweep.runs.filter((run) => run.curves[name] && run.curves[name].step.length);
    if (!known.length) return null;
    const lines = sweepLines(sweep, tint, (run) => (run.curves[name] ? [run.curves[name].step, run.curves[name].value] : [[], []]));
    const ends = { type: "scatter", mode: "markers", x: [], y: [], customdata: [], hoverinfo: "none", marker: { color: [], symbol: [], size: 7 } };
    for (const index of drawnOrder(sweep)) {
      const run = sweep.runs[index];
      if (!run.curves[name] || !run.curves[name].step.length || run.mark === "done") continue;
      ends.x.push(run.curves[name].step[run.curves[name].step.length - 1]); ends.y.push(run.curves[name].value[run.curves[name].value.length - 1]); ends.customdata.push(index);
      ends.marker.color.push(run.mark === "broken" ? style("--bad") : tint.of(index)); ends.marker.symbol.push(SIGNS[run.mark]);
    }
    const drawn = layout("optimizer steps", { height: isNarrow() ? 300 : 400 });
    drawn.xaxis.tickformat = "~s";
    const form = sweep.form === "share" && name === "metric" ? "share" : "";
    Object.assign(drawn.yaxis, scaleOf({ form, auto: false, zero: false }, lines, null));
    const range = state.scale === "auto" ? endRange(sweep, name) : null;
    if (range) Object.assign(drawn.yaxis, { type: "linear", range });
    drawn.uirevision = `${state.scale} ${range}`;
    const last = Math.max(...known.map((run) => run.curves[name].step[run.curves[name].step.length - 1]));
    let before = -Infinity;
    for (const [step, stopped] of sweep.rungs) {
      drawn.shapes = [...(drawn.shapes || []), { type: "line", xref: "x", yref: "paper", x0: step, x1: step, y0: 0, y1: 1, layer: "below", line: { color: GREY, width: 1, dash: "dot" } }];
      if (step - before < (isNarrow() ? 0.22 : 0.1) * last) continue;
      before = step;
      drawn.annotations = [...(drawn.annotations || []), { x: step, y: 1, xref: "x", yref: "paper", yanchor: "bottom", showarrow: false, text: `${count(stopped)} stopped`, font: { size: 11, color: style("--quiet") } }];
    }
    const caption = element("figcaption", {}, title, element("span", { class: "unit" }, ` ${unit}`));
    return element("figure", { class: "half" }, caption, sweepPlot(sweep, `curves ${name}`, ends.x.length ? [...lines, ends] : lines, drawn));
  }

  // Returns the range of the metric without values that are far from the best ones, which would flatten the others.
  function metricRange(sweep) {
    const known = ascending(sweep.runs.filter((run) => run.mark !== "broken").map((run) => run.metric));
    if (known.length < 2) return null;
    const [low, high, middle] = [known[0], known[known.length - 1], quantile(known, 0.5)];
    const reach = sweep.maximised ? Math.max(low, high - 4 * (high - middle || high - low)) : Math.min(high, low + 4 * (middle - low || high - low));
    const [from, to] = sweep.maximised ? [reach, high] : [low, reach];
    return from < to ? [from, to] : null;
  }

  const ticksOfLog = (low, high) => {
    const [from, to] = [Math.log10(low), Math.log10(high)];
    const parts = to - from < 1.3 ? [1, 2, 5] : [1];
    const found = [];
    for (let decade = Math.floor(from); decade <= to; decade++) for (const part of parts) if (part * 10 ** decade >= low * 0.999 && part * 10 ** decade <= high * 1.001) found.push(part * 10 ** decade);
    return found.length > 1 ? found : [low, high];
  };
  const ticksOf = (key, known) => {
    const [low, high] = [known[0], known[known.length - 1]];
    if (new Set(known).size <= 5) return [...new Set(known)];
    return key.log ? ticksOfLog(low, high) : roundTicks(low, high);
  };
  // Returns three to eight round numbers between two others.
  function roundTicks(low, high) {
    const size = 10 ** Math.floor(Math.log10((high - low) / 3));
    const step = size * [5, 2, 1].find((part) => (high - low) / (part * size) >= 3);
    const begin = Math.ceil(low / step - 1e-9);
    return Array.from({ length: Math.floor(high / step + 1e-9) - begin + 1 }, (_, index) => (begin + index) * step);
  }
  const textOfTick = (value) => (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5) ? Number(value.toPrecision(3)).toExponential().replace("e+", "e") : String(Number(value.toPrecision(3))));

  function sweepScatter(sweep, place, tint) {
    const key = sweep.keys[place];
    const range = metricRange(sweep);
    if (!range || key.numbers.filter((value) => value !== null).length < 2) return null;
    const margin = 0.07 * (range[1] - range[0]);
    const worst = sweep.maximised ? range[0] - margin : range[1] + margin;
    // Where few values have many runs, their points are spread a little.
    const [known, scale] = [ascending(key.numbers), scaleOfKey(key)];
    const [low, high] = [known[0], known[known.length - 1]];
    const spread = key.categories ? 0.22 : new Set(known).size <= 6 && known.length > 20 ? 0.02 * (scale(high) - scale(low)) : 0;
    const spreadOut = (value, index) => (key.log ? value * 10 ** (spread * jitter(index)) : value + spread * jitter(index));
    const trace = { type: "scatter", mode: "markers", x: [], y: [], customdata: [], hoverinfo: "none", marker: { color: [], symbol: [], size: [], opacity: sweep.runs.length > 100 ? 0.75 : 0.9, line: { width: 1, color: [] } } };
    for (const index of drawnOrder(sweep)) {
      const [run, value] = [sweep.runs[index], key.numbers[index]];
      if (value === null || (run.metric === null && run.mark !== "broken")) continue;
      const isFar = run.mark === "broken" || run.metric < range[0] || run.metric > range[1];
      const [isBest, isMarked] = [run.name === sweep.best, state.marked.has(run.name)];
      trace.x.push(spreadOut(value, index));
      trace.y.push(isFar ? worst : run.metric);
      trace.customdata.push(index);
      trace.marker.color.push(isMarked ? style("--text") : run.mark === "broken" ? style("--bad") : tint.of(index));
      trace.marker.line.color.push(isBest || isMarked ? style("--text") : run.mark === "stopped" ? tint.of(index) : "rgba(0,0,0,0)");
      trace.marker.symbol.push(isBest ? "star" : isFar && run.mark !== "broken" ? (sweep.maximised ? "triangle-down" : "triangle-up") : SIGNS[run.mark]);
      trace.marker.size.push(isBest ? 15 : isMarked ? 11 : sweep.runs.length > 100 ? 6 : 8);
    }
    if (!trace.x.length) return null;
    const drawn = layout("", { height: 220 });
    Object.assign(drawn.yaxis, { range: [Math.min(range[0] - margin, worst - margin), Math.max(range[1] + margin, worst + margin)], tickformat: sweep.form === "share" ? ".0%" : undefined, nticks: 5, zeroline: false });
    if (key.categories) {
      const texts = key.categories.map((text) => plain(text.length > 14 ? `${text.slice(0, 13)}…` : text));
      Object.assign(drawn.xaxis, { range: [-0.6, key.categories.length - 0.4], tickmode: "array", tickvals: texts.map((text, index) => index), ticktext: texts, zeroline: false, showgrid: false });
    } else if (key.log) {
      const pad = 0.05 * (Math.log10(high / low) || 1);
      const ticks = ticksOf(key, known);
      Object.assign(drawn.xaxis, { type: "log", range: [Math.log10(low) - pad, Math.log10(high) + pad], tickmode: "array", tickvals: ticks, ticktext: ticks.map(textOfTick) });
    } else {
      const pad = 0.05 * (high - low) || 0.5;
      const few = new Set(known).size <= 5 ? { tickmode: "array", tickvals: [...new Set(known)], ticktext: [...new Set(known)].map(textOfTick) } : {};
      Object.assign(drawn.xaxis, { range: [low - pad, high + pad], nticks: 5, zeroline: false, ...few });
    }
    drawn.uirevision = `${low} ${high}`;
    const caption = element("figcaption", {}, key.title, element("span", { class: "unit" }, key.key === key.title ? "" : ` ${key.key}`));
    return element("figure", {}, caption, sweepPlot(sweep, `scatter ${key.key}`, [trace], drawn));
  }

  // Returns the parallel coordinates, drawn as lines: those of Plotly need WebGL, and compile code, which the page forbids.
  function sweepParallel(sweep, tint) {
    const range = metricRange(sweep);
    const keys = sweep.keys.map((key, place) => ({ ...key, place })).filter((key) => key.place !== sweep.seed && new Set(key.numbers).size > 1).slice(0, AXES_MAX);
    if (!range || !keys.length || sweep.runs.filter((run) => run.metric !== null).length < 3) return null;
    const isUpright = isNarrow(); // on a narrow page the axes lie over each other
    const clip = (value) => Math.min(Math.max(value, 0), 1);
    const axes = keys.map((key) => {
      const isMissing = key.numbers.includes(null);
      const bottom = isMissing ? 0.14 : 0; // below it stand the runs without the key
      const known = ascending(key.numbers);
      const [low, high] = [known[0], known[known.length - 1]];
      const scale = scaleOfKey(key);
      const at = key.categories
        ? (value) => bottom + (1 - bottom) * (key.categories.length > 1 ? value / (key.categories.length - 1) : 0.5)
        : (value) => bottom + (1 - bottom) * (high > low ? (scale(value) - scale(low)) / (scale(high) - scale(low)) : 0.5);
      const ticks = key.categories ? key.categories.map((text, index) => [at(index), text]) : ticksOf(key, known).map((value) => [at(value), textOfTick(value)]);
      return { title: key.title, ticks: isMissing ? [[0, "not set"], ...ticks] : ticks, of: (run, index) => (key.numbers[index] === null ? 0 : at(key.numbers[index]) + (key.categories && key.categories.length > 1 ? 0.025 * jitter(index) : 0)) };
    });
    const share = (value) => (sweep.form === "share" ? share100(value) : String(Number(value.toPrecision(4))));
    axes.push({
      title: sweep.metric, ticks: roundTicks(...range).map((value) => [(value - range[0]) / (range[1] - range[0]), share(value)]),
      of: (run) => (run.metric === null ? null : clip((run.metric - range[0]) / (range[1] - range[0]))),
    });
    const lines = sweepLines(sweep, tint, (run, index) => {
      if (run.metric === null || run.mark === "broken") return [[], []];
      const [place, value] = [axes.map((axis, each) => each), axes.map((axis) => axis.of(run, index))];
      return isUpright ? [value, place] : [place, value];
    });
    if (!lines.length) return null;
    const drawn = layout("", { height: isUpright ? 84 * axes.length + 20 : 400, shapes: [], annotations: [] });
    const width = (document.documentElement.clientWidth - 90) / axes.length;
    const most = Math.max(Math.floor(width / 7), 6);
    const cutText = (text, length) => plain(text.length > length ? `${text.slice(0, length - 1)}…` : text);
    axes.forEach((axis, place) => {
      const ends = isUpright ? { x0: 0, x1: 1, y0: place, y1: place } : { x0: place, x1: place, y0: 0, y1: 1 };
      drawn.shapes.push({ type: "line", ...ends, layer: "below", line: { color: style("--quiet"), width: 1.5 } });
      const isLast = place === axes.length - 1;
      const title = { showarrow: false, bgcolor: style("--panel"), font: { size: 12, color: style("--text") }, text: `<b>${cutText(axis.title, isUpright ? 40 : most)}</b>` };
      drawn.annotations.push(isUpright ? { ...title, x: 0, y: place, xanchor: "left", yanchor: "bottom", yshift: 5 } : { ...title, x: place, y: 1, xanchor: isLast ? "right" : place ? "center" : "left", yanchor: "bottom", yshift: 8 });
      let before = -Infinity;
      for (const [at, text] of [...axis.ticks].sort((a, b) => a[0] - b[0])) {
        if (at - before < (isUpright ? 0.16 : 0.06)) continue;
        before = at;
        const tick = { showarrow: false, font: { size: 11, color: style("--text") }, bgcolor: style("--panel"), borderpad: 1, opacity: 0.85, text: cutText(text, isUpright ? 8 : most) };
        drawn.annotations.push(isUpright ? { ...tick, x: at, y: place, xanchor: at < 0.05 ? "left" : at > 0.95 ? "right" : "center", yanchor: "top", yshift: -3 } : { ...tick, x: place, y: at, xanchor: isLast ? "right" : "left", xshift: isLast ? -4 : 4 });
      }
    });
    const hidden = { visible: false, showgrid: false, zeroline: false, fixedrange: true };
    const along = { ...hidden, range: isUpright ? [axes.length - 0.6, -0.55] : [-0.03, axes.length - 0.97] };
    const across = { ...hidden, range: isUpright ? [-0.02, 1.02] : [-0.04, 1.04] };
    Object.assign(drawn.xaxis, isUpright ? across : along);
    Object.assign(drawn.yaxis, isUpright ? along : across);
    drawn.margin = { l: 10, r: 10, t: isUpright ? 10 : 34, b: 10 };
    drawn.uirevision = String(isUpright);
    const left = sweep.keys.length - keys.length - (sweep.seed === null ? 0 : 1);
    const caption = element("figcaption", {}, "Parallel coordinates", element("span", { class: "unit" }, ` a line for each run${left > 0 ? `; ${left} more keys are left out` : ""}`));
    return element("figure", { class: "wide" }, caption, sweepPlot(sweep, "parallel", lines, drawn));
  }

  function sweepTable(sweep) {
    const link = (run) => {
      const top = first.source ? first.top : state.data.links && state.data.links.top;
      const chip = element("button", { type: "button", class: "chip mark", "aria-pressed": String(state.marked.has(run.name)), title: "mark in all charts", onclick: () => toggle("marked", run.name) },
        stroke(state.marked.has(run.name) ? style("--text") : sweep.tint.of(sweep.runs.indexOf(run)), "solid", 3), run.name);
      const page = run.address && top ? element("a", { href: `${top}run/${run.address}` }, "page") : null;
      return element("span", {}, chip, page, run.name === sweep.best ? element("span", { class: "best" }, "★ best") : null);
    };
    const columns = [
      { title: "run", key: "label", of: (run) => run.name, show: link },
      { title: sweep.metric, key: "rank", of: (run) => run.rank ?? Infinity, show: (run) => metricText(sweep, run.metric) },
      ...sweep.keys.map((key, place) => ({ title: cut(key.title, 28), key: key.key, of: (run) => sortValue(run.values[place]), show: (run) => cut(run.values[place], 24) })),
      { title: "state", key: "state", of: (run) => run.state, show: (run) => element("span", { class: `state ${run.kind}`.trim(), title: run.reason || null }, run.state) },
      { title: "progress", key: "step", of: (run) => run.step, show: (run) => progressCell({ values: { step: run.step, total_steps: run.total }, steps: run.total ? `${count(run.step)} / ${count(run.total)}` : count(run.step) }) },
      { title: "time", key: "time", of: (run) => run.seconds, show: (run) => duration(run.seconds ?? NaN) },
    ];
    const isAll = state.open.has("all runs") || sweep.runs.length <= rowsMax();
    const made = sortable(columns, sweep.runs, (run) => (run.name === sweep.best ? "best-row" : null), { key: "rank", isDescending: false, name: "rank" }, isAll ? Infinity : rowsMax());
    const more = sweep.runs.length <= rowsMax() ? null : element("p", {}, element("button", { type: "button", onclick: () => { state.open[isAll ? "delete" : "add"]("all runs"); draw(); } }, isAll ? `show the first ${rowsMax()} runs only` : `show all ${count(sweep.runs.length)} runs`));
    const marked = sweep.runs.filter((run) => state.marked.has(run.name) && run.address).slice(0, COMPARED_MAX);
    const compare = first.source && marked.length > 1 ? element("p", {}, element("a", { class: "button", href: `${first.top}run/${marked.map((run) => run.address).join(",")}` }, `compare ${marked.length} marked runs`)) : null;
    return element("section", {}, made, more, compare);
  }

  const metricText = (sweep, value) => (value === null ? "" : sweep.form === "share" ? share100(value) : fixed(value));

  // Returns the means over the seeds of each setting, from the best to the worst.
  function sweepSettings(sweep) {
    if (!sweep.settings.length) return null;
    const places = sweep.keys.map((key, place) => place).filter((place) => place !== sweep.seed);
    const rows = sweep.settings.map((setting) => [
      element("span", {}, metricText(sweep, setting.mean), setting.best ? element("span", { class: "best" }, "★ best") : null),
      setting.deviation === null ? "" : `± ${Number(setting.deviation.toPrecision(2))}`, `${setting.count} of ${setting.runs}`, ...places.map((place) => cut(setting.values[place], 24)),
    ]);
    return section("settings", "Settings, by the mean over their finished seeds", table([`mean ${sweep.metric}`, "deviation", "seeds", ...places.map((place) => sweep.keys[place].title)], rows, "settings"));
  }

  function sweepPage(data) {
    const { sweep } = data;
    sweep.tint = sweepColours(sweep);
    if (!state.open.has("settings seen")) state.open.add("settings").add("settings seen");
    const choice = element("select", { "aria-label": "colour by", onchange: (event) => { state.colour = event.target.value; draw(); } },
      element("option", { value: "" }, "rank"), ...sweep.keys.map((key) => element("option", { value: key.key, selected: key.key === state.colour ? "" : null }, key.title)));
    const scales = [["auto", "the end"], ["linear", "all, linear"], ["log", "all, log"]].map(([value, text]) => element("button", { type: "button", "aria-pressed": String(state.scale === value), onclick: () => { state.scale = value; draw(); } }, text));
    const controls = element("div", { class: "controls" }, element("label", { class: "choice" }, element("span", {}, "colour by"), choice), element("div", { class: "names" }, ...sweep.tint.legend),
      element("div", { class: "choice", role: "group", "aria-label": "curves show" }, element("span", {}, "curves show"), ...scales),
      state.marked.size ? element("button", { type: "button", onclick: () => { state.marked.clear(); draw(); } }, "unmark all runs") : null);
    const curves = [sweepCurves(sweep, "metric", sweep.metric[0].toUpperCase() + sweep.metric.slice(1), sweep.unit, sweep.tint), sweepCurves(sweep, "loss", "Training loss", "mean of neighbouring rows", sweep.tint)].filter(Boolean);
    const scatters = sweep.keys.map((key, place) => (place === sweep.seed ? null : sweepScatter(sweep, place, sweep.tint))).filter(Boolean);
    const hasRungs = sweep.rungs.length ? " Dotted lines: steps at which the rule has stopped runs." : "";
    const legend = `Circles at the end of a curve: stopped by the rule; crosses: diverged or failed; diamonds: goes on.${hasRungs} Click on a curve, a point or the name of a run to mark it everywhere.`;
    const problems = sweep.runs.filter((run) => run.mark === "broken" && run.reason).map((run) => element("li", {}, `${run.name}: ${run.reason}`));
    return [
      element("div", { class: "tiles" }, ...sweep.tiles.map(tile)),
      data.notes && data.notes.length ? element("ul", { class: "warnings" }, ...data.notes.map((text) => element("li", {}, text))) : null,
      sweepSettings(sweep), sweepTable(sweep),
      curves.length || scatters.length ? controls : element("p", { class: "empty" }, "No rows yet."),
      laws(data.law ? [{ id: "root", law: data.law }] : []),
      element("div", { class: "grid pair" }, ...curves), curves.length ? element("p", { class: "note" }, legend) : null,
      scatters.length ? element("h2", {}, `${sweep.metric[0].toUpperCase() + sweep.metric.slice(1)} over each key`) : null, element("div", { class: "grid" }, ...scatters, sweepParallel(sweep, sweep.tint)),
      scatters.length ? element("p", { class: "note" }, "Crosses at the edge: diverged or failed. Triangles at the edge: beyond it.") : null,
      problems.length ? section("problems", `Runs with a problem (${count(problems.length)})`, element("ul", { class: "warnings" }, ...problems.slice(0, 20))) : null,
      sweep.rule.length ? section("rule", "How the runs were chosen", table(null, sweep.rule, "facts")) : null,
    ];
  }

  // The field outlives a redraw, so that whoever types in it is not interrupted.
  const filterField = element("input", { type: "search", placeholder: "name, state, project, tag, key=value", "aria-label": "filter runs", oninput: (event) => { state.filter = event.target.value; draw(); } });

  // The page.

  // Breaks a curve over time where an attempt ended and the next one began.
  function breakBetween(run, series) {
    if (!series.seconds || series.time) return;
    const starts = run.attempts.map((attempt) => attempt.began - run.began).filter((start) => start > 0);
    series.time = { x: [], y: [] };
    let next = 0;
    series.seconds.forEach((seconds, index) => {
      if (seconds === null) return;
      if (next < starts.length && seconds >= starts[next]) {
        while (next < starts.length && seconds >= starts[next]) next += 1;
        if (index) { series.time.x.push(null); series.time.y.push(null); }
      }
      series.time.x.push(seconds);
      series.time.y.push(series.value[index]);
    });
  }

  function prepare(data) {
    for (const run of data.runs || []) for (const chart of Object.values(run.charts)) for (const series of chart) for (const part of [series, series.means]) if (part) breakBetween(run, part);
    (data.runs || []).forEach((run, index) => {
      run.colour = colours()[index % colours().length];
      run.dash = DASHES[Math.floor(index / colours().length) % DASHES.length];
    });
    return data;
  }

  function draw() {
    const data = prepare(state.data);
    document.title = data.title;
    writeView();
    // The field loses the focus when it moves into the new table.
    const held = document.activeElement === filterField;
    const caret = [filterField.selectionStart, filterField.selectionEnd];
    queue = [];
    const links = [];
    if (first.source && !data.table && !data.is_top) links.push(element("a", { href: first.top }, "all runs"));
    if (first.source && data.sweep && data.sweep_id) links.push(element("a", { href: `${first.top}report/sweep/${data.sweep_id}${location.hash}` }, "report: this page as one file"));
    if (data.table && data.table.length) links.push(element("a", { href: "hosts" }, "hosts"));
    if (first.source && data.run_ids) links.push(element("a", { href: `${first.top}report/${data.run_ids}${location.hash}` }, "report: this page as one file"));
    if (data.links) links.push(element("a", { href: data.links.top }, "all runs"), element("a", { href: data.links.live }, "live page"));
    const made = [element("header", {}, element("h1", {}, data.title), links.length ? element("nav", {}, ...links) : null)];
    if (data.problem) made.push(element("p", { class: "warnings" }, data.problem));
    else if (data.table) made.push(...overview(data));
    else if (data.hosts) made.push(...hosts(data));
    else if (data.sweep) made.push(...sweepPage(data));
    else {
      const shown = data.runs.filter((run) => !state.hidden.has(run.id));
      const isOne = data.runs.length === 1;
      if (data.notes && data.notes.length) made.push(element("ul", { class: "warnings" }, ...data.notes.map((text) => element("li", {}, text))));
      made.push(isOne ? element("div", { class: "tiles" }, ...data.runs[0].tiles.map(tile)) : comparison(data, data.runs), warnings(data.runs),
        isOne && data.runs[0].end && data.runs[0].log ? log(data.runs[0]) : null, laws(shown), charts(data, shown), mediaSection(shown), stages(shown), time(data, shown), facts(data.runs), ...tables(data, shown));
    }
    made.push(element("footer", {}, first.source ? "This page updates itself." : `Created at ${clock(data.made)}.`));
    const { scrollX, scrollY } = window;
    page.replaceChildren(...made.filter(Boolean));
    if (held) { filterField.focus(); filterField.setSelectionRange(...caret); }
    for (const act of queue) act();
    window.scrollTo(scrollX, scrollY);
  }

  let version = "";
  async function poll() {
    try {
      if ((!document.hidden && !isHeld()) || !state.data) {
        const answer = await fetch(first.source, { headers: version ? { "If-None-Match": version } : {}, cache: "no-store" });
        if (answer.ok) {
          version = answer.headers.get("ETag") || "";
          state.data = await answer.json();
          draw();
        } else if (answer.status !== 304) throw new Error(`${answer.status} ${answer.statusText}`);
      }
      document.body.classList.remove("offline");
    } catch (error) {
      document.body.classList.add("offline");
      if (!state.data) page.replaceChildren(element("p", {}, `The server does not respond: ${error.message}. Retrying.`));
    }
    setTimeout(poll, POLL_MILLISECONDS);
  }

  readView();
  window.addEventListener("scroll", () => tooltip.remove(), { passive: true });
  window.addEventListener("hashchange", () => { readView(); if (state.data) draw(); });
  isDark.addEventListener("change", () => state.data && draw());
  window.matchMedia("(max-width: 600px)").addEventListener("change", () => state.data && draw());
  if (first.source) poll();
  else {
    state.data = first;
    draw();
  }
})();
