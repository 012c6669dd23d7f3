// The API's reference, drawn from /openapi.json.

import { make } from "./ui.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
let kept = null;
try { kept = localStorage.getItem("maskless-theme"); } catch { /* the system's own then */ }
document.documentElement.classList.toggle("dark", kept ? kept === "dark" : dark.matches);

const api = await (await fetch("/openapi.json")).json();
const found = (schema) => schema?.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema;

function kind(schema) {
  const one = found(schema);
  if (!one) return "";
  if (one.anyOf) return one.anyOf.map(kind).join(" or ");
  if (one.enum) return one.enum.map((value) => JSON.stringify(value)).join(", ");
  if ("const" in one) return JSON.stringify(one.const);
  if (one.type === "array") return `list of ${kind(one.items)}`;
  const low = one.minimum ?? one.exclusiveMinimum, high = one.maximum ?? one.exclusiveMaximum;
  const range = low !== undefined && high !== undefined && high < 1e6 ? ` ${low} to ${high}` : "";
  return `${one.type ?? one.title ?? "object"}${range}`;
}

function fields(schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => make("tr", {},
    make("td", {}, make("code", { textContent: name })),
    make("td", { textContent: kind(field) }),
    make("td", { textContent: schema.required?.includes(name) ? "required" : JSON.stringify(field.default ?? null) }),
    make("td", { textContent: field.description ?? "" })));
  const head = make("tr", {}, ...["field", "type", "default", "description"].map((textContent) => make("th", { scope: "col", textContent })));
  return make("div", { className: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

function card(path, verb, operation) {
  const schema = found(operation.requestBody?.content["application/json"].schema);
  const parts = [make("h2", {}, make("span", { className: "verb", textContent: verb.toUpperCase() }), path), make("p", { textContent: operation.summary ?? "" })];
  let call = `curl ${location.origin}${path}`;
  if (schema) {
    parts.push(fields(schema));
    call += ` --json '${JSON.stringify(schema.examples?.[0] ?? {})}'`;
  }
  return make("section", { className: "card" }, ...parts, make("pre", { textContent: call }));
}

const cards = Object.entries(api.paths).flatMap(([path, verbs]) => Object.entries(verbs).map(([verb, operation]) => card(path, verb, operation)));
const intro = make("p", { className: "hint", textContent: `${api.info.summary} Every error is {"error": {"message", "type", "code"}}, with a one-line message. With "stream": true the response is a stream of server-sent events: start, one step event per step, done.` });
document.getElementById("main").replaceChildren(intro, ...cards);
document.body.dataset.ready = "yes";
