"use strict";
// Polls the server once a second while the page is visible, and keeps tiles, charts and maps up to date.

const POLL_MS = 1000, TIMEOUT_MS = 5000, KEPT_SECONDS = 610;

const page = { key: "", boot: null, rows: [], next: 0, state: null, seconds: 300, hover: null, timer: null, delay: POLL_MS };

const load = byId("charts-load"), latency = byId("charts-latency");
const quiet = "No traffic in this range";
const charts = [
  new TimeChart(load, {
    title: "Output", unit: "tokens/s", format: compact, axis: compact, floor: 4, empty: quiet,
    series: [{ field: "output_rate", name: "output", colour: "blue" }],
  }),
  new TimeChart(load, {
    title: "Prompt", unit: "tokens/s", format: compact, axis: compact, floor: 4, empty: quiet,
    series: [{ field: "prompt_rate", name: "prompt", colour: "amber" }],
  }),
  new TimeChart(load, {
    title: "Sequences", unit: "", format: compact, axis: compact, floor: 3, whole: true, empty: "Nothing ran in this range",
    series: [{ field: "running", name: "running", colour: "blue" }, { field: "waiting", name: "waiting", colour: "amber" }],
  }),
  new TimeChart(load, {
    title: "KV cache", unit: "", format: percentText, axis: percentText, fixedTop: 1, empty: "Empty in this range",
    series: [{ field: "kv_usage", name: "usage", colour: "teal" }, { field: "hit_rate", name: "prefix hits", colour: "violet" }],
  }),
  ...[["ttft", "TTFT"], ["itl", "ITL"], ["e2e", "E2E"]].map(([field, title]) => new TimeChart(latency, {
    title, unit: "", format: durationText, axis: durationTick, floor: 0.001, empty: quiet,
    series: [{ field: `${field}_p50`, name: "p50", colour: "blue" }, { field: `${field}_p95`, name: "p95", colour: "amber" }],
  })),
];
const poolMap = new PoolMap();
const timeline = new StepTimeline();
const authorization = () => (page.key ? { Authorization: `Bearer ${page.key}` } : {});
const chat = new Chat(authorization);

function objects(fields, rows) {
  return rows.map((row) => Object.fromEntries(fields.map((field, i) => [field, row[i]])));
}

// ---- data

