// step -> prompt -> its rollouts side by side -> one of them token by token.
const looked = { dump: null, filter: "all", env: "", text: "", low: "", high: "", sort: "order", prompts: 8, token: null, by: "dlogp", lacking: {} };

const FILTERS = {
  all: () => true,
  truncated: (row) => row.finish_reason === "length",
  masked: (row) => row.masked !== null && row.masked !== undefined,
  rewarded: (row) => row.rewards > 0,
  unrewarded: (row) => !(row.rewards > 0),
  "with tokens": (row) => Boolean(row.token_texts),
};
const SORTS = {
  order: (a, b) => a.idx - b.idx,
  reward: (a, b) => b.rewards - a.rewards,
  advantage: (a, b) => (b.advantages || 0) - (a.advantages || 0),
  length: (a, b) => b.input_lengths - a.input_lengths,
};

function groupsOf(rows) {
  const found = new Map();
  rows.forEach((row, index) => {
    const key = row.prompt_id || row.content[0];
    if (!found.has(key)) found.set(key, []);
    found.get(key).push({ idx: index, ...row });
  });
  return [...found.values()];
}

const textsOf = (row) => [...row.content, ...(row.conversations || []).flat().map((message) => message.content)];

function isWanted(row) {
  const text = looked.text.toLowerCase();
  return FILTERS[looked.filter](row) && (!looked.env || row.environment === looked.env)
    && (looked.low === "" || row.rewards >= Number(looked.low)) && (looked.high === "" || row.rewards <= Number(looked.high))
    && (!text || textsOf(row).some((part) => part.toLowerCase().includes(text)));
}

function fact(row) {
  const parts = Object.entries(row.reward_components || {}).map(([name, value]) => `${name} ${shown(value)}`);
  return [
    `reward ${shown(row.rewards)}${parts.length ? ` (${parts.join(", ")})` : ""}`,
    row.advantages !== undefined ? `advantage ${shown(row.advantages)}` : null,
    row.input_lengths !== undefined ? `${shown(row.input_lengths)} tokens with the prompt` : null,
    row.finish_reason ? `ended by ${row.finish_reason}` : null,
    row.weight_version !== undefined ? `weight version ${row.weight_version}` : null,
    row.num_turns > 1 ? `${row.num_turns} turns` : null,
    row.environment || null,
    row.masked ? `masked: ${row.masked}` : null,
  ].filter(Boolean).join(" · ");
}

// The model's text, or message by message all that it and the others have said.
function said(row) {
  const all = row.conversations || [];
  if (!all.length) return [h("pre", {}, row.content[1])];
  return all.flatMap((messages, i) => [
    all.length > 1 ? h("div", {}, h("small", {}, `conversation ${i + 1} of ${all.length}`)) : null,
    ...messages.map(({ role, content }) => h("section", { class: "turn" }, h("small", {}, role), h("pre", {}, content)))]);
}

// The best reward of a batch is green, at least 1; others above 0 have a part of it.
function classOf(row, best) {
  if (row.masked) return "card masked";
  return row.rewards >= best ? "card good" : row.rewards > 0 ? "card partly" : "card";
}

function card(row, best) {
  return h("article", { class: classOf(row, best) },
    h("small", {}, fact(row)), ...said(row),
    row.extracted ? h("small", {}, `extracted ${row.extracted}`) : null,
    ...Object.entries(row.columns || {}).map(([name, text]) => h("small", {}, `${name}: ${text} `)),
    row.token_texts ? h("button", { "data-tokens": row.idx, onclick: () => { looked.token = row; draw(); } }, "token by token") : null);
}

function field(name, value, change) {
  const input = h("input", { value, placeholder: name, "aria-label": name, onchange: () => { change(input.value.trim()); draw(); } });
  return input;
}

async function load(dump) {
  looked.lacking[dump.name] = "loading …";
  try {
    run().rollouts[dump.name] = await fetched(`rollouts/${state.run}/${dump.name}`);
    delete looked.lacking[dump.name];
  } catch (error) {
    looked.lacking[dump.name] = `not readable: ${error.message}`;
  }
  if (state.tab === "rollouts") draw();
}

