// A text shown token by token: what is given, what has landed (coloured by its step), what is still open.

import { bandHue, hue, make, percent } from "./ui.js";

const EDGE = 6;  // pixels beside a gap

export class TextView {
  constructor(element) {
    this.element = element;
    this.pen = document.createElement("canvas").getContext("2d");
    this.clear("Filled text appears here, token by token.");
  }
  clear(text) {
    Object.assign(this, { tokens: [], pieces: [], came: [], chances: [], totals: [], past: [], locked: new Set(), spaced: [], lead: 0, steps: 0, strands: null });
    Object.assign(this, { spans: [], spaces: [], old: new Set(), rooms: [], lines: [], heights: [], filling: false, rejections: [], marked: [] });
    this.element.replaceChildren(make("span", { className: "empty", textContent: text }));
  }
  get empty() { return this.tokens.length === 0; }

  // A run begins: the opening of a stream. kept: what is known of tokens that were decided before.
  open(start, kept = null) {
    const n = start.tokens.length, decided = (i) => this.tokens[i] !== null;
    Object.assign(this, { tokens: [...start.tokens], pieces: [...start.pieces], spaced: start.spaced, lead: start.lead, steps: start.steps });
    this.came = kept ? kept.came.map((step, i) => decided(i) ? step : null) : this.tokens.map((t) => t === null ? null : -1);
    this.chances = kept ? kept.chances : new Array(n).fill(null);
    this.totals = this.tokens.map((_, i) => kept && decided(i) ? kept.totals[i] : start.steps);  // steps of the run that decided it
    this.past = this.tokens.map(() => []);  // of each position: how it landed before, the last time first
    this.rejections = [];  // of each round: drafts that did not stand
    this.locked = kept ? kept.locked : new Set();
    this.old = kept ? new Set(this.tokens.flatMap((t, i) => t !== null && kept.came[i] >= 0 ? [i] : [])) : new Set();
    this.filling = false;
    this.strands = kept && start.unknown === 1 ? kept.strands : start.strands && Math.max(...start.strands) > 0 ? start.strands : null;
    this.spans = this.tokens.map(() => make("span", { className: "tok" }));
    this.spaces = this.tokens.map(() => document.createTextNode(""));  // outside of the coloured part, where lines may break
    const still = this.element.classList.contains("still");  // nothing to do with its tokens
    this.spans.forEach((span, i) => { span.dataset.i = i; if (!still) { span.setAttribute("role", "button"); span.tabIndex = -1; } });
    this.release();
    if (this.spans[this.lead] && !still) this.spans[this.lead].tabIndex = 0;
    this.draw();
    this.reserve();
  }
  // Tokens and the spaces between and behind them; those of a strand are in an element of its own that has its band.
  banded(from, to) {
    const all = [];
    let band = null;
    for (let i = from; i < to; i++) {
      const strand = this.strands?.[i] ?? -1, between = i > from ? [this.spaces[i]] : [];
      if (strand >= 0 && band?.dataset.strand === String(strand)) { band.append(...between, this.spans[i]); continue; }
      band = strand < 0 ? null : make("span", { className: "strand" }, this.spans[i]);
      if (band) { band.dataset.strand = strand; band.style.setProperty("--band", bandHue(strand)); }
      all.push(...between, band ?? this.spans[i]);
    }
    return to < this.spans.length ? [...all, this.spaces[to]] : all;
  }

  // While a text fills, each gap has the room of a usual token and a little more, and each line stays a line.
  reserve() {
    const style = getComputedStyle(this.element);
    this.pen.font = `${style.fontSize} ${style.fontFamily}`;
    this.em = parseFloat(style.fontSize);
    const given = this.pieces.filter((piece) => piece);
    const usual = given.length < 8 ? 2.1 * this.em : given.reduce((sum, piece) => sum + this.room(piece), 0) / given.length;
    this.filling = true;
    this.rooms = [];
    this.tokens.forEach((token, i) => { if (token === null) this.resize(i, 1.2 * usual); });
    this.lay();
  }
  // Make an element of each line, as the text breaks now.
  lay() {
    const begins = [];
    for (const span of this.spans) span.classList.remove("fresh");  // what is moved would land once more
    this.element.replaceChildren(...this.banded(this.lead, this.spans.length));
    for (let i = this.lead; i < this.spans.length; i++) {
      if (i === this.lead || !this.spans[i].hidden && this.spans[i].offsetLeft <= this.spans[i - 1].offsetLeft) begins.push(i);
      this.lines[i] = begins.length;
    }
    const line = (from, k) => make("span", { className: "line" }, ...this.banded(from, begins[k + 1] ?? this.spans.length));
    this.element.replaceChildren(...begins.map(line));
    this.heights = [...this.element.children].map((one) => one.offsetHeight);
  }
  room(piece) { return piece === "" ? 0.5 * this.em : this.pen.measureText(piece).width + 4; }
  resize(i, room) {
    this.rooms[i] = Math.max(0.6 * this.em, Math.min(4 * this.em, room));
    this.spans[i].style.width = `${(this.rooms[i] - EDGE).toFixed(2)}px`;
  }
  // What a token takes more or less than its gap had, the other gaps of its line give or get, those behind it first.
  settleIn(i) {
    const open = [...this.rooms.keys()].filter((j) => this.lines[j] === this.lines[i] && this.tokens[j] === null);
    const behind = open.filter((j) => j > i), some = behind.length ? behind : open;
    const over = this.room(this.pieces[i]) - this.rooms[i];
    for (const j of some) this.resize(j, this.rooms[j] - over / some.length);
    this.rooms[i] = undefined;
  }
  // After each step: a line that has become too long is broken again, and what is below the text stays until the end.
  hold() {
    if ([...this.element.children].some((one, k) => one.offsetHeight > this.heights[k] + 4)) this.lay();
    this.element.style.minHeight = `${this.element.offsetHeight}px`;
  }
  // All is there: lines break where they do in any text.
  release() {
    const focused = this.spans.indexOf(document.activeElement);
    this.element.style.minHeight = "";
    if (this.filling) { this.filling = false; this.draw(this.after); }
    this.trim();
    if (this.spans.length) this.element.replaceChildren(...this.banded(this.lead, this.spans.length));
    if (focused >= 0) this.spans[focused].focus();
  }

