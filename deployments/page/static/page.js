// The page: asks the server of its own origin, and shows what it answers. Nothing comes from anywhere else.

import { RoundsView, el, facts, judge, kind, saving, speed } from "./rounds.js";

const $ = (id) => document.getElementById(id);
const fields = $("composer").elements, live = $("live");
const RETRIED = [429, 502, 503, 504], MAX_TRIES = 60, POLL_MS = 2000, DRAW_MS = 40, MAX_TURNS = 20;
const SAMPLES = ["Up betimes and to my office,", "Call me Ishmael.", "It is a truth universally acknowledged,"];
let model = "", turns = [], running = null, before = null, speeds = [], swaps = [];
const hour = new Map(), SWAPS = "paceline:draft_learning_swaps_total"; // of minutes: accepted percents, draft tokens

class Refused extends Error {}
const quiet = (textContent, onclick) => el("button", { type: "button", className: "quiet", textContent, onclick });
const stop = () => running?.controller.abort(), say = (text) => { $("spoken").textContent = text; };

function notice(text = "", isError = false) {
  $("notice").textContent = text;
  $("notice").classList.toggle("error", isError);
}

async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem("key"), authorization = key && { Authorization: `Bearer ${key}` };
    const response = await fetch(path, { ...options, headers: { ...options.headers, ...authorization } });
    if (response.status !== 401) return response;
    sessionStorage.setItem("key", (await askKey()).replace(/[^ -~]/g, ""));  // what a header may hold
  }
}

function askKey() {
  const door = $("door"), input = door.querySelector("input"), refusal = new Refused("This server needs an API key.");
  door.returnValue = input.value = "";
  door.showModal();
  return new Promise((resolve, reject) => {
    door.addEventListener("close", () => (door.returnValue ? resolve(input.value) : reject(refusal)), { once: true });
  });
}

function post(path, body, { headers, ...options } = {}) {
  const json = { "Content-Type": "application/json" };
  return call(path, { method: "POST", body: JSON.stringify(body), headers: { ...json, ...headers }, ...options });
}

const complaint = async (response) =>
  (await response.json().catch(() => null))?.error?.message ?? `The server answers with ${response.status}.`;

/** The events of a stream; if its connection is cut, the same request asks for the rest of it. */
async function* events(path, body, signal, onLoss) {
  let last = null;
  for (let tries = 0; tries < MAX_TRIES; tries += 1) {
    let wait = Math.min(2000, 100 * 2 ** tries);
    try {
      const response = await post(path, body, { signal, headers: last ? { "Last-Event-ID": last } : {} });
      if (!response.ok) {
        wait = Math.min(5000, 1000 * Number(response.headers.get("Retry-After")) || wait);
        throw new (RETRIED.includes(response.status) ? Error : Refused)(await complaint(response));
      }
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
        const whole = (rest + value).split("\n\n");
        rest = whole.pop();
        for (const event of whole) {
          const data = /^data: (.*)$/m.exec(event)?.[1];
          last = /^id: (.*)$/m.exec(event)?.[1] ?? last;
          tries = 0;
          if (data === "[DONE]") return;
          if (data) yield JSON.parse(data);
        }
      }
      throw new Error("The stream ended early.");
    } catch (error) {
      if (signal.aborted || error instanceof Refused) throw error;
      onLoss(error.message);
      await new Promise((resolve) => { setTimeout(resolve, wait); signal.addEventListener("abort", resolve); });
    }
  }
  throw new Refused("The server did not come back.");
}

