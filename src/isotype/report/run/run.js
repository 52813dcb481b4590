"use strict";
// The curves of a run report: uPlot draws them from the columns in #run-data. Nothing is loaded from anywhere.
{
const page = JSON.parse(document.getElementById("run-data").textContent);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const finite = (value) => typeof value === "number" && Number.isFinite(value);

// ------------------------------------------------------------------------------------------------ columns of a run
const cumulative = (values) => { let sum = 0; return values.map((value) => (sum += finite(value) ? value : 0)); };

const derived = (columns) => ({
  ...columns,
  tokens_per_second: columns.tokens.map((tokens, i) => (columns.seconds[i] > 0 ? tokens / columns.seconds[i] : null)),
  memory_gib: columns.memory_bytes.map((bytes) => (bytes ? bytes / 2 ** 30 : null)),
  loss_scale_exponent: columns.loss_scale.map((scale) => (scale > 0 ? Math.log2(scale) : null)),
});

const runOf = (label, columns, evals) => {
  const steps = derived(columns);
  const seconds = cumulative(steps.seconds), tokens = cumulative(steps.tokens);
  const before = (step) => { let at = -1; while (at + 1 < steps.step.length && steps.step[at + 1] <= step) at++; return at; };
  const along = { step: steps.step, tokens, minutes: seconds.map((value) => value / 60) };
  const heldAlong = {
    step: evals.step,
    tokens: evals.step.map((step) => tokens[before(step)] ?? 0),
    minutes: evals.step.map((step) => (seconds[before(step)] ?? 0) / 60),
  };
  return { label, steps, evals, along, heldAlong };
};

// The list of records in a run_report.json as columns; NaN and infinities stand there as text.
const columnsOf = (records, names) =>
  Object.fromEntries(names.map((name) => [name, records.map((record) =>
    ({ ...record, ...Object.fromEntries(record.metrics ?? []) })[name] ?? null)]));

const runs = [runOf(page.label, page.steps, page.evals)];

// ---------------------------------------------------------------------------------------------------- axes and text
const AXES = { step: "optimizer step", tokens: "tokens seen", minutes: "minutes of training" };
const state = { axis: "step", window: 0, all: false };

const plain = (value, digits = 4) => {
  if (!finite(value)) return String(value ?? "–").replace("Infinity", "∞");
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2).replace("e+", "e");
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, Math.ceil(Math.log10(size + 1))) });
};
const power = (exponent) => (finite(exponent) ? (exponent >= 0 && exponent < 20 ? (2 ** exponent).toLocaleString("en") : `2^${exponent}`) : "–");
// Steps and tokens are counted: no tick between two of them.
const WHOLE = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
const incrementsOf = (along) => (along === "minutes" ? undefined : WHOLE);
const compact = (value) => (value >= 1e4 ? Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 }).format(value) : plain(value));

// The median of up to five neighbours, of finite values only: a single spike does not move it.
const calmed = (values) => values.map((value, i) => {
  if (!finite(value)) return null;
  const near = values.slice(Math.max(0, i - 2), i + 3).filter(finite).sort((a, b) => a - b);
  return near.length % 2 ? near[near.length >> 1] : (near[near.length / 2 - 1] + near[near.length / 2]) / 2;
});

// A least-squares line through the values around each, taken at its middle (Savitzky-Golay of degree 1).
const smooth = (spiky, window) => calmed(spiky).map((value, i, values) => {
  if (value === null) return null;
  let n = 0, sx = 0, sy = 0, sxx = 0, sxy = 0;
  for (let k = Math.max(0, i - (window >> 1)); k <= Math.min(values.length - 1, i + (window >> 1)); k++) {
    if (!finite(values[k])) continue;
    const x = k - i; n++; sx += x; sy += values[k]; sxx += x * x; sxy += x * values[k];
  }
  const spread = n * sxx - sx * sx;
  return spread ? (sy * sxx - sx * sxy) / spread : sy / n;
});
const windowOf = (run) => state.window || run.steps.step.length < 12 ? state.window || 1 : (Math.min(201, run.steps.step.length / 10) | 1);

