// Write: fill a text, replay how it came, and take its tokens in hand.

import { post, stream } from "./api.js";
import { TextView } from "./text_view.js";
import { $, Pacer, Replay, complain, make, newSeed, pace, percent, say, seedOf } from "./ui.js";

const GAP = /\[[0-9]+\]|_{3,}/g;
let view, replay, running = null, opened = -1, models = [];

export function settings() {
  const top = Number($("top-p").value);
  const order = $("order").value;
  const revise = $("revise").disabled ? 0 : Number($("revise").value);
  const pace = order === "strands" ? { strands: 2 ** Number($("strands").value) } : { steps: Number($("steps").value) };
  return { ...pace, temperature: Number($("temperature").value), top_p: top < 1 ? top : null, order, revise, seed: seedOf("seed") };
}

// Revision needs a model that can go back, and an order that is known beforehand. Strands take the place of steps.
function able() {
  const strands = $("order").value === "strands";
  $("revise").disabled = !current().any_order || $("order").value === "confidence";
  $("strands-field").hidden = !strands;
  $("steps-field").hidden = strands;
}

// The order that a model was trained on: one of chains writes in strands, any other decides in any order.
function usual() {
  $("order").value = /strands|left/.test(current().orders ?? "") ? "strands" : "random";
  able();
}

// What the prompt asks for: a fill where it has blanks, else a continuation.
export function asked(model) {
  const text = $("prompt").value;
  return text.match(GAP) ? ["/v1/fill", { text }] : ["/v1/generate", { prompt: text, length: Math.min(model.max_length, 256) }];
}

export function start(found) {
  models = found;
  view = new TextView($("text-view"));
  replay = new Replay($("scrub"), $("play"), $("scrub-at"), (step) => { shut(false); view.draw(step); });
  $("order").addEventListener("change", able);
  $("model").addEventListener("change", usual);
  usual();
  $("prompt").addEventListener("input", hint);
  $("blank").addEventListener("click", blank);
  $("resample").addEventListener("click", resampleAll);
  $("regap").addEventListener("click", () => again(view.tokens, newSeed()));
  $("copy").addEventListener("click", async () => { await navigator.clipboard.writeText(view.text().trim()); say("Copied"); });
  $("text-view").addEventListener("click", (event) => { const i = index(event.target); if (i >= 0) open(i); });
  $("text-view").addEventListener("keydown", keys);
  $("menu").addEventListener("keydown", (event) => { if (event.key === "Escape") shut(); else act(event, opened); });
  $("menu-close").addEventListener("click", () => shut());
  $("do-lock").addEventListener("click", () => lock(opened));
  $("do-erase").addEventListener("click", () => erase(opened));
  $("do-resample").addEventListener("click", () => resample(opened));
  document.addEventListener("pointerdown", (event) => {
    if (opened >= 0 && !$("menu").contains(event.target) && !$("text-view").contains(event.target)) shut(false);
  });
  hint();
}