async function poll() {
  clearTimeout(page.timer);
  if (document.hidden || byId("lock").open) return;
  try {
    const response = await fetch(`dashboard/data?since=${page.next}`, {
      headers: authorization(),
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    if (response.status === 401) {
      lock();
      return;
    }
    if (!response.ok) throw new Error(await errorMessage(response));
    receive(await response.json());
    page.delay = POLL_MS;
  } catch (error) {
    lost(error);
    page.delay = Math.min(page.delay * 1.5, 5000);
  }
  page.timer = setTimeout(poll, page.delay);
}

function lost(error) {
  const died = page.state?.error ?? null;
  status("bad", died === null ? "No connection" : "Engine dead");
  if (died === null) toast("warn", `The server does not answer (${error.message}). Trying again.`);
  else toast("bad", `The engine died (${died}) and the server ended. Trying again.`);
}

function receive(state) {
  if (page.boot !== state.boot) {
    const restarted = page.boot !== null;
    Object.assign(page, { boot: state.boot, rows: [], next: 0 });
    if (restarted) return;
  }
  page.rows.push(...objects(state.sample_fields, state.samples));
  page.rows = page.rows.filter((row) => row.time > state.now - KEPT_SECONDS);
  if (page.rows.length) page.next = page.rows[page.rows.length - 1].number + 1;
  state.steps = objects(state.step_fields, state.steps);
  page.state = state;
  chat.configure(state.facts);
  draw();
}

// ---- drawing

function draw() {
  const state = page.state;
  if (!state) {
    charts.forEach((chart) => chart.draw([], 0, page.seconds, null));
    return;
  }
  const newest = page.rows[page.rows.length - 1] ?? null;
  showHeader(state, newest);
  if (newest) showTiles(state, newest);
  charts.forEach((chart) => chart.draw(page.rows, state.now, page.seconds, page.hover));
  timeline.draw(state.steps, state.now);
  poolMap.draw(state.blocks, state.facts.block_size);
}

function showHeader(state, newest) {
  setText(byId("model"), state.facts.model);
  byId("model").title = `${state.facts.model}, at most ${state.facts.max_model_len} tokens, jaxinfer ${state.facts.version}`;
  document.title = `${state.facts.model} · jaxinfer`;
  setText(byId("uptime"), `up ${spanText(state.uptime)}`);
  if (state.error !== null) {
    status("bad", "Engine dead");
    toast("bad", `The engine is dead: ${state.error}. Requests are refused until the server is started again.`);
    return;
  }
  toast(null);
  if (state.draining) status("warn", "Draining");
  else if (newest && newest.waiting) status("warn", "Queueing");
  else if (newest && newest.running) status("good", "Serving");
  else status("good", "Ready");
}

function tile(name, value, unit, sub) {
  const place = byId(`tile-${name}`);
  if (place.dataset.shown !== value + unit) {
    place.dataset.shown = value + unit;
    place.replaceChildren(value, element("small", "", unit));
  }
  setText(byId(`sub-${name}`), sub);
}

function showTiles(state, newest) {
  const { facts, totals, finished } = state;
  tile("output", compact(newest.output_rate), "tokens/s", `prompt ${compact(newest.prompt_rate)} tokens/s`);
  tile("running", compact(newest.running), "running", `${compact(newest.waiting)} waiting · limit ${facts.max_num_seqs}`);
  tile("kv", percentText(newest.kv_usage).replace(" %", ""), "%", `of ${plural(facts.num_blocks, "block")} in use`);
  const hits = percentText(newest.hit_rate);
  tile("hits", hits.replace(" %", ""), hits === NONE ? "" : "%", "of prompts, last minute");
  tile("ttft", ...duration(newest.ttft_p50), `p50 · p95 ${durationText(newest.ttft_p95)}`);
  tile("itl", ...duration(newest.itl_p50), `p50 · p95 ${durationText(newest.itl_p95)}`);
  showSteps(state);
  const done = Object.values(finished).reduce((a, b) => a + b, 0);
  const odd = [["abort", "aborted"], ["error", "failed"]].filter(([reason]) => finished[reason]);
  const parts = odd.map(([reason, word]) => `${compact(finished[reason])} ${word}`);
  if (totals.rejected) parts.push(`${compact(totals.rejected)} refused`);
  tile("finished", compact(done), "", parts.join(" · ") || "none aborted, failed or refused");
}

function showSteps({ steps, totals }) {
  const recent = steps.slice(-50);
  const mean = (field) => recent.reduce((sum, step) => sum + step[field], 0) / recent.length;
  const host = recent.length ? `device · host ${durationText(mean("host"))}` : "device · host –";
  const extra = [[totals.preemptions, "preemption"], [totals.compilations, "recompilation"]].filter(([count]) => count);
  const sub = [host, ...extra.map(([count, noun]) => plural(count, noun))].join(" · ");
  tile("step", ...duration(recent.length ? mean("device") : null), sub);
  byId("tile-step").title = "mean device time of the last 50 steps";
}

function status(kind, text) {
  byId("status").dataset.kind = kind;
  setText(byId("status"), text);
}

/** Shows a message over the page; null hides it. */
function toast(kind, text = "") {
  const place = byId("toast");
  place.hidden = kind === null;
  place.dataset.kind = kind ?? "";
  setText(place, text);
}

// ---- API key

function lock() {
  status("warn", "Locked");
  toast(null);
  if (page.key) setText(byId("lock-text"), "The server did not accept this API key.");
  page.key = "";
  byId("lock-key").value = "";
  byId("lock").showModal();
}

byId("lock-form").addEventListener("submit", () => {
  page.key = byId("lock-key").value.trim();
});
byId("lock").addEventListener("close", poll);

// ---- time range, hover, visibility

byId("range").addEventListener("click", (event) => {
  const seconds = Number(event.target.dataset.seconds);
  if (!seconds) return;
  page.seconds = seconds;
  for (const button of byId("range").children) button.setAttribute("aria-pressed", String(button === event.target));
  draw();
});

function hoverAt(event) {
  const width = event.target.clientWidth - LEFT - RIGHT;
  const part = (event.offsetX - LEFT) / width;
  page.hover = part < 0 || part > 1 || !page.state ? null : page.state.now - (1 - part) * page.seconds;
  draw();
}

for (const chart of charts) {
  chart.canvas.addEventListener("pointermove", hoverAt);
  chart.canvas.addEventListener("pointerleave", () => {
    page.hover = null;
    draw();
  });
}
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  forgetColours();
  draw();
});

draw();
poll();