  // Behind the end of a text stands padding: one mark shows where it ends.
  trim() {
    let end = this.spans.length - 1;
    while (end > this.lead && this.pieces[end] === "" && this.pieces[end - 1] === "") end--;
    this.spans.forEach((span, i) => { span.hidden = i > end; });
  }

  land(position, token, piece, chance, step) {
    if (this.made(position) && this.came[position] < step) this.past[position].unshift(this.now(position));
    this.tokens[position] = token;
    this.pieces[position] = piece;
    this.chances[position] = chance;
    this.came[position] = step;
    this.old.delete(position);
    this.paint(position, true);
    if (this.rooms[position] !== undefined) this.settleIn(position);
  }
  erase(i) {
    this.spans[i].style.width = `${Math.max(16, this.room(this.pieces[i]) - EDGE).toFixed(1)}px`;
    this.tokens[i] = this.pieces[i] = null;
    this.locked.delete(i);
    this.paint(i, false);
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
    this.mark(this.rejections[after - 1] ?? []);
  }
  // Drafted tokens that the check of a round rejected: struck out where they would have stood, until the next round.
  reject(step, rejected) { this.rejections[step] = rejected; this.mark(rejected); }
  mark(rejected) {
    for (const span of this.marked) span.removeAttribute("data-rejected");
    this.marked = rejected.map((one) => this.spans[one.position]);
    rejected.forEach((one, i) => { this.marked[i].dataset.rejected = one.text.trim() || "¶"; });
  }
  // The run took so many steps, which was not known before: colours go from the first to the last of them.
  settle(steps) {
    this.totals = this.totals.map((total, i) => this.old.has(i) ? total : steps);
    this.steps = steps;
    this.draw();
  }
  paint(i, fresh) {
    const span = this.spans[i];
    if (!span) return;
    const seen = this.seen(i), open = seen === null, held = open && this.tokens[i] !== null;  // held: its room is known
    const piece = (held ? this.pieces[i] : seen?.piece) ?? "", word = piece.trimStart();
    const made = !open && seen.step >= 0, special = (held || !open) && piece === "";
    const kinds = ["tok", open && "gap", held && "held", made && "made", special && "special", this.locked.has(i) && "locked", fresh && "fresh"];
    span.className = kinds.filter(Boolean).join(" ");
    const space = special ? "\u200b" : word ? piece.slice(0, piece.length - word.length) : "", text = special ? "¶" : word || (piece.includes("\n") ? "⏎\n" : "␣");
    const inline = (x) => made && this.filling ? x.replaceAll("\n", "") : x;  // a new line begins when all is there
    this.spaces[i].data = open && !held ? "\u200b" : inline(space);
    span.textContent = open && !held ? "" : inline(text);
    if (made) span.style.setProperty("--hue", hue(Math.min(seen.step, this.totals[i] - 1), this.totals[i]).toFixed(0)); else span.style.removeProperty("--hue");
    span.setAttribute("aria-label", this.spoken(i));
  }
  spoken(i, seen = this.seen(i)) {
    if (!seen) return "gap";
    const text = seen.piece.trim() || "end of text";
    if (seen.step < 0) return `${text}, given`;
    const lock = this.locked.has(i) ? ", locked" : "", strand = this.strands?.[i] >= 0 ? `, strand ${this.strands[i] + 1}` : "";
    return `${text}, step ${seen.step + 1}${strand}, probability ${percent(seen.chance ?? 0)}${lock}`;
  }
  kept() { return { came: this.came, chances: this.chances, locked: this.locked, totals: this.totals, strands: this.strands, spaced: this.spaced }; }
  text() { return this.pieces.slice(this.lead).map((piece) => piece ?? "").join(""); }
  has(i) { return this.spans[i] !== undefined && i >= this.lead && !this.spans[i].hidden; }
  made(i) { return this.tokens[i] !== null && this.came[i] >= 0; }
  erased() { return this.tokens.filter((token) => token === null).length; }
  focus(i) {
    this.spans.forEach((span) => { span.tabIndex = -1; });
    if (this.spans[i]) { this.spans[i].tabIndex = 0; this.spans[i].focus(); }
  }
}
