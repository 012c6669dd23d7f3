// Race: two or three models, one text, the same moment, each with a figure of its quality.

import { stream } from "./api.js";
import { asked, continued, gapped, settingsFor } from "./settings.js";
import { TextView } from "./text_view.js";
import { $, complain, make, many, rate, say, seedOf, stepsText } from "./ui.js";

let lanes = [], running = null;
export const busy = () => running !== null;
export const stop = () => running?.abort();

class Lane {
  constructor(model) {
    this.model = model;
    this.speed = make("span", { textContent: "–" });
    this.bar = make("progress", { max: 1, value: 0 });
    this.bar.setAttribute("aria-label", `Progress of ${model.kind}`);
    this.quality = make("p", { className: "quality", textContent: model.quality ?? "" });
    this.how = make("p", { className: "note" });
    this.facts = make("p", { className: "hint", textContent: "ready" });
    const text = make("div", { className: "text-view small still" });
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", `Text of ${model.kind}`);
    const name = make("h2", {}, model.kind, make("small", { textContent: `${model.id}, ${(model.parameters / 1e6).toFixed(1)} M` }));
    const figures = make("div", { className: "figures" }, make("p", { className: "speed" }, this.speed, make("small", { textContent: "tokens/s" })), this.quality);
    this.element = make("article", { className: "card lane" }, name, figures, this.how, this.bar, this.facts, text);
    this.view = new TextView(text);
    this.view.clear("at the start");
  }
  get own() { return Object.keys(this.model.defaults).length > 0; }
  get best() { return $("best").checked && this.own; }
  // The figure holds for the model's own settings, so it is shown with them only.
  able() {
    this.quality.hidden = !this.best || !this.model.quality;
    this.how.textContent = this.best ? said(this.model.defaults) : this.model.any_order ? "the settings of this page" : "left to right, the settings of this page";
  }
  async run(path, body, signal) {
    Object.assign(this, { landed: new Set(), seconds: 0, rows: 0, exact: false });
    this.element.classList.remove("won");
    const how = this.best ? { seed: seedOf("seed") } : settingsFor(this.model); // what is not said is the model's own
    await stream(path, { ...body, ...how, model: this.model.id }, {
      start: (data) => { Object.assign(this, { total: data.unknown * data.texts, steps: data.steps, stride: data.tokens.length, exact: data.draft !== null }); this.view.open(data); },
      step: (data) => {
        for (const one of data.decided) {
          this.landed.add(one.row * this.stride + one.position);
          if (one.row === 0) this.view.land(one.position, one.token, one.text, one.probability, data.step);
        }
        this.view.hold();
        this.seconds = data.seconds;
        this.show(this.exact ? this.landed.size / this.total : (data.step + 1) / this.steps, "");
      },
      done: (data) => { this.view.release(); this.seconds = data.seconds; this.show(1, `, ${this.exact ? many(1 + Math.max(...data.texts[0].steps), "round") : stepsText(data)}`); },
    }, signal);
  }
  show(part, how) {
    this.speed.textContent = rate(this.landed.size, this.seconds);
    this.bar.value = part;
    this.facts.textContent = `${this.landed.size} of ${this.total} tokens, ${this.seconds.toFixed(2)} s${how}`;
  }
}

// {steps: 64, top_p: 0.9} in words
const WORDS = { steps: (n) => many(n, "step"), strands: (n) => many(n, "strand"), revise: (n) => many(n, "revision round"), top_p: (p) => `top-p ${p}` };
const said = (how) => Object.entries(how).map(([name, value]) => WORDS[name]?.(value) ?? (value === true ? name : `${name} ${value}`)).join(", ") || "its own settings";

// One model of each kind, or the first two where all are of one kind.
function racers(models) {
  const kinds = models.filter((model, i) => models.findIndex((other) => other.kind === model.kind) === i);
  return (kinds.length > 1 ? kinds : models).slice(0, 3);
}

export function start(models) {
  lanes = racers(models).map((model) => new Lane(model));
  $("lanes").replaceChildren(...lanes.map((lane) => lane.element));
  $("lanes").classList.toggle("three", lanes.length > 2);
  const known = lanes.some((lane) => lane.own);
  $("best").checked = known;
  $("best").disabled = !known;
  $("best").addEventListener("change", able);
  $("prompt").addEventListener("input", able);
}

const leftOnly = () => lanes.some((lane) => !lane.model.any_order);

export function able() {
  $("controls").classList.toggle("fixed", !$("race").hidden && lanes.every((lane) => lane.best));
  for (const lane of lanes) lane.able();
  const same = $("best").checked ? "the same text and seed at the same moment, each with its own best settings" : "the same text, settings and seed at the same moment";
  const cut = leftOnly() && gapped() ? " A left-to-right model cannot fill blanks: all continue the text before the first one." : "";
  $("race-note").textContent = `All get ${same}.${cut}`;
}

export async function race() {
  stop();
  complain(null);
  const control = running = new AbortController();
  $("go-label").textContent = "Stop";
  $("verdict").textContent = "They are off …";
  try {
    const length = Math.min(...lanes.map((lane) => lane.model.max_length));
    const [path, body] = leftOnly() ? continued(length) : asked({ max_length: length });
    await Promise.all(lanes.map((lane) => lane.run(path, { ...body, n: Number($("many").value) }, control.signal)));
    judge();
  } catch (error) {
    control.abort();
    complain(error);
    $("verdict").textContent = "The race was stopped.";
  } finally {
    if (running === control) running = null;
    $("go-label").textContent = "Race";
  }
}

function judge() {
  const [first, ...others] = [...lanes].sort((a, b) => a.seconds - b.seconds);
  first.element.classList.add("won");
  const times = (lane) => lane.seconds / Math.max(first.seconds, 1e-6);
  const behind = others.map((lane) => times(lane) < 1.05 ? `as fast as ${lane.model.kind}` : `${times(lane).toFixed(1)} times as fast as ${lane.model.kind}`);
  $("verdict").textContent = `${first.model.kind} was ${behind.join(" and ")}.`;
  say($("verdict").textContent);
}
