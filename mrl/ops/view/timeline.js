// Lanes of one step, a bar for each span of each process; nested spans lie below each other.
const timed = { step: null, zoom: null, lacking: {} };

function steps(one) { return Object.keys(one.timelines).map(Number).concat(one.timed_steps).filter((step, i, all) => all.indexOf(step) === i).sort((a, b) => a - b); }

function stepName(step) { return step === 0 ? "the start" : `step ${step}`; }

function seconds(us) { return us < 1e6 ? `${shown(us / 1e3)} ms` : `${shown(us / 1e6)} s`; }

// Work of one kind has one colour in every lane. Red is for what is wrong, grey for what waits.
const TONES = [[/^step$/, "#475569"], [/^other/, "#6b7280"], [/generat|serve/, "#2563eb"], [/reward|score|make texts/, "#d97706"], [/train|logprob|batch/, "#059669"],
  [/refit|settle|exchange|pull|verify|copies|digest|weight/, "#7c3aed"], [/checkpoint|save|write/, "#db2777"], [/teacher/, "#dc2626"], [/valid/, "#a16207"], [/./, "#0891b2"]];
const LABEL_SHARE = 0.04;

function tone(name) { return TONES.find(([kind]) => kind.test(name))[1]; }

// How deep each span lies inside others of its lane; they come in the order of their beginnings, longer ones first.
function depths(spans) {
  const open = [];
  return spans.map(([, begin, length]) => {
    while (open.length && open[open.length - 1] <= begin) open.pop();
    open.push(begin + length);
    return open.length - 1;
  });
}

// The file that ui.perfetto.dev and chrome://tracing open.
function traceOf(step, timeline) {
  const events = timeline.lanes.flatMap((lane, index) => [
    { ph: "M", name: "process_name", pid: index + 1, tid: 0, args: { name: lane.name } },
    ...lane.spans.map(([name, begin, length, facts]) => ({ ph: "X", name, ts: timeline.begin + begin, dur: length, pid: index + 1, tid: 0, args: facts }))]);
  return { traceEvents: events, displayTimeUnit: "ms", otherData: { step } };
}

function save(step, timeline) {
  const address = URL.createObjectURL(new Blob([JSON.stringify(traceOf(step, timeline))], { type: "application/json" }));
  h("a", { href: address, download: `${run().name}_step${step}.trace.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function lanes(step, timeline) {
  const [from, to] = timed.zoom || [0, timeline.length];
  const tip = h("output", { class: "tip" }, "Point at a bar. Drag to zoom, double-click to go back.");
  const body = timeline.lanes.map((lane) => {
    const deep = depths(lane.spans);
    const track = h("div", { class: "track" });
    track.style.height = `${(Math.max(0, ...deep) + 1) * 18}px`;
    lane.spans.forEach(([name, begin, length, facts], i) => {
      const left = Math.max(begin, from), right = Math.min(begin + length, to);
      if (right <= left) return;
      const told = Object.entries(facts).map(([key, value]) => ` · ${key.replaceAll("_", " ")} ${key.endsWith("_bytes") ? bytes(value) : shown(value)}`).join("");
      const tell = () => { tip.textContent = `${lane.name}: ${name}, ${seconds(length)} from ${seconds(begin)} on${told}`; };
      const bar = h("span", { class: name.startsWith("wait") ? "bar waits" : "bar", tabindex: 0, onmouseover: tell, onfocus: tell, onclick: tell, "aria-label": name },
        // A word that does not fit says less than none.
        (right - left) / (to - from) > LABEL_SHARE ? name : "");
      bar.style.left = `${100 * (left - from) / (to - from)}%`;
      bar.style.width = `${100 * (right - left) / (to - from)}%`;
      bar.style.top = `${18 * deep[i]}px`;
      if (!name.startsWith("wait")) bar.style.backgroundColor = tone(name);
      track.append(bar);
    });
    return h("div", { class: "lane" }, h("small", {}, lane.name), track);
  });
  const ticks = h("div", { class: "lane ticks" }, h("small", {}, ""), h("div", { class: "track" },
    [0, 0.25, 0.5, 0.75, 1].map((part) => { const tick = h("small", {}, seconds(from + part * (to - from))); tick.style.left = `${100 * part}%`; return tick; })));
  const box = h("section", { class: "lanes" }, ticks, body);
  let pressed = null;
  const at = (event) => {
    const track = box.querySelector(".track").getBoundingClientRect();
    return from + (to - from) * Math.min(1, Math.max(0, (event.clientX - track.left) / track.width));
  };
  box.addEventListener("mousedown", (event) => { pressed = at(event); event.preventDefault(); });
  box.addEventListener("mouseup", (event) => {
    const [low, high] = [pressed, at(event)].sort((a, b) => a - b);
    if (pressed !== null && high - low > (to - from) / 200) { timed.zoom = [low, high]; timed.step = step; draw(); }
    pressed = null;
  });
  box.addEventListener("dblclick", () => { timed.zoom = null; draw(); });
  return [tip, box];
}

// How long each lane worked, so that waiting has a number: spans that wait do not count, and nested ones count once.
function shares(timeline) {
  return timeline.lanes.filter((lane) => lane.name !== "driver").map((lane) => {
    let busy = 0, end = 0;
    for (const [name, begin, length] of lane.spans) {
      if (name.startsWith("wait") || name === "step") continue;
      const low = Math.max(begin, end, 0), high = Math.min(begin + length, timeline.length);
      if (high > low) { busy += high - low; end = high; }
    }
    return [lane.name, seconds(busy), `${shown(Math.round(1000 * busy / timeline.length) / 10)} %`, seconds(timeline.length - busy)];
  });
}

function timelines() {
  const one = run(), all = steps(one);
  charts = [];
  const step = all.includes(timed.step) ? timed.step : all[all.length - 1];
  const timeline = one.timelines[step];
  if (!timeline && state.data.is_live && !timed.lacking[step]) {
    timed.lacking[step] = true;
    fetched(`timeline/${state.run}/${step}`).then((found) => { one.timelines[step] = found[step]; draw(); }, () => draw());
  }
  const chosen = h("p", { class: "controls" },
    choice("step", all.map((number) => [number, stepName(number)]), step, (text) => { timed.step = Number(text); timed.zoom = null; draw(); }),
    timeline ? h("button", { onclick: () => save(step, timeline) }, "save for Perfetto") : null,
    timed.zoom ? h("button", { onclick: () => { timed.zoom = null; draw(); } }, "whole step") : null);
  if (!timeline) return h("div", {}, chosen, h("p", {}, "Reading."));
  return h("div", {}, chosen,
    h("p", {}, `${step ? `From the beginning of step ${step} to that of the next one` : "Before the first step"}: ${seconds(timeline.length)}. Grey bars wait; in a gap a process is idle.`),
    timeline.left_out ? h("p", {}, `Left out: ${counted(timeline.left_out, "more lane")}.`) : null,
    lanes(step, timeline), h("h2", {}, "Work and waiting"), table(["lane", "works", "share of the step", "waits"], shares(timeline)));
}

tabs.push({ name: "timeline", title: "Timeline", draw: timelines, has: (one) => steps(one).length > 0 });
