// How it works: twelve tokens, which of them sees which, and the same as a matrix; three ways to go about it.

import { $, Replay, bandHue } from "./ui.js";

const WORDS = "Once upon a time there was one dog who loved to run".split(" ");
const COLUMNS = 4, CELL = 20, MARGIN = 56;
const FIRST = [0, 2, 3, 6, 9, 10], SECOND = WORDS.map((_, i) => i).filter((i) => !FIRST.includes(i));
const before = (steps) => (i) => steps.slice(0, steps.findIndex((step) => step.includes(i))).flat();
const CHAIN = [7, 0, 9, 4, 11, 2, 6, 1, 8, 10, 5, 3].map((i) => [i]);
const STRANDS = [0, 1, 2, 3].map((i) => [i, i + 4, i + 8]);

// Of each: what is predicted in which step, and which tokens one of them sees.
const WAYS = {
  groups: {
    says: "The tokens are split at random into two groups, and each group is predicted from the other, both in one pass. No token ever sees its own group.",
    steps: [FIRST, SECOND], sees: (i) => FIRST.includes(i) ? SECOND : FIRST, band: (i) => FIRST.includes(i) ? 0 : 1, rows: [...FIRST, ...SECOND],
  },
  chain: {
    says: "The tokens are put in some order, and each is predicted from all those before it. One pass trains every step of that order. What is encoded never changes, so it is cached.",
    steps: CHAIN, sees: before(CHAIN), band: () => null, rows: CHAIN.flat(),
  },
  strands: {
    says: "The text is cut into parts, written in parallel, each from left to right. Twelve tokens take four steps. Tokens of the same step do not see each other.",
    steps: STRANDS, sees: before(STRANDS), band: (i) => Math.floor(i / COLUMNS), rows: STRANDS.flat(),
  },
};

let way = WAYS.groups, replay = null, at = 0, picked = null;

export const busy = () => false;
export const stop = () => {};

export function start() {
  replay = new Replay($("e-scrub"), $("e-play"), $("e-at"), (step) => { at = step; picked = null; draw(); });
  for (const radio of document.querySelectorAll("input[name=way]")) radio.addEventListener("change", () => choose(radio.value));
  $("e-next").addEventListener("click", () => { replay.pause(); replay.to((at + 1) % (way.steps.length + 1)); });
  for (const id of ["e-tokens", "e-matrix"]) {
    $(id).addEventListener("pointerover", (event) => pick(token(event.target)));
    $(id).addEventListener("pointerleave", () => pick(null));
  }
  $("e-tokens").addEventListener("click", (event) => pick(token(event.target)));
  $("e-tokens").addEventListener("focusin", (event) => pick(token(event.target)));
  $("e-tokens").addEventListener("focusout", () => pick(null));
  $("e-tokens").addEventListener("keydown", keys);
  choose("groups");
}

function choose(name) {
  way = WAYS[name];
  $("e-says").textContent = way.says;
  picked = null;
  replay.ready(way.steps.length);
  build();
  replay.to(1);
}

function svg(tag, fields, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(fields)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const label = (text, fields) => { const made = svg("text", fields); made.textContent = text; return made; };

// The boxes and cells of a way, once; `draw` then only says what state each is in.
function build() {
  $("e-tokens").replaceChildren(...WORDS.map((word, i) => {
    const x = 4 + (i % COLUMNS) * 98, y = 4 + Math.floor(i / COLUMNS) * 54, band = way.band(i);
    const group = svg("g", { "data-token": i, tabindex: i ? -1 : 0, role: "button" }, svg("rect", { x, y, width: 90, height: 42, rx: 8 }),
      label(word, { x: x + 45, y: y + 26, "text-anchor": "middle" }));
    if (band !== null) {
      const stripe = svg("rect", { x: x + 8, y: y + 36, width: 74, height: 4, rx: 2, class: "band" });
      stripe.style.setProperty("--band", bandHue(band));
      group.append(stripe);
    }
    return group;
  }));
  const side = MARGIN + WORDS.length * CELL;
  $("e-matrix").setAttribute("viewBox", `0 0 ${side + 2} ${side + 2}`);
  const place = (n) => MARGIN + n * CELL;
  $("e-matrix").replaceChildren(...way.rows.flatMap((target, row) => [
    label(WORDS[target], { x: MARGIN - 6, y: place(row) + 14, "text-anchor": "end", "data-row": target }),
    label(WORDS[target], { transform: `translate(${place(row) + 14} ${MARGIN - 6}) rotate(-90)`, "data-column": target }),
    ...way.rows.map((source, column) => svg("rect", { x: place(column) + 1, y: place(row) + 1, width: CELL - 2, height: CELL - 2, rx: 3, "data-row": target, "data-column": source })),
  ]));
}

const stepOf = (i) => way.steps.findIndex((step) => step.includes(i)) + 1;
const quoted = (tokens) => tokens.map((i) => `“${WORDS[i]}”`).join(", ");

function draw() {
  const now = way.steps[at - 1] ?? [], looking = picked === null ? now : [picked];
  const seen = looking.length && (picked !== null || at) ? way.sees(looking[0]) : [];
  for (const group of $("e-tokens").children) {
    const i = Number(group.dataset.token);
    const state = looking.includes(i) ? "now" : seen.includes(i) ? "seen" : stepOf(i) <= at ? "done" : "open";
    group.setAttribute("class", state);
    group.setAttribute("aria-label", `${WORDS[i]}, predicted in step ${stepOf(i)} from ${way.sees(i).length} tokens`);
  }
  for (const cell of $("e-matrix").querySelectorAll("rect")) {
    const target = Number(cell.dataset.row), visible = way.sees(target).includes(Number(cell.dataset.column));
    const state = !visible ? "never" : looking.includes(target) ? "now" : stepOf(target) <= at ? "done" : "later";
    cell.setAttribute("class", state);
  }
  for (const text of $("e-matrix").querySelectorAll("text[data-row]")) text.setAttribute("class", looking.includes(Number(text.dataset.row)) ? "now" : "");
  const count = `${seen.length} token${seen.length === 1 ? "" : "s"}`;
  $("e-caption").textContent = picked !== null ? `“${WORDS[picked]}” sees ${seen.length ? quoted(seen) : "nothing: it is the first"}.`
    : at === 0 ? "Nothing is predicted yet." : `Step ${at}: ${quoted(now)} ${now.length > 1 ? "are" : "is"} predicted from ${seen.length ? count : "nothing"}.`;
}

function token(element) {
  const found = element.closest?.("[data-token], [data-row]");
  return found ? Number(found.dataset.token ?? found.dataset.row) : null;
}

function pick(i) {
  if (i === picked) return;
  picked = i;
  draw();
}

function keys(event) {
  const i = token(event.target), next = i + ({ ArrowRight: 1, ArrowLeft: -1, ArrowDown: COLUMNS, ArrowUp: -COLUMNS }[event.key] ?? NaN);
  if (!(next >= 0 && next < WORDS.length)) return;
  event.preventDefault();
  for (const group of $("e-tokens").children) group.setAttribute("tabindex", Number(group.dataset.token) === next ? 0 : -1);
  $("e-tokens").children[next].focus();
}