// Limits that one spike does not stretch: the range of the running median of five, unless all values are asked for. Of few
// values, or where more than one in twenty lies beyond, none is a spike.
const limits = (columns, from, to) => {
  let low = Infinity, high = -Infinity, calm = [Infinity, -Infinity];
  const all = [];
  for (const { xs, ys } of columns) {
    const seen = ys.filter((value, i) => finite(value) && xs[i] >= from && xs[i] <= to), medians = calmed(seen);
    all.push(...seen);
    seen.forEach((value, i) => {
      low = Math.min(low, value); high = Math.max(high, value);
      calm = [Math.min(calm[0], medians[i]), Math.max(calm[1], medians[i])];
    });
  }
  const width = calm[1] - calm[0];
  if (state.all || !(width > 0) || all.length < 30) return [low, high];
  const [floor, ceiling] = [low < calm[0] - width ? calm[0] - width / 3 : low, high > calm[1] + width ? calm[1] + width / 3 : high];
  const beyond = all.filter((value) => value < floor || value > ceiling).length;
  return beyond > all.length / 20 ? [low, high] : [floor, ceiling];
};

// ------------------------------------------------------------------------------------------------------------ charts
const plots = [];
const sync = uPlot.sync("run");
const reset = document.getElementById("reset-zoom");
let zoom = null;

// One horizontal range for all charts, so that they line up.
const whole = () => {
  const all = runs.flatMap((run) => [...run.along[state.axis], ...run.heldAlong[state.axis]]);
  const [from, to] = all.reduce(([low, high], x) => [Math.min(low, x), Math.max(high, x)], [Infinity, -Infinity]);
  return from < to ? { min: from, max: to } : { min: from - 0.5, max: to + 0.5 };
};

const zoomTo = (range) => {
  zoom = range;
  reset.hidden = range === null;
  for (const { plot } of plots) plot.setScale("x", range ?? whole());
};

const seriesOf = (chart) => runs.flatMap((run, other) => {
  const dash = other ? [6, 4] : undefined, tone = (name) => (other ? "--other" : name);
  const named = (label) => (other ? `${label}, ${run.label}` : label);
  const found = chart.columns.filter((name) => run.steps[name]?.some((value) => value !== null)).map((name, position) => ({
    xs: run.along[state.axis], ys: run.steps[name], label: named(chart.labels[position]),
    tone: tone(["--main", "--accent", "--good", "--warn"][position % 4]), dash, stairs: chart.stairs, faint: chart.smooth && windowOf(run) > 1,
  }));
  const window = windowOf(run);
  if (chart.smooth) found.push(...found.filter(() => window > 1).map((raw) => ({
    ...raw, ys: smooth(raw.ys, window), label: `${raw.label}, smoothed over ${window}`, faint: false, smoothed: true })));
  if (chart.held && run.evals.step.length) found.push({
    xs: run.heldAlong[state.axis], ys: run.evals.loss, label: named("held-back"), tone: tone("--accent"), dash, points: true });
  return found;
});

