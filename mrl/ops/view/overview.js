// The page's own table: title, names of metrics, kind. A name without a match in any run is left out, and so is an empty chart.
const chartsOf = () => state.data.charts;
let charts = [];
// Of the seconds of all steps.
const SMALL = 0.02;
const DASHES = [[], [8, 4], [2, 3], [8, 3, 2, 3]];
// Distances between the ticks of steps.
const WHOLE = [...Array(15).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

// An exponential mean; gaps stay gaps.
function smoothed(values) {
  let mean = null;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = mean === null ? value : state.smooth * mean + (1 - state.smooth) * value;
    return mean;
  });
}

// One x axis for all runs: [steps, one column per (run, metric)].
function columns(names) {
  const runs = state.data.runs, found = [];
  const matching = (one, name) => (name.includes("*") ? Object.keys(one.series).filter((key) => RegExp(`^${name.replaceAll("*", "[^/]+")}$`).test(key)
    && !(name.endsWith("*") && key.endsWith("/reward_std"))) : [name]);
  runs.forEach((one, index) => names.flatMap((name) => matching(one, name)).forEach((name) => {
    if ((one.series[name] || []).some((value) => value !== null)) found.push([index, name]);
  }));
  const steps = [...new Set(found.flatMap(([index]) => runs[index].series.step))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, position) => [step, position]));
  const values = found.map(([index, name]) => {
    const column = new Array(steps.length).fill(null);
    runs[index].series.step.forEach((step, i) => { column[place.get(step)] = runs[index].series[name][i]; });
    return column;
  });
  return { found, steps, values };
}

// Phases that take little time are one, below all others in the legend.
function gathered({ found, steps, values }) {
  const sums = values.map((column) => column.reduce((sum, value) => sum + (value || 0), 0)), all = sums.reduce((sum, one) => sum + one, 0);
  const isSmall = sums.map((sum) => sum < SMALL * all), small = found.filter((_, i) => isSmall[i]);
  if (small.length < 2) return { found, steps, values };
  const others = steps.map((_, place) => (values.some((column) => column[place] !== null)
    ? values.reduce((sum, column, i) => sum + (isSmall[i] ? column[place] || 0 : 0), 0) : null));
  const large = (list) => list.filter((_, i) => !isSmall[i]);
  return { found: [...large(found), [0, `other: ${small.map(([, name]) => phase(name)).join(", ")}`]], steps, values: [...large(values), others] };
}

function phase(name) { return name.replace(/^time\/|_hidden$/g, ""); }

// A curve that never moves is told in words. The parts of a stack, environments, and runs laid over each other stay together.
function isFlat(column) { return new Set(column.filter((value) => value !== null && value !== undefined)).size < 2; }

function split(names, kind) {
  const { found, steps, values } = columns(names), isOne = kind === "stack" || state.data.runs.length > 1 || names[0].includes("*");
  const isWhole = isOne && !values.every(isFlat);
  const part = (isKept) => ({ found: found.filter((_, i) => isKept(values[i])), steps, values: values.filter(isKept) });
  return { moving: part((column) => isWhole || !isFlat(column)), flat: part((column) => !isWhole && isFlat(column)) };
}

function label([index, name]) {
  const one = state.data.runs[index];
  // Mean rewards that are no accuracy are called rewards everywhere.
  const own = name === "val/accuracy" && one.series["val/reward"] ? "val/reward" : name;
  return state.data.runs.length > 1 ? `${one.name} ${own}` : own;
}

