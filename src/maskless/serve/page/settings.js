// The controls of a text: what they ask for, and which of them go together.

import { $, many, seedOf, slide } from "./ui.js";

const GAP = /\[[0-9]+\]|_{3,}/g;
let models = [];

export const current = () => models.find((model) => model.id === $("model").value) || models[0];
const exact = () => $("exact").checked && !$("exact").disabled;

export function settings() {
  const top = Number($("top-p").value), order = $("order").value;
  const revise = $("revise").disabled ? 0 : Number($("revise").value);
  const strands = order === "strands" ? { strands: 2 ** Number($("strands").value) } : null;
  const pace = exact() ? { ...strands, exact: true, draft: Number($("draft").value) } : strands ?? { steps: Number($("steps").value) };
  return { ...pace, temperature: Number($("temperature").value), top_p: top < 1 ? top : null, order, revise, seed: seedOf("seed") };
}

// The same for a race: no rounds that only one of the models has, and nothing that a left-to-right model cannot do.
export function settingsFor(model) {
  const { exact: _, draft: __, ...how } = settings();
  const pace = how.strands ? {} : { steps: Number($("steps").value) };
  const common = { ...pace, ...how, revise: 0 };
  return model.any_order ? common : { temperature: how.temperature, top_p: how.top_p, seed: how.seed };
}

// Revision needs a model that can go back and an order that is known beforehand. Strands, and exact rounds, settle the steps.
export function able() {
  const strands = $("order").value === "strands", racing = !$("race").hidden;
  const model = racing ? models.find((one) => one.any_order) ?? models[0] : current();
  $("order").disabled = !model.any_order;
  $("exact-field").hidden = !model.exact || racing;
  $("exact").disabled = !model.exact || $("order").value === "confidence";
  $("draft-field").hidden = $("exact-field").hidden || !exact();
  $("revise").disabled = !model.any_order || $("order").value === "confidence" || exact();
  $("strands-field").hidden = !strands;
  $("steps-field").hidden = strands || !model.any_order || !$("draft-field").hidden;
}

// A model's own settings. Revision helps where the tokens of a step are scattered, and does nothing for strands.
function usual() {
  const model = current(), own = model.defaults;
  $("order").value = own.strands ? "strands" : own.order ?? model.order;
  const values = { steps: own.steps ?? 32, strands: Math.log2(own.strands ?? 1), temperature: own.temperature ?? 1, "top-p": own.top_p ?? 0.9 };
  for (const [name, value] of Object.entries(values)) slide(name, value);
  $("revise").value = own.revise ?? (model.any_order && model.order === "random" ? 4 : 0);
  $("exact").checked = own.exact ?? false;
  able();
}

export const gapped = () => $("prompt").value.search(GAP) >= 0;

// What the prompt asks for: a fill where it has gaps, else a continuation.
export function asked(model) {
  const text = $("prompt").value;
  return gapped() ? ["/v1/fill", { text }] : ["/v1/generate", { prompt: text, length: Math.min(model.max_length, 256) }];
}

// The same for a model that only continues: what stands before the first gap.
export function continued(length) {
  return ["/v1/generate", { prompt: $("prompt").value.split(GAP)[0].trimEnd(), length: Math.min(length, 256) }];
}

export function start(found) {
  models = found;
  for (const name of ["order", "exact"]) $(name).addEventListener("change", able);
  $("model").addEventListener("change", usual);
  $("prompt").addEventListener("input", hint);
  $("gap").addEventListener("click", gap);
  usual();
  hint();
}

export function hint() {
  const area = $("prompt");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 320)}px`;
  const gaps = area.value.match(GAP) || [];
  const count = gaps.reduce((sum, gap) => sum + (gap[0] === "_" ? gap.length : Number(gap.slice(1, -1))), 0);
  $("hint").textContent = gaps.length
    ? `${many(gaps.length, "gap")}, ${many(count, "token")}. [8] is a gap of eight tokens, ___ one of three.`
    : "No gaps: the text is continued. Write [8] or ___ to leave a gap.";
}

function gap() {
  const area = $("prompt");
  area.setRangeText("[8]", area.selectionStart, area.selectionEnd, "end");
  area.dispatchEvent(new Event("input"));
  area.focus();
}