const draw = (chart) => {
  const figure = document.getElementById(`chart-${chart.id}`), holder = figure.querySelector(".plot");
  const readout = figure.querySelector(".readout"), legend = figure.querySelector(".keys");
  holder.replaceChildren();
  const shown = seriesOf(chart);
  if (!shown.length) return;
  const write = chart.format === "power" ? power : plain;
  const data = uPlot.join(shown.map(({ xs, ys }) => [xs, ys.map((value) => (finite(value) ? value : null))]));
  // Of neighbouring gaps join makes undefined, which lines cross; null they do not.
  const xs = data[0];
  const beyond = [];
  const range = (u, low, high) => {
    const view = zoom ?? whole();
    let [from, to] = limits(shown, view.min, view.max);
    if (!(to >= from)) [from, to] = [0, 1];
    if (chart.zero) [from, to] = [Math.min(0, from), Math.max(0, to)];
    const air = to - from > 1e-9 * Math.max(Math.abs(from), Math.abs(to)) ? (to - from) * 0.06 : Math.abs(to) * 0.1 || 0.5;
    return [chart.zero && from === 0 ? 0 : from - air, to + air];
  };
  const stroke = (tone, faint) => () => {
    const colour = css(tone);
    return faint ? `color-mix(in srgb, ${colour} 45%, transparent)` : colour;
  };
  const axis = { stroke: () => css("--muted"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { show: false },
    font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif", labelSize: 16, labelGap: 2 };
  const broken = runs.flatMap((run) => chart.columns.flatMap((name) => (run.steps[name] ?? [])
    .map((value, i) => (typeof value === "string" ? run.along[state.axis][i] : null)).filter((x) => x !== null)));
  const plot = new uPlot({
    width: Math.max(200, holder.clientWidth), height: figure.classList.contains("wide") ? 300 : 178,
    padding: [8, 14, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: sync.key, setSeries: false }, drag: { x: true, y: false, uni: 8 }, points: { size: 6 } },
    scales: { x: { time: false, range: (u, min, max) => (zoom === null && min === xs[0] && max === xs[xs.length - 1] ? [whole().min, whole().max] : [min, max]) }, y: { range } },
    axes: [
      { ...axis, label: AXES[state.axis], size: 26, values: (u, at) => at.map(compact), incrs: incrementsOf(state.axis) },
      { ...axis, label: chart.unit, size: 58, values: (u, at) => at.map((value) => write(value)), incrs: chart.format === "power" ? [1, 2, 4, 8, 16] : undefined },
    ],
    series: [{}, ...shown.map((one) => ({
      label: one.label, stroke: stroke(one.tone, one.faint), width: one.faint ? 1 : 1.8, dash: one.dash,
      paths: one.stairs ? uPlot.paths.stepped({ align: 1 }) : undefined,
      points: { show: one.points || one.xs.length < 3 ? true : undefined, size: one.points ? 8 : 5, fill: stroke(one.tone), stroke: () => css("--panel") },
    }))],
    hooks: {
      drawClear: [(u) => {
        const { ctx, bbox } = u;
        ctx.save();
        ctx.fillStyle = `color-mix(in srgb, ${css("--broken")} 30%, transparent)`;
        for (const x of broken) ctx.fillRect(u.valToPos(x, "x", true) - 1.5, bbox.top, 3, bbox.height);
        ctx.restore();
      }],
      draw: [(u) => {
        const { ctx, bbox } = u, { min, max } = u.scales.y;
        ctx.save();
        let out = 0;
        shown.filter((one) => !one.smoothed).forEach((one) => one.ys.forEach((value, i) => {
          const x = one.xs[i];
          if (!finite(value) || (value >= min && value <= max) || x < u.scales.x.min || x > u.scales.x.max) return;
          out++;
          const up = value > max, at = u.valToPos(x, "x", true), edge = up ? bbox.top : bbox.top + bbox.height, step = (up ? 7 : -7) * devicePixelRatio;
          ctx.fillStyle = css(one.tone);
          ctx.beginPath(); ctx.moveTo(at, edge); ctx.lineTo(at - 4 * devicePixelRatio, edge + step); ctx.lineTo(at + 4 * devicePixelRatio, edge + step); ctx.fill();
        }));
        beyond[0] = out;
        for (const x of chart.marks.map((step) => runs[0].along[state.axis][runs[0].steps.step.indexOf(step)])) {
          ctx.fillStyle = css("--broken");
          ctx.fillRect(u.valToPos(x, "x", true) - 1, bbox.top + bbox.height - 10 * devicePixelRatio, 2, 10 * devicePixelRatio);
        }
        ctx.restore();
        rest();
      }],
      setScale: [(u, key) => {
        if (key !== "x" || u.status === 0) return;
        const { min, max } = u.scales.x, all = whole(), full = min <= all.min && max >= all.max;
        const same = zoom === null ? full : min === zoom.min && max === zoom.max;
        if (!same) zoomTo(full ? null : { min, max });
      }],
      setCursor: [(u) => {
        const at = u.cursor.idx;
        if (at === null || at === undefined || u.cursor.left < 0) return rest();
        const words = shown.map((one, i) => [one, data[i + 1][at]]).filter(([one, value]) => finite(value) && !(one.faint && windowOf(runs[0]) > 1 && shown.length > 4))
          .map(([one, value]) => `${one.label} ${write(value)}`);
        readout.textContent = [`${state.axis === "minutes" ? "minute" : state.axis === "step" ? "step" : "tokens"} ${compact(xs[at])}`, ...words].join(" · ");
      }],
    },
  }, data, holder);
  function rest() {
    const outside = beyond[0] ? `${beyond[0]} beyond the axis` : "";
    readout.textContent = [outside, chart.remark].filter(Boolean).join(" · ");
  }
  legend.replaceChildren(...(shown.length > 1 ? shown : []).map((one) => {
    const key = document.createElement("span");
    key.className = `key ${one.points ? "dot" : "rule"}${one.faint ? " faint" : ""}${one.dash ? " dashed" : ""}`;
    key.style.setProperty("--tone", `var(${one.tone})`);
    key.textContent = one.label;
    return key;
  }));
  plots.push({ plot, holder });
};

const drawAll = () => {
  for (const { plot } of plots.splice(0)) plot.destroy();
  zoom = null;
  reset.hidden = true;
  for (const chart of page.charts) draw(chart);
};
drawAll();

// ---------------------------------------------------------------------------------------------------------- controls
const on = (id, event, act) => document.getElementById(id).addEventListener(event, act);
on("axis", "change", (event) => { state.axis = event.target.value; drawAll(); });
on("smoothing", "input", (event) => { state.window = Number(event.target.value) ? Number(event.target.value) * 2 + 1 : 0; drawAll(); });
on("all-values", "change", (event) => { state.all = event.target.checked; drawAll(); });
on("reset-zoom", "click", () => zoomTo(null));
on("csv", "click", () => {
  const names = Object.keys(page.steps), held = new Map(page.evals.step.map((step, i) => [step, page.evals.loss[i]]));
  const rows = page.steps.step.map((step, i) => [...names.map((name) => page.steps[name][i] ?? ""), held.get(step) ?? ""].join(","));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([[[...names, "held_back_loss"].join(","), ...rows].join("\n") + "\n"], { type: "text/csv" }));
  link.download = page.csv;
  link.click();
  URL.revokeObjectURL(link.href);
});
on("compare", "change", async (event) => {
  const [file] = event.target.files, said = document.getElementById("compared");
  if (!file) return;
  try {
    const record = JSON.parse(await file.text());
    const names = Object.keys(page.steps).concat((record.steps[0]?.metrics ?? []).map(([name]) => name));
    runs[1] = runOf(record.output_dir.split("/").pop() || "other run", columnsOf(record.steps, [...new Set(names)]), columnsOf(record.evals, ["step", "loss"]));
    said.textContent = `dashed: ${record.output_dir}`;
    drawAll();
  } catch (error) {
    said.textContent = `${file.name} is not a run_report.json (${error.message})`;
  }
});
new ResizeObserver(() => { for (const { plot, holder } of plots) if (holder.clientWidth && holder.clientWidth !== plot.width) plot.setSize({ width: holder.clientWidth, height: plot.height }); })
  .observe(document.querySelector("main"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
if (page.running) setTimeout(() => { if (zoom === null) location.reload(); }, 30000);
}