// A dashed line where an attempt with other values begins.
function markAttempts({ ctx, bbox, valToPos }) {
  if (state.data.runs.length > 1) return;
  ctx.save();
  ctx.strokeStyle = "#888";
  ctx.setLineDash([4, 4]);
  state.data.runs[0].attempts.filter((one) => one.step !== null).forEach((one) => {
    const x = valToPos(one.step, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
  });
  ctx.restore();
}

// What changed between attempts, as (name, text).
const changed = (one) => one.attempts.map(({ name, step, changes }) => [name, `${step === null ? "" : `from step ${step}: `}${changes.join("; ")}`]);

function chart(box, title, names, kind) {
  const isStack = kind === "stack" && state.data.runs.length === 1;
  const { found, steps, values } = isStack ? gathered(columns(names)) : split(names, kind).moving;
  // Of several runs each has one colour in all charts, and each metric its dashes.
  const isLaid = state.data.runs.length > 1, metrics = [...new Set(found.map(([, name]) => name))];
  const colour = (key, i) => (isStack ? tone(phase(key[1])) : COLOURS[(isLaid ? key[0] : i) % COLOURS.length]);
  let drawn = values.map((column) => (isStack ? column : smoothed(column)));
  if (isStack) {
    const sums = new Array(steps.length).fill(0);
    const isTimed = steps.map((_, i) => values.some((column) => column[i] !== null));
    drawn = values.map((column) => column.map((value, i) => (isTimed[i] ? (sums[i] += value || 0) : null)));
  } else if (state.log) {
    drawn = drawn.map((column) => column.map((value) => (value > 0 ? value : null)));
  }
  const series = found.map((key, i) => ({
    label: isStack ? phase(key[1]) : label(key), stroke: colour(key, i), width: 1.5, spanGaps: true,
    dash: isLaid ? DASHES[metrics.indexOf(key[1]) % DASHES.length] : [],
    // A stack draws sums and tells its parts.
    value: (_, value, __, place) => shown(isStack && place !== null ? values[i][place] : value),
    points: { show: (steps.length < 60 && !isStack) || key[1].startsWith("val/"), size: 5 },
    fill: isStack ? colour(key, i) : undefined,
  }));
  // The highest sum is drawn first, and the others over it.
  const order = found.map((_, i) => (isStack ? found.length - 1 - i : i));
  const plot = new uPlot({
    title, width: Math.max(240, box.clientWidth), height: 240, cursor: { sync: { key: "steps" } },
    scales: { x: { time: false }, y: isStack ? { range: (_, __, max) => [0, max || 1] } : state.log ? { distr: 3 } : {} },
    axes: [axis({ label: "step", labelSize: 16, size: 34, incrs: WHOLE }), axis({ size: 72, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : tick >= 1e4 ? tick.toLocaleString("en", { notation: "compact" }) : shown(tick))) })],
    series: [{ label: "step" }, ...order.map((i) => series[i])],
    hooks: { setScale: [noteZoom], draw: [markAttempts] },
  }, [steps, ...order.map((i) => drawn[i])], box);
  // A zoom outlives the next drawing of a live page.
  if (state.zoom) plot.setScale("x", state.zoom);
  plot.over.addEventListener("dblclick", () => { state.zoom = null; });
  charts.push([plot, box]);
}

function noteZoom(plot, scale) {
  const { min, max } = plot.scales.x, steps = plot.data[0];
  if (scale === "x" && (min > steps[0] || max < steps[steps.length - 1])) state.zoom = { min, max };
}

const numValues = (column) => column.filter((value) => value !== null && value !== undefined).length;
// A curve needs two values.
const hasCurves = () => state.data.runs.some((one) => Object.entries(one.series).some(([name, column]) => name !== "step" && numValues(column) > 1));

