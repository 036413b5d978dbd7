// How the rounds of a text look, and how they are played again: used by the page, and copied into every saved replay.

export const el = (tag, properties = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    name in node ? (node[name] = value) : node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
};

const WHY = { recovered: "the draft differed", bonus: "the whole draft was accepted", plain: "there was no draft" };
const visible = (text) => text.replaceAll("\n", "\u23ce");
const duration = (ms) => (ms < 995 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
export const kind = (round, index) => (index < round.accepted ? "accepted" : round.last);

/** Which draft tokens were accepted and which one stood where the target decided otherwise; a draft may be a tree. */
export function verdict({ draft, parents: tree, texts, accepted, last }) {
  const path = [], depths = [], parents = tree ?? draft.map((_, index) => index - 1);
  const children = () => [...draft.keys()].filter((index) => parents[index] === (path.at(-1) ?? -1));
  for (const text of texts.slice(0, accepted)) {
    path.push(children().find((index) => draft[index] === text) ?? children()[0]);
  }
  for (const parent of parents) depths.push(parent < 0 ? 0 : depths[parent] + 1);
  return { path, depths, rejected: last === "recovered" ? children().map((index) => draft[index]) : [] };
}

/** A text whose tokens are marked by round; the pointer or the arrow keys show one round's draft. */
export class RoundsView {
  constructor(label) {
    this.rounds = [];
    this.nodes = [];
    const name = `${label}. Arrow keys show rounds.`;
    this.text = el("div", { className: "text", tabIndex: 0, role: "group", "aria-label": name });
    this.card = el("div", { className: "card", role: "status", hidden: true });
    this.node = el("div", { className: "rounds" }, this.text, this.card);
    this.text.addEventListener("pointerover", ({ target }) => this.show(this.nodes.indexOf(target.closest(".round"))));
    for (const event of ["pointerleave", "blur"]) this.text.addEventListener(event, () => this.show(-1));
    this.text.addEventListener("keydown", (event) => {
      const now = this.nodes.findIndex((node) => node.classList.contains("shown")), end = this.nodes.length - 1;
      const places = { ArrowRight: Math.min(now + 1, end), ArrowLeft: Math.max(now - 1, 0), Home: 0, End: end };
      const next = places[event.key];
      if (next === undefined) return;
      event.preventDefault();
      this.show(next);
    });
  }

  add(round) {
    const token = (text, className, more) => {
      const word = text.trimStart(); // blanks are not marked
      return [text.slice(0, text.length - word.length), el("span", { className, textContent: word, ...more })];
    };
    const parts = round.texts.map((text, index) => token(text, kind(round, index)));
    const ghosts = verdict(round).rejected.map((text) =>
      el("span", { className: "ghost", "aria-hidden": "true" }, ...token(visible(text), "")));
    parts.splice(round.accepted, 0, ghosts);
    this.rounds.push(round);
    this.nodes.push(el("span", { className: "round" }, ...parts.flat()));
    this.text.append(this.nodes.at(-1));
  }

  mark(textContent) { this.text.append(el("span", { className: "mark", textContent })); }

  /** Cut off the last tokens what was not sent as text, such as a stop string. */
  finish(text) {
    let left = text.length;
    for (const part of this.nodes.flatMap((node) => [...node.childNodes])) {
      if (part.className === "ghost") continue;
      part.textContent = part.textContent.slice(0, left);
      left -= part.textContent.length;
    }
  }

  show(index) {
    const node = this.nodes[index], round = this.rounds[index];
    this.nodes.forEach((other) => other.classList.toggle("shown", other === node));
    this.card.hidden = !node;
    if (!node) return;
    const { path, depths } = verdict(round);
    const row = (className, text, note, depth = 0) =>
      el("li", {}, "\u2003".repeat(depth), el("span", { className, textContent: visible(text) }), ` ${note}`);
    const missed = round.last === "accepted" ? "not needed" : "rejected";
    const rows = round.draft.map((text, at) => {
      const depth = round.parents ? depths[at] : 0;
      return path.includes(at) ? row("accepted", text, "accepted", depth) : row("ghost", text, missed, depth);
    });
    if (WHY[round.last]) rows.push(row(round.last, round.texts.at(-1), `${round.last}: ${WHY[round.last]}`));
    const before = index ? this.rounds[index - 1].t : 0, since = `${duration(round.t - before)} after the`;
    this.card.replaceChildren(
      el("b", { textContent: `Round ${index + 1}: ${round.accepted} of ${round.draft.length} draft tokens accepted` }),
      el("ol", {}, ...rows), el("small", { textContent: `${since} ${index ? "last" : "request"}` }));
    const box = node.getClientRects()[0], frame = this.node.getBoundingClientRect();
    this.card.style.top = `${box.bottom - frame.top + 8}px`;
    this.card.style.left = `${Math.max(0, Math.min(box.left - frame.left, frame.width - this.card.offsetWidth))}px`;
  }
}

const total = (take, number) => take.rounds.reduce((sum, round) => sum + number(round), 0);
export const speed = (take) => (1000 * total(take, (round) => round.texts.length)) / take.ms;

/** What there is to say about a text that has ended. */
export function facts(take) {
  const tokens = total(take, (round) => round.texts.length), drafted = total(take, (round) => round.draft.length);
  const accepted = total(take, (round) => round.accepted), share = Math.round((100 * accepted) / drafted);
  const lines = [`${tokens} tokens`, `${speed(take).toFixed(1)} tokens/s`, duration(take.ms),
    drafted ? `${accepted} of ${drafted} draft tokens accepted (${share} %)` : "no drafts",
    `${(tokens / Math.max(take.rounds.length, 1)).toFixed(2)} tokens a round`,
    take.longest > 1000 && `longest pause ${duration(take.longest)}`, take.end];
  return lines.filter(Boolean).map((textContent) => el("span", { textContent }));
}

async function digest(text) {
  const bytes = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text)));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Whether two texts are identical, by their hashes, or where they differ; browsers hash in secure contexts only. */
