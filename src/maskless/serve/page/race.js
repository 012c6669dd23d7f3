// Race: several models, one text, the same moment, each with a figure of its quality. A chain runs twice: with its own
// settings, and in strands.

import { stream } from "./api.js";
import { asked, continued, gapped, settingsFor } from "./settings.js";
import { TextView } from "./text_view.js";
import { $, complain, make, many, rate, say, seedOf, stepsText } from "./ui.js";

let lanes = [], running = null;
export const busy = () => running !== null;
export const stop = () => running?.abort();

const STRANDS = 8;

class Lane {
  constructor(model, strands = 0) {
    Object.assign(this, { model, strands, name: strands ? `${model.kind} with ${strands} strands` : model.kind });
    this.speed = make("span", { textContent: "–" });
    this.bar = make("progress", { max: 1, value: 0 });
    this.bar.setAttribute("aria-label", `Progress of ${this.name}`);
    this.quality = make("p", { className: "quality", textContent: figure(model.quality, strands) });
    this.how = make("p", { className: "note" });
    this.facts = make("p", { className: "hint" });
    const text = make("div", { className: "text-view small still" });
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", `Text of ${this.name}`);
    const name = make("h2", {}, strands ? `${model.kind}, ${many(strands, "strand")}` : model.kind, make("small", { textContent: `${model.id}, ${(model.parameters / 1e6).toFixed(1)} M` }));
    const figures = make("div", { className: "figures" }, make("p", { className: "speed" }, this.speed, make("small", { textContent: "tokens/s" })), this.quality);
    this.element = make("article", { className: "card lane" }, name, figures, this.how, this.bar, this.facts, text);
    this.view = new TextView(text);
    this.reset();
  }
  reset() {
    this.element.classList.remove("won");
    this.view.clear("Its text appears here.");
    this.speed.textContent = "–";
    this.bar.value = 0;
    this.facts.textContent = "Ready";
  }
  get runs() { return !this.strands || $("best").checked; }  // the page's settings are the same for all
  // The figure holds for the model's own settings, so it is shown with them only.
  able() {
    const best = $("best").checked;
    this.element.hidden = !this.runs;
    this.quality.hidden = !best || !this.quality.textContent;
    this.how.textContent = best ? said(this.model, this.strands) : this.model.any_order ? "settings of this page" : "left to right, settings of this page";
  }
  async run(path, body, signal) {
    Object.assign(this, { landed: new Set(), text: new Set(), seconds: 0, exact: false });
    this.element.classList.remove("won");
    const own = { seed: seedOf("seed"), ...(this.strands && { strands: this.strands }) };  // what is not said is the model's own
    const how = $("best").checked ? own : settingsFor(this.model);
    await stream(path, { ...body, ...how, model: this.model.id }, {
      start: (data) => { Object.assign(this, { total: data.unknown * data.texts, steps: data.steps, stride: data.tokens.length, exact: data.draft !== null }); this.view.open(data); },
      step: (data) => {
        for (const one of data.sampled) {
          const place = one.row * this.stride + one.position;
          this.landed.add(place);
          if (one.text) this.text.add(place); else this.text.delete(place);
          if (one.row === 0) this.view.land(one.position, one.token, one.text, one.probability, data.step);
        }
        this.view.hold();
        this.seconds = data.seconds;
        this.show(this.exact ? this.landed.size / this.total : (data.step + 1) / this.steps, `${this.landed.size} of ${many(this.total, "token")}`);
      },
      done: (data) => { this.view.release(); this.seconds = data.seconds; this.show(1, `${many(this.total, "token")}${this.ended()} in ${this.exact ? many(1 + Math.max(...data.texts[0].steps), "round") : stepsText(data)}`); },
    }, signal);
  }
  // The speed counts all tokens that were computed; those behind the end of a text are none of it.
  ended() { return this.text.size < this.total ? ` (${this.text.size} of text)` : ""; }
  show(part, what) {
    this.speed.textContent = rate(this.landed.size, this.seconds);
    this.bar.value = part;
    this.facts.textContent = `${what}, ${this.seconds.toFixed(2)} s`;
  }
}

