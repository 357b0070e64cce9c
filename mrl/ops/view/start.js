const POLL_MS = 3000;

async function follow() {
  try {
    const fresh = await fetched(`data?seen=${state.data.runs[0].version}`);
    if (fresh) {
      // What was read on demand stays.
      fresh.runs.forEach((one, index) => {
        Object.assign(one.rollouts, state.data.runs[index].rollouts);
        one.timelines = { ...state.data.runs[index].timelines, ...one.timelines };
      });
      state.data = fresh;
      // A reader of rollouts, or of a step of the past, is not disturbed.
      if (state.tab !== "rollouts" && !(state.tab === "timeline" && timed.step !== null)) draw();
    }
    document.documentElement.removeAttribute("data-lost");
  } catch (error) {
    document.documentElement.setAttribute("data-lost", error.message);
  } finally {
    setTimeout(follow, POLL_MS);
  }
}

addEventListener("hashchange", () => { state.tab = location.hash.slice(1); draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());

inlined().then((data) => {
  state.data = data;
  document.documentElement.setAttribute("data-ready", "yes");
  draw();
  if (data.is_live) setTimeout(follow, POLL_MS);
});
