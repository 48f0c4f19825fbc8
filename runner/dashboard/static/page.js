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
  const POLL_MILLISECONDS = 2000;
  const state = { axis: "step", log: true, hidden: new Set(), open: new Set(["charts"]), data: null };
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
    const cells = (tag, row) => row.map((cell) => element(tag, {}, cell instanceof Node ? cell : String(cell)));
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

  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "";
    const units = [["d", 86400], ["h", 3600], ["min", 60]];
    for (const [name, size] of units) if (seconds >= 2 * size) return `${(seconds / size).toFixed(1)} ${name}`;
    return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  }

  const bytes = (number) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let index = 0;
    for (; number >= 1024 && index < units.length - 1; index++) number /= 1024;
    return `${number.toFixed(index && number < 100 ? 1 : 0)} ${units[index]}`;
  };
  const clock = (seconds) => (seconds ? new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 19) + "Z" : "");
  const count = (number) => (number === null || number === undefined ? "" : Number(number).toLocaleString("en-US"));

  // Charts.

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function timeUnit(seconds) {
    if (seconds > 3 * 86400) return ["days", 86400];
    if (seconds > 3 * 3600) return ["hours", 3600];
    return seconds > 300 ? ["minutes", 60] : ["seconds", 1];
  }

  function layout(x, y, more) {
    const axis = { gridcolor: style("--grid"), zerolinecolor: style("--grid"), linecolor: style("--grid"), automargin: true };
    return Object.assign(
      {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", uirevision: "stays",
        font: { color: style("--text"), family: style("--font"), size: 12 },
        margin: { l: 12, r: 12, t: 8, b: 12 }, hovermode: "closest", showlegend: false, height: 300,
        legend: { orientation: "h", traceorder: "normal", y: 1.02, yanchor: "bottom", x: 0 },
        hoverlabel: { bgcolor: style("--panel"), font: { color: style("--text") } },
        xaxis: { ...axis, title: { text: plain(x) } }, yaxis: { ...axis, title: { text: plain(y) } },
      },
      more,
    );
  }

  function plot(id, traces, drawn) {
    if (!plots.has(id)) plots.set(id, element("div", { class: "plot" }));
    const made = plots.get(id);
    const config = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "toImage"] };
    queue.push(() => Plotly.react(made, traces, drawn, config));
    return made;
  }
  let queue = []; // plots to draw once their elements are on the page, since Plotly reads their width

  function axisOf(runs) {
    if (state.axis === "step") return { title: "optimizer steps", of: (run, series) => series.step };
    if (state.axis === "tokens") return { title: "tokens", of: (run, series) => series.tokens };
    const longest = Math.max(1, ...runs.map((run) => run.seconds || 0));
    const [name, size] = timeUnit(longest);
    const shift = (run, value) => (value === null ? null : value / size);
    return {
      title: `wall time since the first start (${name})`, size,
      of: (run, series) => series.seconds && series.seconds.map((value) => shift(run, value)),
    };
  }

  function seriesTraces(chart, runs, axis) {
    const traces = [];
    const alone = runs.length === 1;
    const keys = [...new Set(runs.flatMap((run) => (run.charts[chart.title] || []).map((series) => series.key)))];
    for (const run of runs) {
      for (const series of run.charts[chart.title] || []) {
        const index = keys.indexOf(series.key);
        const isSparse = series.value.length <= 60 || !series.key.startsWith("train/");
        const isByTime = state.axis === "time";
        const x = isByTime ? series.time && series.time.x.map((value) => value && value / axis.size) : axis.of(run, series);
        if (!x) continue;
        const colour = alone ? colours()[index % colours().length] : run.colour;
        traces.push({
          type: "scatter", mode: isSparse && index ? "lines+markers" : "lines", x, y: isByTime ? series.time.y : series.value,
          name: plain(alone ? series.key : `${run.label}: ${series.key}`), showlegend: alone && keys.length > 1,
          line: { color: colour, width: index ? 2 : 1.4, dash: alone ? "solid" : run.dash },
          marker: { color: colour, symbol: SYMBOLS[index % SYMBOLS.length], size: 6 },
          hovertemplate: `%{x:,} · %{y:.6g}<extra>${plain(alone ? series.key : run.label).replace(/%/g, "%\u200b")}</extra>`,
        });
        if (series.broken.value.length) {
          const places = axis.of(run, series.broken) || [];
          const level = Math.max(...series.value.filter((value) => value !== null), 1e-9);
          traces.push({
            type: "scatter", mode: "markers", x: places, y: places.map(() => level), showlegend: false,
            marker: { color: "#D55E00", symbol: "x", size: 10 }, hovertemplate: "%{x:,} · not finite<extra></extra>",
          });
        }
      }
    }
    if (!alone && keys.length > 1) {
      keys.forEach((key, index) => traces.push({
        type: "scatter", mode: index ? "lines+markers" : "lines", x: [null], y: [null], name: plain(key), showlegend: true,
        line: { color: style("--text"), width: index ? 2 : 1.4 }, marker: { symbol: SYMBOLS[index % SYMBOLS.length], size: 6 },
      }));
    }
    return traces;
  }

  // Returns the number of powers of ten that the curves span.
  function decades(traces) {
    let [low, high] = [Infinity, 0];
    for (const trace of traces) for (const value of trace.y) if (value > 0) [low, high] = [Math.min(low, value), Math.max(high, value)];
    return high ? Math.log10(high / low) : 0;
  }

  // Returns shapes that mark where attempts resumed and which steps were recomputed, on the current axis.
  function marks(runs, axis) {
    if (runs.length !== 1) return [];
    const [run] = runs;
    const place = (step, seconds) => {
      if (state.axis === "step") return step;
      if (state.axis === "time") return seconds === null || run.began === null ? null : (seconds - run.began) / axis.size;
      return run.tokens_per_step ? step * run.tokens_per_step : null;
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
    const isCrowded = run.attempts.length > 60;
    const shape = { type: "path", xref: "x", yref: "paper", layer: "below" };
    return [
      bands && { ...shape, path: bands, fillcolor: style("--ghost"), line: { width: 0 } },
      lines && { ...shape, path: lines, opacity: isCrowded ? 0.15 : 1, line: { color: GREY, width: 1, dash: isCrowded ? "solid" : "dot" } },
    ].filter(Boolean);
  }

  function charts(data, runs) {
    const axis = axisOf(runs);
    const shapes = marks(runs, axis);
    const made = [];
    for (const chart of data.charts) {
      const traces = seriesTraces(chart, runs, axis);
      if (!traces.length) continue;
      const drawn = layout(axis.title, chart.unit, { shapes });
      drawn.showlegend = traces.some((trace) => trace.showlegend);
      drawn.uirevision = state.axis;
      if (state.axis === "time") drawn.xaxis.rangemode = "tozero";
      if (chart.log && state.log) Object.assign(drawn.yaxis, { type: "log", dtick: decades(traces) > 3 ? 1 : "D2", exponentformat: "e" });
      else drawn.yaxis.rangemode = "tozero";
      made.push(element("figure", {}, element("figcaption", {}, chart.title), plot(`chart ${chart.title}`, traces, drawn)));
    }
    const drawnPoints = runs.map((run) => `${run.label}: ${count(run.rows)} rows, ${run.thinning}`);
    const notes = [element("p", { class: "note" }, drawnPoints.join("; "))];
    if (shapes.length) {
      notes.push(element("p", { class: "note" }, "Dotted lines, or thin ones if there are many: an attempt resumed here. Grey bands: steps that were lost and " +
        "recomputed; their rows are removed from metrics.jsonl, so there is no curve of them."));
    }
    if (!made.length) notes.push(element("p", {}, state.axis === "time" ? "These rows have no timestamps." : "No rows yet."));
    return section("charts", "Curves", controls(), element("div", { class: "grid" }, ...made), ...notes);
  }

  function controls() {
    const button = (text, isOn, act) => element("button", { type: "button", "aria-pressed": String(isOn), onclick: () => { act(); draw(); } }, text);
    const axes = [["step", "by step"], ["tokens", "by tokens"], ["time", "by time"]];
    return element(
      "div", { class: "controls" },
      ...axes.map(([name, text]) => button(text, state.axis === name, () => { state.axis = name; })),
      button("logarithmic", state.log, () => { state.log = !state.log; }),
    );
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
    const drawn = layout(`wall time since the first start (${unit})`, "attempt", {
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
      const points = [[attempt.stepping - run.began, attempt.resumed], ...own];
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
      marker: { color: colours()[0], symbol: "diamond", size: 7 }, text: run.saves.map((save) => [save.bytes === null ? "" : bytes(save.bytes), save.seconds === null ? "" : `durable after ${duration(save.seconds)}`].filter(Boolean).join(", ")),
      hovertemplate: "step %{y:,} committed: %{text}<extra></extra>",
    };
    const drawn = layout(`wall time since the first start (${unit})`, "optimizer steps", { showlegend: true });
    return plot(`progress ${run.id}`, [kept, lostSteps, saves], drawn);
  }

  function goodput(runs) {
    const [unit, size] = timeUnit(Math.max(1, ...runs.map((run) => run.seconds || 0)));
    const traces = runs.filter((run) => run.goodput.length).map((run) => ({
      type: "scatter", mode: "lines+markers", x: run.goodput.map(([time]) => (time - run.began) / size), y: run.goodput.map(([, share]) => share),
      line: { color: run.colour, dash: run.dash, width: 2 }, marker: { size: 5 }, name: plain(run.label),
      hovertemplate: `%{x:.4g} · %{y:.1%}<extra>${plain(run.label).replace(/%/g, "%\u200b")}</extra>`,
    }));
    const drawn = layout(`wall time since the first start (${unit})`, "time of surviving steps / wall time", {});
    Object.assign(drawn.yaxis, { tickformat: ".0%", range: [0, 1.02] });
    return plot("goodput", traces, drawn);
  }

  function share(data, run) {
    const traces = [];
    for (const bucket of data.buckets) {
      const seconds = run.buckets[bucket.name] || 0;
      const trace = bars(data, bucket.name, bucket.label);
      Object.assign(trace, { base: undefined, x: [seconds / total(run)], y: [""], hovertemplate: "%{x:.2%}<extra>" + plain(bucket.label) + "</extra>" });
      if (seconds) traces.push(trace);
    }
    const drawn = layout("share of wall time", "", { barmode: "stack", height: 120 });
    Object.assign(drawn.xaxis, { tickformat: ".0%", range: [0, 1] });
    return plot(`share ${run.id}`, traces, drawn);
  }

  const total = (run) => Object.values(run.buckets).reduce((sum, seconds) => sum + seconds, 0) || 1;

  function buckets(data, runs) {
    const heads = ["bucket", ...runs.flatMap((run) => (runs.length > 1 ? [run.label, ""] : ["time", "share"])), "meaning"];
    const rows = data.buckets.map((bucket) => [
      withSwatch(data, bucket),
      ...runs.flatMap((run) => [duration(run.buckets[bucket.name] || 0), `${(100 * (run.buckets[bucket.name] || 0) / total(run)).toFixed(2)}%`]),
      bucket.meaning,
    ]);
    return table(heads, rows, "buckets");
  }

  function time(data, runs) {
    const known = runs.filter((run) => run.began !== null && run.attempts.length);
    if (!known.length) return null;
    const isMany = known.length > 3;
    const figure = (text, ...children) => element("figure", {}, element("figcaption", {}, text), ...children);
    const made = [figure("Goodput so far", goodput(known)), figure("Where the time went", ...known.flatMap((run) => [known.length > 1 ? element("div", {}, run.label) : null, share(data, run)]), buckets(data, known))];
    for (const run of known) {
      const title = (text) => (runs.length > 1 ? `${run.label}: ${text}` : text);
      const own = [
        figure(title("Attempts, one lane each: time by bucket; the order within a lane has no meaning"), ...timeline(data, run)),
        figure(title("Progress, with lost steps dotted"), progress(run)),
      ];
      made.push(...(isMany ? [section(`time ${run.id}`, run.label, ...own)] : own));
    }
    if (!state.open.has("time seen")) state.open.add("time").add("time seen");
    return section("time", "Where the time went", ...made);
  }

  // Facts and tables.

  function summary(runs) {
    const facts = [...new Set(runs.flatMap((run) => run.facts.map(([name]) => name)))];
    const rows = facts.map((fact) => [fact, ...runs.map((run) => (run.facts.find(([name]) => name === fact) || ["", ""])[1])]);
    const warnings = runs.flatMap((run) => run.warnings.map((text) => element("li", {}, runs.length > 1 ? `${run.label}: ${text}` : text)));
    return element("section", {}, table(runs.length > 1 ? ["", ...runs.map((run) => run.label)] : null, rows, "facts"),
      warnings.length ? element("ul", { class: "warnings" }, ...warnings) : null);
  }

  function legend(runs) {
    if (runs.length < 2) return null;
    return element("div", { class: "legend" }, ...runs.map((run) => {
      const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
      for (const [name, value] of Object.entries({ width: 28, height: 8 })) line.setAttribute(name, value);
      const dash = { solid: "", dash: "6 3", dot: "2 2", dashdot: "6 2 2 2" }[run.dash];
      for (const [name, value] of Object.entries({ x1: 0, x2: 28, y1: 4, y2: 4, stroke: run.colour, "stroke-width": 3, "stroke-dasharray": dash })) stroke.setAttribute(name, value);
      line.append(stroke);
      const toggle = () => { state.hidden[state.hidden.has(run.id) ? "delete" : "add"](run.id); draw(); };
      return element("button", { type: "button", "aria-pressed": String(!state.hidden.has(run.id)), onclick: toggle }, line, run.label);
    }));
  }

  function tables(data, runs) {
    const made = [];
    if (data.differences.length) {
      if (!state.open.has("differences seen")) state.open.add("differences").add("differences seen");
      made.push(section("differences", "Differences of the specs", table(["key", ...data.runs.map((run) => run.label)], data.differences.map(([key, values]) => [key, ...values]), "code")));
    }
    for (const run of runs) {
      const title = (text) => (runs.length > 1 ? `${text}: ${run.label}` : text);
      const attempts = run.attempts.map((each) => [each.number, clock(each.began), duration(each.ended - each.began), each.how, count(each.resumed), count(each.reached), count(each.lost)]);
      const heads = ["attempt", "began", "lasted", "how it ended", "from step", "to step", "steps lost"];
      const saves = run.checkpoints.map((save) => [save.name, save.bytes === null ? "" : bytes(save.bytes), clock(save.time), save.text]);
      made.push(
        section(`attempts ${run.id}`, title(`Attempts (${run.attempts.length})`), table(heads, attempts.reverse())),
        section(`checkpoints ${run.id}`, title(`Checkpoints (${run.checkpoints.length})`), table(["checkpoint", "size", "committed", ""], saves)),
        section(`environment ${run.id}`, title("Environment and versions"), table(null, run.environment, "facts")),
        section(`spec ${run.id}`, title("Spec"), element("pre", {}, run.spec)),
        section(`events ${run.id}`, title("Newest events"), element("pre", {}, run.events.join("\n"))),
      );
      if (run.log) made.push(section(`log ${run.id}`, title(`Log: ${run.log.name}`), element("pre", { class: "log" }, run.log.text)));
    }
    return made;
  }

  // The table of all runs.

  function sparkline(values) {
    const drawn = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (const [name, value] of Object.entries({ viewBox: "0 0 100 24", width: 100, height: 24, role: "img", "aria-label": "trend of the loss" })) drawn.setAttribute(name, value);
    const known = values.filter((value) => value !== null);
    if (known.length < 2) return drawn;
    const low = Math.min(...known);
    const high = Math.max(...known);
    const points = values.map((value, index) => [index, value]).filter(([, value]) => value !== null);
    const text = points.map(([index, value]) => `${(2 + 96 * index / (values.length - 1)).toFixed(1)},${(22 - 20 * (value - low) / (high - low || 1)).toFixed(1)}`).join(" ");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    for (const [name, value] of Object.entries({ points: text, fill: "none", stroke: colours()[0], "stroke-width": 1.5 })) line.setAttribute(name, value);
    drawn.append(line);
    return drawn;
  }

  function overview(data) {
    const rows = data.table.map((run) => [
      element("a", { href: `run/${run.id}` }, run.name), element("span", { class: `state ${run.kind}` }, run.state), run.steps,
      sparkline(run.trend), run.loss, run.validation, run.speed, run.left, run.goodput, clock(run.alive),
    ].map((cell) => (cell === undefined ? "" : cell)));
    const heads = ["run", "state", "steps", "loss trend", "loss", "best validation", "speed", "time left", "goodput", "last sign of life"];
    const notes = data.notes.map((text) => element("p", { class: "note" }, text));
    return [rows.length ? table(heads, rows, "runs") : element("p", {}, "No runs here yet."), ...notes];
  }

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
    for (const run of data.runs || []) for (const chart of Object.values(run.charts)) chart.forEach((series) => breakBetween(run, series));
    (data.runs || []).forEach((run, index) => {
      run.colour = colours()[index % colours().length];
      run.dash = DASHES[Math.floor(index / colours().length) % DASHES.length];
    });
    return data;
  }

  function draw() {
    const data = prepare(state.data);
    document.title = data.title;
    queue = [];
    const made = [element("h1", {}, data.title)];
    if (first.source && !data.table) made.push(element("p", {}, element("a", { href: first.top }, "all runs")));
    if (data.problem) made.push(element("p", { class: "warnings" }, data.problem));
    else if (data.table) made.push(...overview(data));
    else {
      const shown = data.runs.filter((run) => !state.hidden.has(run.id));
      made.push(summary(data.runs), legend(data.runs), charts(data, shown), time(data, shown), ...tables(data, shown));
    }
    made.push(element("footer", {}, first.source ? "This page updates itself." : `Created at ${clock(data.made)}.`));
    const { scrollX, scrollY } = window;
    page.replaceChildren(...made.filter(Boolean));
    for (const act of queue) act();
    window.scrollTo(scrollX, scrollY);
  }

  let version = "";
  async function poll() {
    try {
      if (!document.hidden || !state.data) {
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

  isDark.addEventListener("change", () => state.data && draw());
  if (first.source) poll();
  else {
    state.data = first;
    draw();
  }
})();