// "Gen-PPL 1.9 (8 strands: 3.8)": the figure of the model's own settings, and of so many strands.
function figure(quality, strands) {
  const [, own, count, other] = /^(.*?)(?: \((\d+) strands: ([\d.]+)\))?$/.exec(quality ?? "");
  if (!strands) return own;
  return Number(count) === strands ? own.replace(/[\d.]+$/, other) : "";
}

// {steps: 64, top_p: 0.9} in words
const WORDS = { steps: (n) => many(n, "step"), strands: (n) => many(n, "strand"), revise: (n) => many(n, "revision round"), top_p: (p) => `top-p ${p}` };
function said(model, strands) {
  const how = { ...(strands && { strands }), ...model.defaults };
  const place = how.steps || how.strands || how.order ? [] : [model.order === "random" ? "random order" : "left to right"];
  return [...place, ...Object.entries(how).map(([name, value]) => WORDS[name]?.(value) ?? (value === true ? name : `${name} ${value}`))].join(", ");
}

// One model of each kind, or the first two where all are of one kind; a chain that writes from left to right twice.
function racers(models) {
  const kinds = models.filter((model, i) => models.findIndex((other) => other.kind === model.kind) === i);
  return (kinds.length > 1 ? kinds : models).slice(0, 3).flatMap((model) => parallel(model) ? [[model], [model, STRANDS]] : [[model]]);
}
export const parallel = ({ exact, order, defaults }) => exact && order === "strands" && !defaults.strands && !defaults.order;

export function start(models) {
  lanes = racers(models).map((racer) => new Lane(...racer));
  $("lanes").replaceChildren(...lanes.map((lane) => lane.element));
  $("lanes").classList.toggle("three", lanes.length === 3);
  const known = lanes.some((lane) => lane.strands || Object.keys(lane.model.defaults).length);
  $("best").checked = known;
  $("best").disabled = !known;
  $("best").addEventListener("change", () => {
    stop();
    for (const lane of lanes) lane.reset();  // what is there was made with other settings
    $("verdict").textContent = "Who is faster?";
    able();
  });
  $("prompt").addEventListener("input", able);
}

const leftOnly = () => lanes.some((lane) => !lane.model.any_order);

export function able() {
  $("controls").classList.toggle("fixed", !$("race").hidden && $("best").checked);
  for (const lane of lanes) lane.able();
  const same = $("best").checked ? "text and seed, each with its best settings" : "text, settings and seed";
  const cut = leftOnly() && gapped() ? " An autoregressive model cannot fill gaps, so all continue the text before the first one." : "";
  $("race-note").textContent = `All start at the same moment with the same ${same}.${cut}`;
}

export async function race() {
  stop();
  complain(null);
  const control = running = new AbortController();
  $("go-label").textContent = "Stop";
  $("verdict").textContent = "Racing …";
  try {
    const length = Math.min(...lanes.map((lane) => lane.model.max_length));
    const [path, body] = leftOnly() ? continued(length) : asked({ max_length: length });
    const racing = lanes.filter((lane) => lane.runs);
    await Promise.all(racing.map((lane) => lane.run(path, { ...body, n: Number($("many").value) }, control.signal)));
    judge(racing);
  } catch (error) {
    control.abort();
    complain(error);
    $("verdict").textContent = "The race was stopped.";
  } finally {
    if (running === control) running = null;
    $("go-label").textContent = "Race";
  }
}

function judge(done) {
  const [first, ...others] = [...done].sort((a, b) => a.seconds - b.seconds);
  first.element.classList.add("won");
  const times = (lane) => lane.seconds / Math.max(first.seconds, 1e-6);
  const behind = others.map((lane) => times(lane) < 1.05 ? `as fast as ${lane.name}` : `${times(lane).toFixed(1)} times as fast as ${lane.name}`);
  const listed = new Intl.ListFormat("en-GB", { type: "conjunction" }).format(behind);
  $("verdict").textContent = `${first.name} was ${listed}.`;
  say($("verdict").textContent);
}
