// Small things that all views use: elements, messages, sliders that say their value, a replay.

import { Refused } from "./api.js";

export const $ = (id) => document.getElementById(id);

export function make(tag, fields = {}, ...children) {
  const element = Object.assign(document.createElement(tag), fields);
  element.append(...children);
  return element;
}

export function say(text) { $("status").textContent = text; }

export function complain(error) {
  const shown = $("alert");
  if (!error || error.name === "AbortError") { shown.hidden = true; return; }
  const locked = error instanceof Refused && error.status === 401;
  if (locked) {
    $("key-form").hidden = false;
    $("key").focus();
  }
  shown.textContent = locked ? "The key is missing or wrong." : error.message[0].toUpperCase() + error.message.slice(1);
  shown.hidden = false;
  if (!(error instanceof Refused)) console.error(error);
}

export const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
export const percent = (p) => p >= 0.0995 ? `${Math.round(100 * p)}%` : p >= 0.001 ? `${(100 * p).toFixed(1)}%` : "< 0.1%";
export const hue = (step, steps) => 285 - 235 * (steps > 1 ? step / (steps - 1) : 0);
export const bandHue = (strand) => (255 + 137.5 * strand) % 360;  // neighbours are far apart on the wheel
export const many = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
export const rate = (count, seconds) => {
  const speed = count / Math.max(seconds, 1e-6);
  return speed >= 100 ? Math.round(speed).toLocaleString("en") : speed.toFixed(1);
};
export const stepsText = ({ steps, revision_steps: more }) => many(steps - more, "step") + (more ? ` + ${many(more, "revision step")}` : "");
export const newSeed = () => Math.floor(Math.random() * 1e6);

export function shows(id, format = String) {
  const input = $(id), output = $(`${id}-at`);
  const show = () => { output.textContent = format(Number(input.value)); };
  input.addEventListener("input", show);
  show();
}

// Set a slider, and what is shown of it.
export function slide(id, value) {
  $(id).value = value;
  $(id).dispatchEvent(new Event("input"));
}

export function seedOf(id) {
  const value = Number($(id).value);
  if (!Number.isSafeInteger(value) || value < 0) throw new Error(`seed ${$(id).value}: expected a whole number, 0 or more`);
  return value;
}

// A run: things to show one after the other, with so many milliseconds between them, until it is stopped; figures are
// not held back.
export class Run {
  constructor() { Object.assign(this, { gap: 0, last: Promise.resolve(), control: new AbortController() }); }
  get signal() { return this.control.signal; }
  push(show) {
    this.last = this.last.then(async () => {
      if (this.signal.aborted) return;
      show();
      if (this.gap) await new Promise((resolve) => setTimeout(resolve, this.gap));
    });
  }
  stop() { this.control.abort(); }
}

export const pace = (id, steps) => $(id).checked && !still() ? Math.min(140, 3000 / steps) : 0;

// A slider over the steps of a run and a button that plays them; show(n) draws what was known after n steps. The last
// `revision` of them are named apart.
export class Replay {
  constructor(slider, button, output, show) {
    Object.assign(this, { slider, button, output, show, timer: 0, revision: 0, word: "step" });
    slider.addEventListener("input", () => { this.pause(); this.to(Number(slider.value)); });
    button.addEventListener("click", () => this.timer ? this.pause() : this.play());
  }
  ready(steps, { revision = 0, word = "step", counting = false } = {}) {
    this.pause();
    Object.assign(this, { revision, word, counting });  // counting: the end is not known yet
    this.slider.max = steps;
    this.slider.disabled = this.button.disabled = steps === 0;
    this.mark(steps);
  }
  mark(step) {
    this.slider.value = step;
    const text = this.said(step, Number(this.slider.max) - this.revision);
    this.output.textContent = text;
    this.slider.setAttribute("aria-valuetext", text);
  }
  said(step, first) {
    if (!first) return "no steps yet";
    if (this.counting) return `${this.word} ${step}`;
    return step > first ? `revision step ${step - first} of ${this.revision}` : `${this.word} ${step} of ${first}`;
  }
  to(step) { this.mark(step); this.show(step); }
  play() {
    const last = Number(this.slider.max);
    let step = Number(this.slider.value) >= last ? 0 : Number(this.slider.value);
    this.to(step);
    this.button.textContent = "❚❚";
    this.button.setAttribute("aria-label", "Pause");
    this.timer = setInterval(() => {
      this.to(++step);
      if (step >= last) this.pause();
    }, Math.max(40, Math.min(260, 4000 / last)));
  }
  pause() {
    clearInterval(this.timer);
    this.timer = 0;
    this.button.textContent = "▶";
    this.button.setAttribute("aria-label", "Replay");
  }
}
