"use strict";
// Curves with bands and one cursor, histograms by step.
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [4, 2]];
const COLOURS = ["--accent", "--bad", "--good", "--ink", "--soft"];
const charts = [];

// Colours and dashes of a run: no two of 25 have both alike.
function penOf(k) {
  return [colour(COLOURS[k % COLOURS.length]), DASHES[(k + Math.floor(k / COLOURS.length)) % DASHES.length]];
}

function clearCharts() {
  while (charts.length) charts.pop().destroy();
}

function names(runs) {
  const found = new Map();
  runs.forEach((run) => run.curves.forEach((curve) => found.has(curve.name) || found.set(curve.name, curve)));
  return new Map([...found].sort((one, other) => one[1].rank - other[1].rank));
}

// Small multiples of all curves that the runs have; several runs lie in the same axes.
function curvesOf(runs) {
  const grid = h("div", { class: "grid" }), span = [Math.min(...runs.map((run) => run.span[0])), Math.max(...runs.map((run) => run.span[1]))];
  const places = [];
  for (const [name, first] of names(runs)) {
    const of = runs.map((run) => run.curves.find((curve) => curve.name === name));
    const readings = of.map((curve, k) => curve && h("span", {}, runs.length > 1 ? runs[k].name + ": " : "", curve.reading));
    const now = h("span", { class: "now" }, first.about);
    const plot = h("div", { role: "img", "aria-label": first.title + ": " + of.map((c) => c && c.reading).join("; ") });
    grid.append(h("figure", {}, h("figcaption", {}, h("b", {}, first.title), readings, now), plot));
    places.push(() => drawCurve(plot, now, of, first, span));
  }
  requestAnimationFrame(() => places.forEach((draw) => draw()));
  return grid;
}

const WHOLE = [1, 2, 5].flatMap((one) => [0, 1, 2, 3, 4, 5, 6].map((power) => one * 10 ** power)).sort((a, b) => a - b);

// Room around what is drawn; a value that never changes lies in the middle.
function roomy(u, low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 ? [-.1, 1] : [low - Math.abs(low) / 10, low + Math.abs(low) / 10];
  return uPlot.rangeNum(low, high, .1, true);
}

// Decades around what is drawn, and at most six of them as ticks: the lines between would be a smear.
function decades(u, low, high) {
  const end = (value, round) => round(Math.log10(value) + (round === Math.ceil ? -1e-9 : 1e-9));
  if (low === null || high === null || low <= 0) return [.1, 1];
  const from = end(low, Math.floor), to = Math.max(from + 1, end(high, Math.ceil));
  return [10 ** from, 10 ** to];
}

function decadeTicks(u, axis, low, high) {
  const from = Math.round(Math.log10(low)), to = Math.round(Math.log10(high)), by = Math.ceil((to - from) / 5);
  return Array.from({ length: Math.floor((to - from) / by) + 1 }, (_, k) => Number("1e" + (from + k * by)));
}

// The interval of each evaluation, seen also where there is a single one and no band.
function bars(u, curve, stroke) {
  const { ctx, bbox } = u, at = (value, axis) => u.valToPos(value, axis, true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left - 4, bbox.top, bbox.width + 8, bbox.height);
  ctx.clip();
  ctx.beginPath();
  curve.x.forEach((step, k) => {
    if (curve.low[k] === null || curve.high[k] === null) return;
    ctx.moveTo(at(step, "x"), at(curve.low[k], "y"));
    ctx.lineTo(at(step, "x"), at(curve.high[k], "y"));
  });
  ctx.strokeStyle = typeof stroke === "function" ? stroke() : stroke;
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.globalAlpha = .6;
  ctx.stroke();
  ctx.restore();
}

function drawCurve(place, now, of, first, span) {
  if (!place.isConnected) return;
  const series = [{}], bands = [], tables = [], isLog = of.every((curve) => !curve || curve.log);
  of.forEach((curve, k) => {
    if (!curve) return;
    const [stroke, dash] = penOf(k), start = series.length;
    tables.push([curve.x, curve.raw, curve.y, curve.low, curve.high]);
    const few = curve.x.length < 40;
    series.push({ stroke: "transparent", width: 0, points: { show: of.length === 1, size: few || curve.points ? 5 : 3, width: 0, fill: curve.points ? stroke : colour("--soft") }, spanGaps: true });
    series.push({ stroke, width: 2, dash, points: { show: Boolean(curve.points), size: 6 }, spanGaps: true });
    series.push({ stroke: "transparent", width: 0, points: { show: false }, spanGaps: true }, { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true });
    if (of.length < 3) bands.push({ series: [start + 3, start + 2], fill: of.length === 1 ? colour("--band") : stroke + "22" });
  });
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const options = {
    width: Math.max(240, place.clientWidth), height: 186, series, bands, legend: { show: false },
    scales: { x: { time: false, range: () => span }, y: isLog ? { distr: 3, range: decades } : { range: roomy } },
    axes: [{ ...axis, size: 26, incrs: WHOLE, label: "step", labelSize: 16, labelGap: -2, labelFont: axis.font }, { ...axis, size: 52, values: (u, ticks) => (isLog ? ticks.map((t) => (t === null ? "" : t.toExponential(0))) : labels(ticks)), ...(isLog ? { splits: decadeTicks, filter: (u, ticks) => ticks } : {}) }],
    cursor: { sync: { key: "steps", setSeries: false }, y: false, points: { show: false } },
    hooks: { draw: [(u) => of.filter(Boolean).forEach((curve, k) => curve.points && bars(u, curve, series[2 + 4 * k].stroke))], setCursor: [(u) => {
      const at = u.cursor.idx;
      if (at === null || at === undefined) { now.textContent = first.about; return; }
      const values = of.map((curve, k) => curve && (of.length > 1 ? DATA.runs[k].name + " " : "") + shown(u.data[2 + 4 * of.slice(0, k).filter(Boolean).length][at])).filter(Boolean);
      const low = u.data[3][at], high = u.data[4][at];
      const band = values.length === 1 && low !== null && low !== undefined ? " [" + shown(low) + ", " + shown(high) + "]" : "";
      now.textContent = "step " + u.data[0][at] + ": " + values.join(", ") + band;
    }] },
  };
  const plot = new uPlot(options, uPlot.join(tables), place);
  plot.over.addEventListener("click", () => { if (plot.cursor.idx !== null) set({ step: plot.data[0][plot.cursor.idx] }, false); });
  charts.push(plot);
}