function rollouts() {
  if (looked.token) return tokens(looked.token);
  const one = run(), dumps = one.dumps;
  const listed = state.data.is_live ? dumps : dumps.filter((dump) => one.rollouts[dump.name]);
  if (!listed.length) return samples(one);
  const dump = listed.find((other) => other.name === looked.dump) || listed[listed.length - 1];
  const rows = one.rollouts[dump.name];
  if (!rows && !looked.lacking[dump.name]) load(dump);
  const groups = groupsOf(rows || []).map((group) => group.filter(isWanted).sort(SORTS[looked.sort])).filter((group) => group.length);
  const best = (rows || []).reduce((most, row) => Math.max(most, row.masked ? 0 : row.rewards || 0), 1);
  const envs = [...new Set((rows || []).map((row) => row.environment).filter(Boolean))];
  const set = (name) => (value) => { looked[name] = value; looked.prompts = 8; draw(); };
  return h("div", {},
    h("p", { class: "controls" },
      choice("step", listed.map((other) => [other.name, `${other.step} ${other.split}`]), dump.name, set("dump")),
      choice("show", Object.keys(FILTERS).map((name) => [name, name]), looked.filter, set("filter")),
      envs.length > 1 ? choice("environment", [["", "all"], ...envs.map((name) => [name, name])], looked.env, set("env")) : null,
      choice("sort", Object.keys(SORTS).map((name) => [name, name]), looked.sort, set("sort")),
      field("reward from", looked.low, set("low")), field("to", looked.high, set("high")), field("text", looked.text, set("text"))),
    state.data.is_live ? null : h("p", {}, h("small", {}, `The first prompts of ${listed.length} of ${dumps.length} batches (training and validation); `
      + "python -m mrl.view RUN shows all.")),
    rows ? null : h("p", {}, looked.lacking[dump.name] || "loading …"),
    groups.slice(0, looked.prompts).map((group) => h("section", { class: "group" },
      h("h3", {}, group[0].prompt_id || "prompt"), h("pre", { class: "prompt" }, group[0].content[0]),
      group[0].expected ? h("small", {}, `expected ${group[0].expected}`) : null,
      h("div", { class: "cards" }, group.map((row) => card(row, best))))),
    groups.length > looked.prompts ? h("button", { onclick: () => { looked.prompts += 16; draw(); } }, counted(groups.length - looked.prompts, "more prompt")) : null);
}

// What a run without dumps has: the beginnings of some rollouts.
function samples(one) {
  const rows = one.samples.slice().reverse();
  const answers = ["extracted", "expected"].filter((name) => rows.some((row) => row[name]));
  return table(["step", "split", "prompt", "rollout", ...answers, "reward"], rows.map((row) => [row.step, row.split,
    h("pre", {}, row.prompt), h("pre", {}, row.text), ...answers.map((name) => row[name]), row.status === "ok" ? shown(row.reward) : `masked (${row.status})`]));
}

// Between generator and trainer; null where one of them has no finite logprob.
function gap(row, i) {
  const pair = [row.generation_logprobs[i], (row.prev_logprobs || [])[i]];
  return pair.every(Number.isFinite) ? Math.abs(pair[0] - pair[1]) : null;
}

const COLOURINGS = {
  dlogp: ["|dlogp|", (row, i) => (gap(row, i) !== null ? Math.min(1, Math.log10(1 + 1e6 * gap(row, i)) / 6) : 0), "220, 38, 38"],
  probability: ["improbability", (row, i) => 1 - Math.exp(row.generation_logprobs[i]), "217, 119, 6"],
  entropy: ["entropy", (row, i) => 1 - Math.exp(-(row.token_entropies || [])[i] || 0), "124, 58, 237"],
  advantage: ["advantage", (row, i, most) => row.token_advantages[i] / most, null],
};

// A call of a tool in a generated text, in the forms of chat templates: Hermes' and Qwen's, Nemotron's, then Mistral's.
const TOOL_CALL = /<(tool_call|TOOLCALL)>[^]*?(?:<\/\1>|$)|\[TOOL_CALLS\][^]*$/g;