// The charts of this list that have data.
function drawn(wanted) {
  // One environment has the curve of all, and yet its own components.
  const known = wanted.filter(([, names]) => columns(names.slice(0, names[0].includes("*") ? 1 : names.length)).found.length
    > (/\*.*[^*]$/.test(names[0]) ? state.data.runs.length : 0));
  const having = (part) => known.filter(([, names, kind]) => split(names, kind)[part].found.length), found = having("moving"), constant = having("flat");
  const boxes = found.map(() => h("div", { class: "chart" }));
  requestAnimationFrame(() => boxes.forEach((box, i) => box.isConnected && chart(box, ...found[i])));
  const texts = (isOnce) => constant.map(([title, names, kind]) => {
    const { found: keys, values } = split(names, kind).flat;
    const told = keys.map((key, i) => ((numValues(values[i]) < 2) === isOnce ? `${label(key)} = ${shown(values[i].find((value) => value !== null))}` : null));
    return told.some(Boolean) ? h("li", {}, `${title}: `, told.filter(Boolean).join(", ")) : null;
  }).filter(Boolean);
  return h("div", {}, h("section", { class: "charts" }, boxes), ["Unchanged so far", "Measured once so far"].map((title, isOnce) => {
    const lines = texts(Boolean(isOnce));
    return lines.length ? h("section", {}, h("h2", {}, title), h("ul", {}, lines)) : null;
  }));
}

function controls() {
  const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, "aria-label": "smoothing",
    onchange: () => { state.smooth = Number(slider.value); draw(); } });
  const log = h("input", { type: "checkbox", checked: state.log, "aria-label": "log scale", onchange: () => { state.log = log.checked; draw(); } });
  const listed = chartsOf().flatMap(([, names]) => names);
  const others = [...new Set(state.data.runs.flatMap((one) => Object.keys(one.series)))]
    .filter((name) => name !== "step" && !listed.includes(name) && !state.more.includes(name)).sort();
  return h("p", { class: "controls" },
    hasCurves() ? [h("label", {}, "smoothing ", slider), h("label", {}, log, " log scale")] : null,
    choice("add a metric", [["", "…"], ...others.map((name) => [name, name])], "", (name) => { if (name) { state.more.push(name); draw(); } }),
    hasCurves() ? h("small", {}, "Drag to zoom, double-click to go back.") : null);
}

// Names of tabs in a text become links to them.
function linked(text) {
  return text.split(/the (\w+) tab/).map((part, i) => (i % 2 ? h("a", { href: `#${part.toLowerCase()}` }, `the ${part} tab`) : part));
}

// Links work only in report.html, which is in the run folder.
function files(one) {
  return h("span", {}, one.files.flatMap((name) => [state.data.is_live ? name : h("a", { href: name }, name), " "]));
}

function advice(one) {
  if (!one.advisories.length) return null;
  return h("section", { class: "advice" }, h("h2", {}, "Advice"), table(["", "step", "seen", "likely causes", "what to try"], one.advisories.map(
    (item) => [h("b", { class: item.level }, item.level), item.step, item.seen, item.causes, h("span", {}, linked(item.turn))])));
}

function scores(one) {
  return one.evaluations.map((found) => {
    const names = [...new Set(Object.values(found.scores).flatMap((mine) => Object.keys(mine)))];
    return h("section", {}, h("h2", {}, `Evaluation ${found.name}`), table(["environment", ...names],
      Object.entries(found.scores).map(([environment, mine]) => [environment, ...names.map((name) => shown(mine[name]))])));
  });
}

function facts(lines) { return h("dl", {}, lines.flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])); }

function overview() {
  const one = run();
  charts = [];
  const wanted = [...chartsOf(), ...state.more.map((name) => [name, [name]])];
  return h("div", {},
    h("p", { class: `health ${one.health.level}` }, h("b", {}, one.health.level), " ", one.health.reason),
    h("section", { class: "facts" }, facts([...one.progress, ...changed(one), ["files", files(one)]]), facts(one.about)),
    one.num_torn ? h("p", {}, `Left out as torn: ${counted(one.num_torn, "line")} of metrics.jsonl and samples.jsonl.`) : null,
    advice(one), scores(one), controls(), drawn(wanted),
    h("details", {}, h("summary", {}, "All rules"), table(["", "applies when"], state.data.rules.map((rule) => [rule.level, rule.rule]))));
}

tabs.push({ name: "overview", title: "Overview", draw: overview, has: () => true });
addEventListener("resize", () => charts.forEach(([plot, box]) => box.isConnected && plot.setSize({ width: box.clientWidth, height: 240 })));