const HISTOGRAMS = [["reward", "reward"], ["advantage", "advantage"], ["length", "length"], ["entropy", "entropy, nats"], ["log_ratio", "log ratio"], ["mismatch", "mismatch, nats"]];

function nearest(rows, step) {
  if (!rows.length) return null;
  const wanted = step ?? rows[rows.length - 1].step;
  return rows.reduce((best, row) => (Math.abs(row.step - wanted) < Math.abs(best.step - wanted) ? row : best));
}

// The counts of all steps as a map, and those of one step as bars.
function histogramsOf(run) {
  const rows = run.histograms[state.hist] || [];
  if (!rows.length) return h("p", { class: "soft" }, "No histograms: the run had output.traces=false, or no step is finished.");
  const row = nearest(rows, state.step), total = row.counts.reduce((a, b) => a + b, 0);
  const bars = h("table", { "aria-label": "counts of step " + row.step }, h("tbody", {}, row.counts.map((count, k) => {
    const bar = h("i", {});
    bar.style.cssText = "display:block;height:11px;background:" + colour("--accent") + ";width:" + (100 * count / Math.max(1, ...row.counts)).toFixed(1) + "%";
    return count || (row.edges[k + 1] > 0 && row.edges[k] < 1 && rows.length < 3) ? h("tr", {}, h("td", { class: "number" }, shown(row.edges[k]) + " to " + shown(row.edges[k + 1])), h("td", { class: "number" }, count), (() => { const cell = h("td", {}, bar); cell.style.width = "60%"; return cell; })()) : null;
  })));
  bars.style.width = "100%";
  const slider = stepSlider(rows.map((row) => row.step), row.step, (step) => set({ step }));
  return h("div", {},
    h("div", { class: "bar" }, buttons("histogram", HISTOGRAMS.filter(([name]) => (run.histograms[name] || []).length), state.hist, (hist) => set({ hist })), slider),
    h("div", { class: "hist" },
      h("figure", {}, h("figcaption", {}, h("b", {}, "step " + row.step), total + " in all; empty bins are left out"), bars),
      h("figure", {}, h("figcaption", {}, h("b", {}, "all steps"), "a column a step, strong where many are; lowest bin at the bottom"), heatMap(rows, row))));
}

function heatMap(rows, chosen) {
  const width = 480, height = 200, w = width / rows.length;
  const edges = rows.map((r) => r.edges), low = Math.min(...edges.map((e) => e[0])), high = Math.max(...edges.map((e) => e[e.length - 1]));
  const even = state.hist === "reward" || state.hist === "advantage" || state.hist === "length";
  const y = (value, k, n) => (even ? (value - low) / (high - low || 1) : k / n);
  const made = svg("svg", { viewBox: "0 0 " + width + " " + (height + 18), role: "img", "aria-label": "histograms of all steps" });
  rows.forEach((row, place) => {
    const most = Math.max(1, ...row.counts), n = row.counts.length;
    row.counts.forEach((count, k) => {
      if (!count) return;
      const top = y(row.edges[k + 1], k + 1, n), bottom = y(row.edges[k], k, n);
      const cell = svg("rect", { x: place * w, y: height * (1 - top), width: Math.max(w - .4, .6), height: Math.max(height * (top - bottom) - .4, .6), fill: colour("--accent"), "fill-opacity": (.08 + .92 * count / most).toFixed(3) });
      made.append(cell);
    });
    if (row === chosen) made.append(svg("rect", { x: place * w, y: 0, width: Math.max(w - .4, 1), height, fill: "none", stroke: colour("--ink"), "stroke-width": 1.2 }));
  });
  const label = (x, text, anchor) => { const made = svg("text", { x, y: height + 13, "font-size": 11, fill: colour("--soft"), "text-anchor": anchor }); made.textContent = text; return made; };
  made.append(label(0, "step " + rows[0].step, "start"), label(width, String(rows[rows.length - 1].step), "end"));
  return made;
}
