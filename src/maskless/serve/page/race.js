// Race: two models, one text, the same moment.

import { stream } from "./api.js";
import { TextView } from "./text_view.js";
import { $, complain, make, say } from "./ui.js";
import { asked, settings } from "./write.js";

let lanes = [], running = null;
export const busy = () => running !== null;
export const stop = () => running?.abort();

class Lane {
  constructor(model) {
    this.model = model;
    this.speed = make("span", { textContent: "–" });
    this.bar = make("progress", { max: 1, value: 0 });
    this.bar.setAttribute("aria-label", `Progress of ${model.kind}`);
    this.facts = make("p", { className: "hint", textContent: "ready" });
    const text = make("div", { className: "text-view small still" });
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", `Text of ${model.kind}`);
    const name = make("h2", {}, model.kind, make("small", { textContent: `${model.id}, ${(model.parameters / 1e6).toFixed(1)} M` }));
    this.element = make("article", { className: "card lane" }, name, make("p", { className: "speed" }, this.speed, make("small", { textContent: "tokens/s" })), this.bar, this.facts, text);
    this.view = new TextView(text);
    this.view.clear("at the start");
  }
  async run(path, body, signal) {
    Object.assign(this, { count: 0, seconds: 0, done: false });
    this.element.classList.remove("won");
    await stream(path, { ...body, model: this.model.id }, {
      start: (data) => { this.total = data.unknown * data.texts; this.steps = data.steps; this.view.open(data); },
      step: (data) => {
        for (const one of data.decided) if (one.row === 0) this.view.land(one.position, one.token, one.text, one.probability, data.step);
        this.count += data.decided.length;
        this.seconds = data.seconds;
        this.show();
      },
      done: (data) => { this.done = true; this.seconds = data.seconds; this.show(); },
    }, signal);
  }
  get rate() { return this.count / Math.max(this.seconds, 1e-6); }
  show() {
    this.speed.textContent = Math.round(this.rate).toLocaleString("en");
    this.bar.value = this.count / this.total;
    this.facts.textContent = `${this.count} of ${this.total} tokens, ${this.seconds.toFixed(2)} s${this.done ? `, ${this.steps} steps` : ""}`;
  }
}

export function start(models) {
  lanes = models.slice(0, 2).map((model) => new Lane(model));
  $("lanes").replaceChildren(...lanes.map((lane) => lane.element));
}

export async function race() {
  stop();
  complain(null);
  const control = running = new AbortController();
  $("go-label").textContent = "Stop";
  $("verdict").textContent = "They are off …";
  try {
    const [path, body] = asked(lanes[0].model);
    const whole = { ...body, ...settings(), revise: 0, n: Number($("many").value) };
    await Promise.all(lanes.map((lane) => lane.run(path, whole, control.signal)));
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
  const [first, second] = [...lanes].sort((a, b) => a.seconds - b.seconds);
  first.element.classList.add("won");
  const times = second.seconds / Math.max(first.seconds, 1e-6);
  const text = times < 1.05 ? "A dead heat." : `${first.model.kind} was ${times.toFixed(1)} times as fast.`;
  $("verdict").textContent = text;
  say(text);
}
