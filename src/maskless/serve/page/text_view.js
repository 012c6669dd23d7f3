// A text shown token by token: what is given, what has landed (coloured by its step), what is still open.

import { hue, make, percent } from "./ui.js";

export class TextView {
  constructor(element) {
    this.element = element;
    this.clear("Filled text appears here, token by token.");
  }
  clear(text) {
    Object.assign(this, { tokens: [], pieces: [], came: [], chances: [], past: [], locked: new Set(), spaced: [], lead: 0, steps: 0, spans: [], spaces: [], old: new Set() });
    this.element.replaceChildren(make("span", { className: "empty", textContent: text }));
  }
  get empty() { return this.tokens.length === 0; }

  // A run begins: the opening of a stream. kept: what is known of tokens that were decided before.
  open(start, kept = null) {
    const n = start.tokens.length;
    Object.assign(this, { tokens: [...start.tokens], pieces: [...start.pieces], spaced: start.spaced, lead: start.lead, steps: start.steps });
    this.came = kept ? kept.came.map((step, i) => this.tokens[i] === null ? null : step) : this.tokens.map((t) => t === null ? null : -1);
    this.chances = kept ? kept.chances : new Array(n).fill(null);
    this.past = this.tokens.map(() => []);  // of each position: how it landed before, the last time first
    this.locked = kept ? kept.locked : new Set();
    this.old = kept ? new Set(this.tokens.flatMap((t, i) => t !== null && kept.came[i] >= 0 ? [i] : [])) : new Set();
    this.spans = this.tokens.map(() => make("span", { className: "tok" }));
    this.spaces = this.tokens.map(() => document.createTextNode(""));  // outside of the coloured part, where lines may break
    this.spans.forEach((span, i) => { span.dataset.i = i; span.setAttribute("role", "button"); span.tabIndex = -1; });
    this.element.replaceChildren(...this.spans.flatMap((span, i) => i < this.lead ? [] : [this.spaces[i], span]));
    if (this.spans[this.lead]) this.spans[this.lead].tabIndex = 0;
    this.draw();
  }
  land(position, token, piece, chance, step) {
    if (this.made(position) && this.came[position] < step) this.past[position].unshift(this.now(position));
    this.tokens[position] = token;
    this.pieces[position] = piece;
    this.chances[position] = chance;
    this.came[position] = step;
    this.old.delete(position);
    this.paint(position, true);
  }
  now(i) { return { piece: this.pieces[i], chance: this.chances[i], step: this.came[i] }; }
  // What is to be seen of a token, null where it is open: how it had landed by then.
  seen(i) {
    if (this.tokens[i] === null) return null;
    return this.old.has(i) ? this.now(i) : [this.now(i), ...this.past[i]].find((one) => one.step < this.after) ?? null;
  }
  // What was known after so many steps of the last run; tokens of earlier runs stay.
  draw(after = Infinity) {
    this.after = after;
    for (let i = this.lead; i < this.spans.length; i++) this.paint(i, false);
  }
  paint(i, fresh) {
    const span = this.spans[i];
    if (!span) return;
    const seen = this.seen(i), open = seen === null;
    const made = !open && seen.step >= 0, special = !open && seen.piece === "";
    const kinds = ["tok", open && "gap", made && "made", special && "special", this.locked.has(i) && "locked", fresh && "fresh"];
    span.className = kinds.filter(Boolean).join(" ");
    const piece = seen?.piece ?? "", word = piece.trimStart();
    this.spaces[i].data = open ? "\u200b" : piece.slice(0, piece.length - word.length);
    span.textContent = open ? "" : special ? "¶" : word || "␣";
    if (made) span.style.setProperty("--hue", hue(seen.step, this.steps).toFixed(0)); else span.style.removeProperty("--hue");
    span.setAttribute("aria-label", this.spoken(i));
  }
  spoken(i, seen = this.seen(i)) {
    if (!seen) return "blank";
    const text = seen.piece.trim() || "end of text";
    if (seen.step < 0) return `${text}, given`;
    const lock = this.locked.has(i) ? ", locked" : "";
    return `${text}, step ${seen.step + 1}, probability ${percent(seen.chance ?? 0)}${lock}`;
  }
  text() { return this.pieces.slice(this.lead).map((piece) => piece ?? "").join(""); }
  has(i) { return this.spans[i] !== undefined && i >= this.lead; }
  made(i) { return this.tokens[i] !== null && this.came[i] >= 0; }
  erased() { return this.tokens.filter((token) => token === null).length; }
  focus(i) {
    this.spans.forEach((span) => { span.tabIndex = -1; });
    if (this.spans[i]) { this.spans[i].tabIndex = 0; this.spans[i].focus(); }
  }
}