export async function judge([{ text: one }, { text: other }]) {
  const hashes = globalThis.crypto?.subtle && (await Promise.all([digest(one), digest(other)]));
  const isSame = hashes ? hashes[0] === hashes[1] : one === other;
  let at = 0;
  while (!isSame && one[at] === other[at]) at += 1;
  const how = hashes ? `SHA-256 of both texts: ${hashes[0].slice(0, 16)}\u2026` : "letter by letter: hashes need HTTPS";
  const [word, className, note] = isSame ? ["identical", "badge same", how]
    : ["different", "badge other", `from character ${[...one.slice(0, at)].length + 1} on`];
  return el("p", { className }, el("b", { textContent: word }), ` ${note}`);
}

/** What drafts saved, from a run without them and one with them. */
export function saving([without, drafted]) {
  const saved = without.ms - drafted.ms, percent = Math.round((100 * saved) / without.ms);
  if (percent > 0) return `Drafts saved ${duration(saved)} of ${duration(without.ms)} (${percent} %).`;
  return `A draft is not worth it here: ${duration(Math.max(0, -saved))} longer (${-percent} %).`;
}

/** Play a saved replay: the texts grow as they did. */
export async function play({ title, takes }) {
  const end = Math.max(...takes.map((take) => take.ms));
  const button = el("button", { className: "main", textContent: "Pause" }), clock = el("span");
  const slider = el("input", { type: "range", max: end, value: 0, step: 10, "aria-label": "Time" });
  const rate = el("select", { "aria-label": "Speed" });
  rate.append(...[1, 0.5, 0.25].map((value) => el("option", { value, textContent: `${value} \u00d7` })));
  const columns = takes.map((take) => ({ take, node: el("section"), drawn: Infinity, events: [
    ...take.rounds.map((round) => ({ t: round.t, draw: (view) => view.add(round) })),
    ...take.marks.map(([t, text]) => ({ t, draw: (view) => view.mark(text) })),
    { t: take.ms, draw: (view, line) => { view.finish(take.text); line.append(...facts(take)); } },
  ].sort((a, b) => a.t - b.t) }));
  const isPair = takes.length > 1;
  const verdicts = isPair ? [await judge(takes), el("p", { textContent: saving(takes) })] : [];
  document.body.append(
    el("header", {}, el("h1", { textContent: "Paceline replay" }), el("p", { id: "model", textContent: title })),
    el("main", { className: "replay" }, el("p", { className: "asked", textContent: takes[0].asked }),
      el("p", { className: "player" }, button, slider, clock, rate),
      el("div", { className: isPair ? "pair" : "" }, ...columns.map(({ node }) => node)), ...verdicts));
  let now = 0, before = performance.now(), isRunning = true;
  const draw = () => {
    for (const column of columns) {
      const due = column.events.filter(({ t }) => t <= now).length, { label } = column.take;
      if (due < column.drawn) { // at the beginning, and after a step back
        Object.assign(column, { view: new RoundsView(label), line: el("p", { className: "facts" }), drawn: 0 });
        column.node.replaceChildren(el("h2", { textContent: label }), column.view.node, column.line);
      }
      for (const event of column.events.slice(column.drawn, due)) event.draw(column.view, column.line);
      column.drawn = due;
    }
    slider.value = now;
    clock.textContent = duration(now);
  };
  const run = (goes) => { isRunning = goes; button.textContent = goes ? "Pause" : "Play"; };
  button.onclick = () => { if (!isRunning && now >= end) now = 0; run(!isRunning); };
  slider.oninput = () => { now = Number(slider.value); draw(); };
  const frame = (time) => {
    if (isRunning) now = Math.min(end, now + (time - before) * Number(rate.value));
    if (isRunning) draw();
    if (now >= end) run(false);
    before = time;
    requestAnimationFrame(frame);
  };
  draw();
  requestAnimationFrame(frame);
}
