"use strict";
// Every text of a run enters the page as a text node: markup that a model writes stays text.
function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined).map(
    (child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return node;
}

const COLOURS = ["#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626", "#0891b2", "#6b7280", "#db2777"];
const state = { data: null, tab: location.hash.slice(1) || "overview", run: 0, smooth: 0, log: false, zoom: null, more: [] };
const tabs = []; // {name, title, draw(): Node, has(run)}

async function unpack(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function inlined() {
  const text = atob(document.getElementById("data").textContent);
  return unpack(Uint8Array.from(text, (character) => character.charCodeAt(0)));
}

async function fetched(path) {
  const answer = await fetch(path);
  if (answer.status === 204) return null;
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return unpack(await answer.arrayBuffer());
}

function shown(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function table(head, rows) {
  return h("table", {}, h("thead", {}, h("tr", {}, head.map((name) => h("th", {}, name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell))))));
}

function choice(label, options, value, change) {
  const select = h("select", { onchange: () => change(select.value), "aria-label": label },
    options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text)));
  return h("label", {}, label, " ", select);
}

function axis(more) {
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return { stroke: ink("--ink"), grid: { stroke: ink("--line"), width: 1 }, ticks: { stroke: ink("--line"), width: 1 }, ...more };
}

function run() { return state.data.runs[state.run]; }

function draw() {
  const body = document.getElementById("page");
  const available = tabs.filter((tab) => tab.has(run()));
  const tab = available.find((one) => one.name === state.tab) || available[0];
  const several = state.data.runs.length > 1;
  body.replaceChildren(
    h("header", {},
      h("h1", {}, state.data.runs.map((one) => one.name).join(" and ")),
      h("nav", { role: "tablist" }, available.map((one) => h("button", {
        role: "tab", "aria-selected": String(one === tab), "data-tab": one.name,
        onclick: () => { state.tab = one.name; history.replaceState(null, "", `#${one.name}`); draw(); } }, one.title))),
      several ? choice("run", state.data.runs.map((one, index) => [index, one.name]), state.run,
        (value) => { state.run = Number(value); draw(); }) : null),
    h("main", { "data-shown": tab.name }, tab.draw()));
}
