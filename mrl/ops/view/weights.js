const NUM_REFITS = 12;
const REFIT_CHARTS = [
  ["Seconds of a refit", ["refit/seconds"]],
  ["Bytes of a refit", ["refit/verified_bytes", "refit/padding_bytes"]],
  ["Weight version", ["refit/weight_version"]],
];
const SIZES = ["B", "kB", "MB", "GB", "TB", "PB"];

function bytes(count) {
  if (count === null || count === undefined) return "–";
  const power = count > 0 ? Math.min(SIZES.length - 1, Math.floor(Math.log10(count) / 3)) : 0;
  return `${Number((count / 1000 ** power).toPrecision(4))} ${SIZES[power]}`;
}

function counted(count, name) { return `${count} ${name}${count === 1 ? "" : "s"}`; }

const LINKS = { gpu: "a worker's own device", node: "other devices of its node", network: "other nodes" };

// Who sends how much to whom: ranks x engine workers, darker cells carry more.
function matrix({ matrix: rows, neighbours, num_ranks: ranks, num_workers: workers }) {
  const most = Math.max(1, ...rows.flat());
  const span = (index, count) => (neighbours === 1 ? index : `${index * neighbours}–${Math.min(count, (index + 1) * neighbours) - 1}`);
  return h("table", { class: "matrix", "aria-label": "bytes from ranks to engine workers" },
    h("thead", {}, h("tr", {}, h("th", {}, "rank \\ worker"), rows[0].map((_, column) => h("th", {}, span(column, workers))))),
    h("tbody", {}, rows.map((row, index) => h("tr", {}, h("th", {}, span(index, ranks)), row.map((count) => {
      const cell = h("td", {}, count ? bytes(count) : "");
      cell.style.backgroundColor = `rgba(37, 99, 235, ${0.7 * count / most})`;
      return cell;
    })))));
}

// The last comparison of weights that several ranks hold.
function compared(one) {
  const spans = Object.values(one.timelines).flatMap((timeline) => timeline.lanes.flatMap((lane) => lane.spans)).filter(([name]) => name === "compare copies");
  const facts = spans.length ? spans[spans.length - 1][3] : null;
  return facts ? `Before every refit the ranks settle: they compare the ${shown(facts.copies)} copies of ${shown(facts.weights)} pieces of weights that more than one of them holds.` : null;
}

function schedule(one) {
  const refit = one.refit;
  if (!refit || !refit.matrix) return null;
  const told = compared(one);
  return h("section", {}, h("h2", {}, "Schedule"),
    h("p", {}, `Refit zero, before the first step, moved the starting weights into engines that vLLM's own loader had filled, and ${bytes(refit.zero.verified_bytes)} `
      + `stayed as they were, among them ${bytes(refit.zero.padding_bytes)} of padding.`),
    told ? h("p", {}, told) : null,
    h("p", {}, `Every refit moves, in ${counted(refit.rounds, "round")} from ${counted(refit.num_ranks, "rank")} to ${counted(refit.num_workers, "engine worker")}: `
      + Object.entries(LINKS).map(([link, place]) => `${bytes(refit.links[link])} from ${place}`).join(", ") + "."),
    matrix(refit));
}

function weights() {
  const series = run().series, of = (name, i) => (series[name] || [])[i];
  charts = [];
  const places = series.step.map((_, i) => i).filter((i) => typeof of("refit/seconds", i) === "number");
  const share = (i) => (of("time/total", i) ? `${(100 * of("time/refit", i) / of("time/total", i)).toFixed(1)} %` : "–");
  const rows = places.slice(-NUM_REFITS).reverse().map((i) => [series.step[i], of("refit/weight_version", i), shown(of("refit/seconds", i)),
    share(i), bytes(of("refit/verified_bytes", i)), bytes(of("refit/padding_bytes", i))]);
  const verified = places.reduce((sum, i) => sum + (of("refit/verified_bytes", i) || 0), 0);
  return h("div", {},
    h("p", {}, `${counted(places.length, "refit")} of this page's steps compared ${bytes(verified)} of live engines with the trainer's weights. `
      + "A refit with one wrong byte ends the run: every version below is proven."),
    schedule(run()),
    drawn(REFIT_CHARTS),
    h("h2", {}, "Last refits"),
    table(["step", "version", "seconds", "share of the step", "verified", "padding"], rows));
}

// Phases by rows: what the plan predicts, what ranks held.
function memory(one) {
  if (!one.memory.length) return null;
  const gpu = one.memory.some((row) => row.gpu_used_bytes || row.predicted_bytes);
  const rows = one.memory.map((row) => [row.phase, ...(gpu ? [bytes(row.predicted_bytes), bytes(row.gpu_used_bytes), bytes(row.gpu_peak_bytes)] : []), bytes(row.host_bytes), bytes(row.engine_host_bytes)]);
  return h("section", {}, h("h2", {}, "Memory by phase, of the fullest policy rank and engine"),
    table(["phase", ...(gpu ? ["predicted for a GPU", "in use on a GPU", "peak of a rank's tensors"] : []), "host memory of a rank", "host memory of an engine"], rows));
}

function resources() {
  const one = run();
  charts = [];
  const left = one.disk ? `${bytes(one.disk.free)} of ${bytes(one.disk.total)} are free on the disk of the run folder; it holds `
    + `${counted(one.checkpoints.length, "checkpoint")} of ${bytes(one.checkpoints.reduce((sum, saved) => sum + saved.bytes, 0))} in all.` : null;
  return h("div", {}, left ? h("p", {}, left) : null, memory(one),
    drawn([["Seconds of a checkpoint", ["time/checkpoint", "time/checkpoint_hidden"]],
      ["TFLOPS per GPU, or per policy rank on CPUs", ["performance/train_flops_per_gpu"]], ["Share of the peak", ["performance/train_fp_utilization"]],
      ["Packing efficiency", ["train/packing_efficiency"]], ["Engine idle share", ["rollout/engine_idle_fraction"]]]),
    one.checkpoints.length ? h("h2", {}, "Checkpoints") : null,
    one.checkpoints.length ? table(["checkpoint", "files", "size"], one.checkpoints.map((saved) => [`step ${saved.step}`, saved.files, bytes(saved.bytes)])) : null);
}

tabs.push({ name: "weights", title: "Weights", draw: weights, has: (one) => Boolean(one.series["refit/seconds"]) });
tabs.push({ name: "resources", title: "Resources", draw: resources, has: () => true });