/** Stream a text into a view, and fill its take, which is all that a replay needs. */
async function stream(take, view, [path, body], signal) {
  const begun = performance.now(), since = () => performance.now() - begun;
  let undrawn = [], timer = 0, isCut = false, latest = 0;
  const flush = () => { timer = 0; undrawn.splice(0).forEach((draw) => draw()); strip(take); };
  const soon = (draw) => { undrawn.push(draw); timer ||= setTimeout(flush, DRAW_MS); };
  take.note = (text) => { soon(() => view.mark(text)); take.marks.push([since(), text]); return since(); };
  const onLoss = (reason) => { isCut = true; notice(`${reason} Asking for the rest.`); };
  try {
    for await (const event of events(path, body, signal, onLoss)) {
      if (event.error) throw new Refused(event.error.message);
      if (isCut) { notice(); if (latest) take.note("resumed"); }
      isCut = false;
      const [choice] = event.choices, { reasoning_content: thought, content } = choice?.delta ?? {}, t = since();
      const text = choice?.text ?? thought ?? content ?? "";
      const rounds = choice?.rounds ?? (text ? [{ texts: [text], accepted: 0, draft: [], last: "plain" }] : []);
      take.text += text;
      for (const round of rounds) {
        take.rounds.push({ ...round, t });
        soon(() => view.add({ ...round, t }));
      }
      if (!rounds.length) continue;
      if (latest) take.longest = Math.max(take.longest, t - latest);
      if (take.killed && t - Math.max(latest, take.killed.t) > take.killed.gap) {
        take.killed.gap = t - Math.max(latest, take.killed.t);
        notice(`${take.killed.name} killed. The longest pause since then: ${Math.round(take.killed.gap)} ms.`);
      }
      latest = t;
    }
  } catch (error) {
    take.end = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) notice(error.message, true);
  }
  take.ms = since();
  clearTimeout(timer);
  flush();
  view.finish(take.text);
}

function newTake(asked, hasDrafts) {
  const label = `${hasDrafts ? "With" : "Without"} drafts`;
  return { asked, hasDrafts, label, text: "", rounds: [], marks: [], longest: 0 };
}

function requestOf({ asked, hasDrafts }, earlier, more = {}) {
  const said = [...earlier.flatMap((take) => [["user", take.asked], ["assistant", take.text]]), ["user", asked]];
  const gap = (role, index, content) => (index && role === "user" && content ? "\n\n" : "");
  const isChat = fields.mode.value === "chat";
  const prompt = isChat
    ? { messages: said.map(([role, content]) => ({ role, content })) }
    : { prompt: said.map(([role, content], index) => gap(role, index, content) + content).join("") };
  const speculative = { trace: true, ...(hasDrafts ? {} : { enabled: false }) };
  const numbers = ["seed", "temperature", "max_tokens"].map((name) => [name, Number(fields[name].value)]);
  const body = { model, ...prompt, stream: true, speculative, ...Object.fromEntries(numbers), ...more };
  return [`v1/${isChat ? "chat/" : ""}completions`, body];
}

function strip({ rounds }) {
  $("strip").replaceChildren(...rounds.slice(-40).map((round) =>
    el("span", {}, ...round.texts.slice(0, 8).map((_, index) => el("i", { className: kind(round, index) })))));
}

async function copy(take, view) {
  if (!navigator.clipboard) getSelection().selectAllChildren(view.text); // not in a secure context
  await (navigator.clipboard ? navigator.clipboard.writeText(take.text) : document.execCommand("copy"));
  say("Copied");
}