export function hint() {
  const area = $("prompt");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 320)}px`;
  const gaps = $("prompt").value.match(GAP) || [];
  const count = gaps.reduce((sum, gap) => sum + (gap[0] === "_" ? gap.length : Number(gap.slice(1, -1))), 0);
  $("hint").textContent = gaps.length
    ? `${gaps.length} blank${gaps.length > 1 ? "s" : ""}, ${count} tokens. [8] is a blank of eight tokens, ___ one of three.`
    : "No blank: the text is continued. Write [8] or ___ where tokens shall come.";
}

function blank() {
  const area = $("prompt");
  area.setRangeText("[8]", area.selectionStart, area.selectionEnd, "end");
  area.focus();
  hint();
}

export const busy = () => running !== null;
export const stop = () => running?.abort();

export async function fill() {
  const model = current();
  const [path, body] = asked(model);
  await run(path, { ...body, ...settings(), model: model.id }, null);
}

const current = () => models.find((model) => model.id === $("model").value) || models[0];

async function again(tokens, seed) {
  const kept = { came: view.came, chances: view.chances, locked: view.locked };
  const how = { ...settings(), seed };
  if (tokens.filter((token) => token === null).length === 1) how.revise = 0;  // it saw all the others at once
  await run("/v1/fill", { tokens, spaced: view.spaced.filter((i) => tokens[i] === null), ...how, model: current().id }, { ...kept, spaced: view.spaced });
}

async function run(path, body, kept) {
  stop();
  shut(false);
  complain(null);
  const control = running = new AbortController();
  labels();
  const lead = view.lead;
  const pacer = new Pacer(0);
  const landed = new Set();  // positions: one that lands again is still one token
  try {
    await stream(path, body, {
      start: (data) => {
        view.open(kept ? { ...data, spaced: kept.spaced, lead } : data, kept);
        replay.ready(data.steps);
        replay.mark(0);
        pacer.gap = pace("pace", data.steps);
        say(`Filling ${data.unknown} tokens in ${data.steps} steps`);
      },
      step: (data) => {
        for (const one of data.decided) landed.add(one.position);
        facts(landed.size, data.seconds);
        pacer.push(() => {
          for (const one of data.decided) view.land(one.position, one.token, one.text, one.probability, data.step);
          replay.mark(data.step + 1);
        });
      },
      done: (data) => {
        facts(landed.size, data.seconds, data.steps);
        pacer.push(() => say(`Done: ${data.texts[0].text}`));
      },
    }, control.signal);
    control.signal.addEventListener("abort", () => pacer.stop());
    await pacer.last;
  } catch (error) {
    pacer.stop();
    complain(error);
    if (error.name === "AbortError") say("Stopped");
  } finally {
    if (running === control) running = null;
    labels();
  }
}

function facts(count, seconds, steps) {
  const speed = count / Math.max(seconds, 1e-6);
  const rate = speed >= 100 ? Math.round(speed).toLocaleString("en") : speed.toFixed(1);
  const many = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
  $("facts").textContent = `${many(count, "token")}${steps ? ` in ${many(steps, "step")}` : ""}, ${seconds.toFixed(2)} s, ${rate} tokens/s`;
}

export function labels() {
  $("go-label").textContent = running ? "Stop" : "Fill";
  const made = !running && view.tokens.some((_, i) => view.made(i));
  $("resample").disabled = !made;
  $("copy").disabled = !made;
  $("regap").hidden = Boolean(running) || !view.erased();
}

function index(element) {
  const found = element.closest?.(".tok");
  return found ? Number(found.dataset.i) : -1;
}

function keys(event) {
  const i = index(event.target);
  if (i < 0) return;
  const moves = { ArrowRight: 1, ArrowLeft: -1 };
  if (event.key in moves && view.has(i + moves[event.key])) { view.focus(i + moves[event.key]); event.preventDefault(); }
  else if (event.key === "Enter" || event.key === " ") { open(i); event.preventDefault(); }
  else act(event, i);
}

function act(event, i) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const doings = { l: lock, e: erase, Delete: erase, r: resample };
  const doing = doings[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (doing) { doing(i); event.preventDefault(); }
}

function lock(i) {
  if (!view.made(i)) return;
  if (!view.locked.delete(i)) view.locked.add(i);
  view.paint(i, false);
  say(view.spoken(i, view.now(i)));
  if (opened === i) shut();
}

function erase(i) {
  if (running || view.tokens[i] === null) return;
  view.tokens[i] = view.pieces[i] = null;
  view.locked.delete(i);
  shut(false);
  view.paint(i, false);
  view.focus(i);
  labels();
  say("Erased");
}

async function resample(i) {
  if (running || view.tokens[i] === undefined) return;
  const tokens = view.tokens.map((token, at) => at === i ? null : token);
  view.locked.delete(i);
  await again(tokens, newSeed());
}

async function resampleAll() {
  const tokens = view.tokens.map((token, i) => view.made(i) && !view.locked.has(i) ? null : token);
  if (!tokens.includes(null)) { complain(new Error("every token is given or locked: unlock one first")); return; }
  $("seed").value = newSeed();
  await again(tokens, seedOf("seed"));
}

async function open(i) {
  if (running || !view.has(i)) return;
  shut(false);
  if (view.after < view.steps) { replay.pause(); replay.to(view.steps); }  // what is taken in hand is the last one
  opened = i;
  const menu = $("menu"), span = view.spans[i], token = view.tokens[i];
  span.classList.add("open");
  $("menu-title").textContent = token === null ? "a blank" : view.pieces[i].trim() || "¶ end of text";
  const came = view.came[i];
  $("menu-facts").textContent = token === null ? "Not decided yet." : came < 0 ? "Given by you."
    : `Landed in step ${came + 1} of ${view.steps} with a probability of ${percent(view.chances[i] ?? 0)}.`;
  $("do-lock").replaceChildren(view.locked.has(i) ? "Unlock " : "Lock ", make("kbd", { textContent: "L" }));
  $("do-lock").disabled = !view.made(i);
  $("do-erase").disabled = token === null;
  $("alternatives").replaceChildren(make("li", { className: "hint", textContent: "asking the model …" }));
  menu.hidden = false;
  place(menu, span);
  (view.made(i) ? $("do-lock") : $("do-resample")).focus({ preventScroll: true });
  try {
    const data = await post("/v1/alternatives", { tokens: view.tokens, position: i, k: 8, model: current().id });
    if (opened === i) { list(data.alternatives, i); place(menu, span); }
  } catch (error) {
    if (opened === i) $("alternatives").replaceChildren(make("li", { className: "hint", textContent: error.message }));
  }
}

function list(alternatives, i) {
  const most = Math.max(...alternatives.map((one) => one.probability));
  $("alternatives").replaceChildren(...alternatives.map((one) => {
    const word = make("span", { className: "word", textContent: one.text.replaceAll("\n", "⏎") || "¶" });
    const button = make("button", { type: "button" }, word, make("span", { className: "chance", textContent: percent(one.probability) }));
    button.style.setProperty("--p", `${(100 * one.probability / most).toFixed(1)}%`);
    if (one.token === view.tokens[i]) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => choose(i, one));
    return make("li", {}, button);
  }));
}

function choose(i, one) {
  const step = view.came[i] >= 0 ? view.came[i] : view.steps - 1;
  view.land(i, one.token, one.text, one.probability, view.came[i] === -1 ? -1 : step);
  if (view.came[i] >= 0) view.locked.add(i);
  view.paint(i, true);
  shut();
  labels();
  say(`${one.text.trim()} chosen and locked`);
}

function place(menu, span) {
  const at = span.getBoundingClientRect(), width = menu.offsetWidth;
  menu.style.left = `${Math.max(8, Math.min(at.left + scrollX, document.documentElement.clientWidth - width - 12))}px`;
  const below = innerHeight - at.bottom - 20, above = at.top - 20;
  const under = below >= Math.min(menu.scrollHeight, above);
  menu.style.maxHeight = `${Math.max(200, under ? below : above)}px`;
  menu.style.top = `${scrollY + (under ? at.bottom + 8 : at.top - 8 - menu.offsetHeight)}px`;
}

function shut(back = true) {
  if (opened < 0) return;
  $("menu").hidden = true;
  view.spans[opened]?.classList.remove("open");
  if (back) view.focus(opened);
  opened = -1;
}
