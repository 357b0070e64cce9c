// The page of a plan: memory by phase, seconds and layouts. Helpers and colours are those of mrl/ops/view/page.js.
const GIB = 2 ** 30, SHADES = [...COLOURS, "#84cc16", "#f472b6", "#a16207", "#0f766e"];

// A bar for each name, of stacked parts [label, values]; the legend tells the parts of the bar under the mouse.
function bars(box, title, names, parts, limit) {
  const sums = new Array(names.length).fill(0);
  const tops = parts.map(([, values]) => values.map((value, i) => (sums[i] += value)));
  const highest = 1.08 * Math.max(limit || 0, ...sums);
  const paths = uPlot.paths.bars({ size: [0.6, 90] });
  // The highest sum is drawn first, and the others over it.
  const order = parts.map((_, i) => parts.length - 1 - i);
  const series = order.map((i) => ({
    label: parts[i][0], fill: SHADES[i % SHADES.length], stroke: SHADES[i % SHADES.length], width: 0, paths, points: { show: false },
    value: (_, value, __, place) => (place === null ? "–" : parts[i][1][place].toFixed(2)),
  }));
  function line(plot) {
    if (!limit) return;
    const { ctx, bbox } = plot, y = plot.valToPos(limit, "y", true);
    ctx.save();
    ctx.strokeStyle = axis({}).stroke;
    ctx.setLineDash([8, 6]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.restore();
  }
  const plot = new uPlot({
    title, width: Math.max(240, box.clientWidth), height: 320, hooks: { draw: [line] }, cursor: { drag: { x: false, y: false } },
    scales: { x: { time: false, range: [-0.5, names.length - 0.5] }, y: { range: [0, highest] } },
    axes: [axis({ splits: () => names.map((_, i) => i), values: (_, ticks) => ticks.map((tick) => names[tick]), grid: { show: false } }), axis({ size: 62 })],
    series: [{ label: "bar", value: (_, __, ___, place) => (place === null ? "–" : `${names[place]} ${sums[place].toFixed(1)}`) }, ...series],
  }, [names.map((_, i) => i), ...order.map((i) => tops[i])], box);
  addEventListener("resize", () => plot.setSize({ width: box.clientWidth, height: 320 }));
}

// A click on a head sorts by its column, another one the other way round.
function sortable(node) {
  node.querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => {
    const body = node.tBodies[0], down = head.dataset.down !== "1";
    head.dataset.down = down ? "1" : "0";
    const value = (row) => row.cells[column].textContent;
    const order = (a, b) => value(a).localeCompare(value(b), "en", { numeric: true });
    body.append(...[...body.rows].sort((a, b) => (down ? order(a, b) : order(b, a))));
  }));
  return node;
}

function layouts(plan) {
  if (!plan.layouts) return null;
  const names = plan.layouts.length ? Object.keys(plan.layouts[0].values) : [];
  return h("section", {}, h("h2", {}, plan.layouts.length ? "Layouts that fit, fastest first" : "No layout fits"),
    sortable(table([...names, "GiB", "low s", "high s", "overrides"], plan.layouts.map((one) => [
      ...names.map((name) => one.values[name] ?? "none"), (one.memory / GIB).toFixed(1), one.seconds.low.toFixed(1), one.seconds.high.toFixed(1),
      h("details", {}, h("summary", {}, `${one.overrides.length} key${one.overrides.length === 1 ? "" : "s"}`), one.overrides.join(" "))]))),
    h("h2", {}, "Others"), sortable(table(["layouts", "not, because"], Object.entries(plan.refused).map(([reason, number]) => [number, reason]))));
}

function planned() {
  const plan = run(), boxes = [h("div", { class: "chart" }), h("div", { class: "chart" })];
  const phases = Object.keys(plan.memory), parts = [...new Set(phases.flatMap((phase) => Object.keys(plan.memory[phase])))];
  const steps = Object.keys(plan.times);
  requestAnimationFrame(() => {
    bars(boxes[0], `GiB of the fullest policy rank; the dashed line is what the GPU has: ${plan.gpu.memory_gib}`, phases,
      parts.map((part) => [part, phases.map((phase) => (plan.memory[phase][part] || 0) / GIB)]), plan.gpu.memory_gib);
    bars(boxes[1], "Seconds of a step", steps, [["at least", steps.map((step) => plan.times[step].low)],
      ["up to, more", steps.map((step) => plan.times[step].high - plan.times[step].low)]]);
  });
  return h("div", {}, boxes, layouts(plan), h("h2", {}, "In words"), h("pre", {}, plan.lines.join("\n")));
}

tabs.push({ name: "plan", title: "Plan", draw: planned, has: () => true });