/** Save takes as one HTML file, which needs no server and no network. */
async function saveReplay(takes) {
  const [code, style] = await Promise.all(["rounds.js", "page.css"].map(async (path) => (await call(path)).text()));
  const title = `${model}, ${new Date().toISOString().slice(0, 16).replace("T", " ")} UTC`;
  const data = JSON.stringify({ title, takes }).replaceAll("<", "\\u003c");
  const page = `<!doctype html><html lang="en"><meta charset="utf-8"><title>Paceline replay</title>
<meta name="viewport" content="width=device-width"><meta http-equiv="Content-Security-Policy"
content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"><style>${style}</style>
<script type="module">${code}\nplay(${data});</script></body></html>`;
  const href = URL.createObjectURL(new Blob([page], { type: "text/html" }));
  el("a", { href, download: "paceline-replay.html" }).click();
  setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

function showTurn(take) {
  const view = new RoundsView("Answer"), line = el("p", { className: "facts" });
  $("chat").append(el("article", {}, el("p", { className: "asked", textContent: take.asked }), view.node, line));
  const finish = () => line.replaceChildren(
    ...facts(take), quiet("Copy", () => copy(take, view)), quiet("Save replay", () => saveReplay([take])));
  return { view, finish };
}

async function chat(asked, signal) {
  const take = newTake(asked, fields.drafts.checked), { view, finish } = showTurn(take), earlier = turns;
  running.takes = [take];
  await stream(take, view, requestOf(take, earlier), signal);
  finish();
  if (take.text && turns === earlier) turns = [...turns, take].slice(-MAX_TURNS);
  try { sessionStorage.setItem("turns", JSON.stringify(turns)); } catch { sessionStorage.removeItem("turns"); }  // full
  say(`Answer: ${take.text}`);
}

async function compare(asked, signal) {
  const takes = running.takes = [newTake(asked, false), newTake(asked, true)];
  const columns = takes.map((take) => {
    const [line, big] = ["facts", "speed"].map((className) => el("p", { className }));
    const view = new RoundsView(take.label);
    return { view, line, big, node: el("section", {}, el("h2", { textContent: take.label }), big, view.node, line) };
  });
  $("pair").replaceChildren(...columns.map(({ node }) => node));
  $("badge").replaceChildren();
  const run = async (take, index) => {
    const { view, line, big } = columns[index];
    // A salt of its own: the second text must not find the first one's cached prompt, or copy from its text.
    const cache_salt = crypto.getRandomValues(new Uint32Array(4)).join("-");
    await stream(take, view, requestOf(take, [], { cache_salt }), signal);
    big.replaceChildren(speed(take).toFixed(1), el("small", { textContent: " tokens/s" }));
    line.replaceChildren(...facts(take).filter((fact) => !fact.textContent.endsWith("tokens/s")));
  };
  if (fields.together.checked) await Promise.all(takes.map(run));
  else for (const [index, take] of takes.entries()) if (!signal.aborted) await run(take, index);
  if (takes.some((take) => take.end || !take.ms)) return;
  $("badge").replaceChildren(await judge(takes), quiet("Save replay", () => saveReplay(takes)));
  $("saved").textContent = saving(takes);
  say(`${$("badge").textContent}. ${$("saved").textContent}`);
}

async function send() {
  const asked = $("message").value.trim(), isChat = $("compare").hidden, controller = new AbortController();
  if (running || (!asked && !(isChat && fields.mode.value === "text" && turns.length))) return;
  running = { controller, takes: [] };
  if (isChat) $("message").value = "";
  $("welcome").hidden = $("send").hidden = !($("stop").hidden = false);
  notice();
  say("The answer begins.");
  scrollTo(0, isChat ? document.body.scrollHeight : 0);
  await (isChat ? chat : compare)(asked, controller.signal).catch((error) => notice(error.message, true));
  running = null;
  $("send").hidden = !($("stop").hidden = true);
}

function list(id, rows) {
  $(id).replaceChildren(...rows.flatMap(([name, value, color]) =>
    [el("dt", {}, ...(color ? [el("i", { className: color })] : []), name), el("dd", { textContent: value })]));
}

async function poll() {
  if (document.hidden || !live.open) return;
  const metrics = await (await call("metrics")).text(), { routers } = await (await call("health")).json();
  const now = { at: performance.now() }, replicas = new Set();
  for (const [, name, labels, value] of metrics.matchAll(/^([\w:]+)\{([^}]*)\} (\S+)$/gm)) {
    replicas.add(/replica="([^"]*)"/.exec(labels)?.[1]);
    if (name === SWAPS && labels.includes('"dropped"')) continue;
    if (!labels.includes('phase="prefill"')) now[name] = (now[name] ?? 0) + Number(value);
  }
  const since = (name) => (now[name] < before?.[name] ? now[name] : now[name] - (before?.[name] ?? 0)) || 0;
  const rounds = since("paceline:rounds_total"); // a new Router counts from 0, and one may be too late to answer
  if (rounds) {
    const ms = (name) => (1000 * since(name)) / rounds;
    const draft = ms("paceline:draft_wait_seconds_total"), verify = ms("paceline:target_compute_seconds_total");
    const parts = { draft, verify, wait: Math.max(0, ms("paceline:round_seconds_total") - draft - verify) };
    list("times", Object.entries(parts).map(([name, value]) => [name, `${value.toFixed(1)} ms`, name]));
    for (const [name, value] of Object.entries(parts)) live.querySelector(`.bar .${name}`).style.flexGrow = value;
  }
  const drafted = since("vllm:spec_decode_num_draft_tokens_total");
  const share = Math.round((100 * since("vllm:spec_decode_num_accepted_tokens_total")) / drafted);
  speeds.push(before ? (1000 * since("vllm:generation_tokens_total")) / (now.at - before.at) : 0);
  const minute = Math.floor(Date.now() / 60_000), x = (at) => 240 - 4 * (minute - at);
  const [accepted, of] = hour.get(minute) ?? [0, 0];
  if (drafted) hour.set(minute, [accepted + share * drafted, of + drafted]);
  if (before && since(SWAPS)) swaps.push(minute);
  const points = [...hour].map(([at, [sum, count]]) => `${x(at)},${42 - (0.4 * sum) / count}`);
  $("accepted").setAttribute("points", points.join(" "));
  $("swaps").setAttribute("d", swaps.map((at) => `M${x(at)} 0V44`).join(""));
  const most = Math.max(...(speeds = speeds.slice(-60)), 1);
  $("speed").setAttribute("points", speeds.map((value, index) => `${index * 4},${42 - (40 * value) / most}`).join(" "));
  const seconds = Math.max(0, ...routers.map(({ compiling }) => compiling?.left_s ?? 0));
  list("figures", [[`tokens/s${seconds ? `, not compiled for ${seconds} s more` : ""}`, speeds.at(-1).toFixed(1)],
    ["drafts accepted", drafted ? `${share} %` : "\u2013"],
    ["running", now["vllm:num_requests_running"] ?? 0], ["waiting", now["vllm:num_requests_waiting"] ?? 0]]);
  for (const { replica } of routers) replicas.delete(replica);
  list("replicas", [...routers.map(({ ready, reason }) => ["Router", ready ? "ready" : reason]),
    ...[...replicas].filter(Boolean).map(() => ["Ingress", "ready"])]);
  before = { ...before, ...now };
}