// The runs of tokens of one origin, with what each is called: the prompt, turns of the model, and what environments and tools answered.
function turnsOf({ token_generated: generated, token_untrained: untrained = [] }) {
  const kinds = generated.map((isGenerated) => (isGenerated ? "turn" : "")), turns = [];
  for (const [start, stop, reason] of untrained) {
    kinds.fill(reason === "elsewhere" ? "turn, trained in another sequence" : `turn, not trained: ${reason}`, start, stop);
  }
  kinds.forEach((kind, i) => {
    if (i && kind === kinds[i - 1]) turns[turns.length - 1].end = i + 1;
    else turns.push({ begin: i, end: i + 1, kind });
  });
  let count = 0;
  for (const turn of turns) turn.name = turn.kind ? turn.kind.replace("turn", `turn ${++count}`) : count ? "environment" : "prompt";
  return turns;
}

// Tokens of a turn that are part of a tool call.
function inToolCalls(texts) {
  const calls = [...texts.join("").matchAll(TOOL_CALL)].map((found) => [found.index, found.index + found[0].length]);
  let end = 0;
  return texts.map((text) => {
    const begin = end;
    end += text.length;
    return calls.some(([from, to]) => begin < to && end > from);
  });
}

function tokens(row) {
  const tip = h("output", { class: "tip" }, "Point at a token.");
  const further = row.further || [];
  return h("div", {},
    h("p", { class: "controls" }, h("button", { onclick: () => { looked.token = null; draw(); } }, "back"),
      choice("colour by", Object.entries(COLOURINGS).map(([key, [text]]) => [key, text]), looked.by, (key) => { looked.by = key; draw(); })),
    h("p", {}, fact(row)), tip, sequence(row, tip),
    further.flatMap((other, i) => [h("h3", {}, `sequence ${i + 2} of ${further.length + 1}`), ...sequence(other, tip)]));
}

// A sequence of a rollout, turn by turn; `tip` tells of its tokens.
function sequence(row, tip) {
  const [, degree, tone] = COLOURINGS[looked.by];
  const most = Math.max(1e-9, ...row.token_advantages.map(Math.abs));
  const tell = (i, kind) => {
    const parts = [`token ${row.token_ids[i]} at ${i}`];
    if (row.token_generated[i]) {
      parts.push(`generator logprob ${shown(row.generation_logprobs[i])}`);
      if (row.prev_logprobs) parts.push(`trainer logprob ${shown(row.prev_logprobs[i])}`);
      if (gap(row, i) !== null) parts.push(`|dlogp| ${gap(row, i).toExponential(2)}`);
      if (row.token_entropies) parts.push(`entropy ${shown(row.token_entropies[i])}`);
      parts.push(`probability ${shown(Math.exp(row.generation_logprobs[i]))}`, `advantage ${shown(row.token_advantages[i])}`,
        row.token_loss_mask[i] ? "in the loss" : "not in the loss");
    } else parts.push(kind ? "not trained" : "not generated");
    tip.textContent = parts.join(" · ");
  };
  const drawn_token = (text, i, isTool, kind) => {
    const isSpecial = row.token_special[i];
    const span = h("span", { class: `token${isSpecial ? " special" : ""}${row.token_generated[i] ? "" : " given"}${isTool ? " tool" : ""}`, tabindex: 0,
      onmouseover: () => tell(i, kind), onfocus: () => tell(i, kind), onclick: () => tell(i, kind) }, text === "\n" ? "⏎\n" : text || "∅");
    if (row.token_generated[i]) {
      const value = degree(row, i, most);
      const rgb = tone || (value < 0 ? "220, 38, 38" : "5, 150, 105");
      span.style.backgroundColor = `rgba(${rgb}, ${Math.min(1, Math.abs(value)) * 0.75})`;
    }
    return span;
  };
  return turnsOf(row).map(({ begin, end, name, kind }) => {
    const texts = row.token_texts.slice(begin, end), calls = kind ? inToolCalls(texts) : [];
    const num = calls.filter((isTool, i) => isTool && !calls[i - 1]).length;
    return h("section", { class: "turn" }, h("small", {}, `${name}, ${counted(end - begin, "token")}${num ? `, ${counted(num, "tool call")}` : ""}`),
      h("div", { class: "tokens" }, texts.map((text, i) => drawn_token(text, begin + i, calls[i], kind))));
  });
}

tabs.push({ name: "rollouts", title: "Rollouts", draw: rollouts, has: (one) => one.dumps.length + one.samples.length > 0 });
