// Write: fill a text, replay how it came, and take its tokens in hand.

import { post, stream } from "./api.js";
import { asked, current, gapped, settings } from "./settings.js";
import { TextView } from "./text_view.js";
import { $, Replay, Run, complain, make, many, newSeed, pace, percent, rate, say, seedOf, stepsText } from "./ui.js";

let view, replay, running = null, opened = -1;

export function start() {
  view = new TextView($("text-view"));
  replay = new Replay($("scrub"), $("play"), $("scrub-at"), (step) => { shut(false); view.draw(step); });
  $("prompt").addEventListener("input", labels);
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
}

export const busy = () => running !== null;
export const stop = () => running?.stop();

export async function fill() {
  const model = current();
  const [path, body] = asked(model);
  await run(path, { ...body, ...settings(), model: model.id }, null);
}

async function again(tokens, seed) {
  const how = { ...settings(), seed };
  if (tokens.filter((token) => token === null).length === 1) how.revise = 0;  // it saw all the others at once
  await run("/v1/fill", { tokens, spaced: view.spaced.filter((i) => tokens[i] === null), ...how, model: current().id }, view.kept());
}

async function run(path, body, kept) {
  stop();
  shut(false);
  complain(null);
  const own = running = new Run(), lead = view.lead;
  labels();
  const landed = new Set(), text = new Set();  // positions: one that lands again is still one token; those of an end are no text
  try {
    await stream(path, body, {
      start: (data) => {
        const steps = data.draft ? Math.max(2, Math.ceil(data.unknown / 3)) : data.steps;  // of exact rounds: a guess
        view.open({ ...data, steps, ...(kept ? { spaced: kept.spaced, lead } : {}) }, kept);
        const shown = data.draft ? { word: "round", counting: true } : { revision: data.revision_steps };
        replay.ready(data.draft ? data.unknown : data.steps, shown);
        replay.mark(0);
        $("legend-strands").hidden = !view.strands;
        $("legend-rejected").hidden = !data.draft;
        own.gap = data.draft ? 3 * pace("pace", steps) : pace("pace", steps);
        say(`Filling ${many(data.unknown, "token")}${data.draft ? "" : ` in ${stepsText(data)}`}`);
      },
      step: (data) => {
        for (const one of data.sampled) {
          landed.add(one.position);
          if (one.text) text.add(one.position); else text.delete(one.position);
        }
        facts(text.size, data.seconds, data.rejected ? roundsText(landed.size, data.step + 1) : "");
        own.push(() => {
          for (const one of data.sampled) view.land(one.position, one.token, one.text, one.probability, data.step);
          if (data.rejected) view.reject(data.step, data.rejected);
          view.hold();
          replay.mark(data.step + 1);
        });
      },
      done: (data) => {
        const rounds = 1 + Math.max(...data.texts[0].steps);
        facts(text.size, data.seconds, body.exact ? roundsText(landed.size, rounds) : ` in ${stepsText(data)}`);
        own.push(() => {
          if (body.exact) { view.settle(rounds); replay.ready(rounds, { word: "round" }); }
          say(`Done: ${data.texts[0].text}`);
        });
      },
    }, own.signal);
    await own.last;
  } catch (error) {
    own.stop();
    complain(error);
    if (error.name === "AbortError") say("Stopped");
  } finally {
    if (running === own) running = null;
    view.release();
    labels();
  }
}

const roundsText = (count, rounds) => ` in ${many(rounds, "round")}, ${(count / rounds).toFixed(1)} tokens per round`;

function facts(count, seconds, how) {
  $("facts").textContent = `${many(count, "token")}${how}, ${seconds.toFixed(2)} s, ${rate(count, seconds)} tokens/s`;
}

export function labels() {
  if (!$("write").hidden) $("go-label").textContent = running ? "Stop" : gapped() ? "Fill" : "Continue";
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
  view.erase(i);
  shut(false);
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
  if (!tokens.includes(null)) { complain(new Error("Every token is given or locked. Unlock one first.")); return; }
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
  $("menu-title").textContent = token === null ? "gap" : view.pieces[i].trim() || "¶ end of text";
  const came = view.came[i];
  $("menu-facts").textContent = token === null ? "Not sampled yet." : came < 0 ? "Given by you."
    : `Sampled in step ${came + 1} of ${view.totals[i]} with probability ${percent(view.chances[i] ?? 0)}.`;
  $("do-lock").replaceChildren(view.locked.has(i) ? "Unlock " : "Lock ", make("kbd", { textContent: "L" }));
  $("do-lock").disabled = !view.made(i);
  $("do-erase").disabled = token === null;
  $("alternatives").replaceChildren(make("li", { className: "hint", textContent: "Asking the model …" }));
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
  const step = view.came[i] ?? view.totals[i] - 1;
  view.land(i, one.token, one.text, one.probability, step);
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
  const hidden = at.bottom + 16 - menu.getBoundingClientRect().top;  // where it stands at the foot of a narrow screen
  if (getComputedStyle(menu).position === "fixed" && hidden > 0) scrollBy(0, hidden);
}

function shut(back = true) {
  if (opened < 0) return;
  $("menu").hidden = true;
  view.spans[opened]?.classList.remove("open");
  if (back) view.focus(opened);
  opened = -1;
}