function keepPolling() {
  poll().catch(() => list("replicas", [["Server", "no answer"]])).then(() => setTimeout(keepPolling, POLL_MS));
}

async function kill({ value, textContent: name }) {
  const response = await post("demo/kill", { process: value });
  notice(response.ok ? `${name} killed.` : await complaint(response), !response.ok);
  for (const take of (response.ok && running?.takes) || []) {
    if (!take.note || take.ms) continue; // it has not begun, or has ended
    take.killed = { name, t: take.note(`${name} killed`), gap: 0 };
  }
}

function showView() {
  const isChat = document.querySelector("[name=view]:checked").value === "chat";
  $("chat").hidden = $("new").hidden = !($("compare").hidden = isChat);
  $("welcome").hidden = isChat ? turns.length || running : $("pair").firstChild;
}

function startAgain() {
  stop();
  turns = [];
  sessionStorage.removeItem("turns");
  $("chat").replaceChildren();
  showView();
  $("message").focus();
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
fields.ghosts.addEventListener("change", () => document.body.classList.toggle("no-ghosts", !fields.ghosts.checked));
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", ({ key }) => { if (key === "Escape") stop(); });
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", startAgain);
for (const radio of document.querySelectorAll("[name=view]")) radio.addEventListener("change", showView);
for (const button of $("demo").querySelectorAll("button")) button.addEventListener("click", () => kill(button));
$("samples").append(...SAMPLES.map((text) => {
  const onclick = () => { $("message").value = text; send(); };
  return el("button", { type: "button", textContent: text, onclick });
}));

async function open() {
  live.open = matchMedia("(min-width: 861px)").matches;
  $("demo").hidden = document.body.dataset.page !== "demo";
  const [card] = (await (await call("v1/models")).json()).data;
  model = card.id;
  $("model").textContent = `${model}, ${card.max_model_len.toLocaleString("en")} tokens of context`;
  const hasTemplate = (await post("tokenize", { messages: [{ role: "user", content: "a" }] })).ok;
  fields.mode.value = hasTemplate ? "chat" : "text";
  fields.mode.disabled = !hasTemplate;
  turns = JSON.parse(sessionStorage.getItem("turns") ?? "[]");
  for (const take of turns) {
    const { view, finish } = showTurn(take);
    take.rounds.forEach((round) => view.add(round));
    view.finish(take.text);
    finish();
  }
  showView();
  keepPolling();
}

open().catch((error) => notice(`The page cannot start: ${error.message}`, true));
