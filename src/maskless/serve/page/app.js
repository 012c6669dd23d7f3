// The page: tabs, theme, the key, shortcuts; each view has a module of its own.

import { get, setKey } from "./api.js";
import * as explain from "./explain.js";
import * as pictures from "./pictures.js";
import * as race from "./race.js";
import * as settings from "./settings.js";
import { $, complain, newSeed, shows } from "./ui.js";
import * as write from "./write.js";

const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");

function theme(name) {
  root.classList.toggle("dark", name ? name === "dark" : dark.matches);
}

function remembered() { try { return localStorage.getItem("maskless-theme"); } catch { return null; } }

theme(remembered());
dark.addEventListener("change", () => theme(remembered()));
$("theme").addEventListener("click", () => {
  const name = root.classList.contains("dark") ? "light" : "dark";
  try { localStorage.setItem("maskless-theme", name); } catch { /* not kept: it still holds for this visit */ }
  theme(name);
  $("heat").dispatchEvent(new Event("change"));
});

const tabs = ["write", "race", "pictures", "explain"];
let chosen = "write";

function choose(name) {
  chosen = name;
  for (const one of tabs) {
    const tab = $(`tab-${one}`);
    tab.setAttribute("aria-selected", one === name);
    tab.tabIndex = one === name ? 0 : -1;
    $(one).hidden = one !== name;
  }
  $("texts").hidden = name !== "write" && name !== "race";
  $("texts-field").hidden = name !== "race";
  $("best-field").hidden = name !== "race" || $("best").disabled;
  $("pace-field").hidden = $("revise-field").hidden = name === "race";
  $("model-field").hidden = name !== "write" || $("model").length < 2;
  if (!$("texts").hidden) settings.able();
  if (name === "write") write.labels();
  if (name === "race") $("go-label").textContent = race.busy() ? "Stop" : "Race";
  race.able();
  complain(null);
}

const views = { write: [write, write.fill], race: [race, race.race], pictures: [pictures, pictures.drawNew], explain: [explain, () => {}] };

async function go() {
  const [view, begin] = views[chosen];
  if (view.busy()) { view.stop(); return; }
  try { await begin(); } catch (error) { complain(error); }
}

function wire() {
  for (const name of tabs) $(`tab-${name}`).addEventListener("click", () => choose(name));
  document.querySelector(".tabs").addEventListener("keydown", (event) => {
    const shown = tabs.filter((name) => !$(`tab-${name}`).hidden), at = shown.indexOf(chosen);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: shown.length - 1 }[event.key];
    if (next === undefined) return;
    const name = shown[(next + shown.length) % shown.length];
    choose(name);
    $(`tab-${name}`).focus();
  });
  explain.start();
  $("go").addEventListener("click", go);
  $("draw").addEventListener("click", go);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); go(); }
    if (event.key === "Escape" && $("menu").hidden) views[chosen][0].stop();
  });
  $("dice").addEventListener("click", () => { $("seed").value = newSeed(); });
  $("p-dice").addEventListener("click", () => { $("p-seed").value = newSeed(); });
  const two = (value) => value.toFixed(2);
  shows("steps"); shows("draft"); shows("strands", (value) => String(2 ** value)); shows("temperature", two); shows("top-p", (value) => value < 1 ? two(value) : "off");
  shows("guidance", two); shows("p-steps"); shows("p-temperature", two);
}

async function begin() {
  const { data } = await get("/v1/models");
  $("key-form").hidden = true;
  complain(null);
  const texts = data.filter((model) => model.modality === "text"), images = data.filter((model) => model.modality === "pictures");
  $("tab-write").hidden = !texts.length;
  $("tab-race").hidden = texts.length < 2 && !texts.some(race.parallel);
  $("tab-pictures").hidden = !images.length;
  if (texts.length) {
    $("model").replaceChildren(...texts.map((model) => new Option(`${model.kind}: ${model.id}`, model.id)));
    $("steps").max = Math.min(128, ...texts.map((model) => Math.min(model.max_steps, model.max_length)));
    write.start();
    settings.start(texts);
    race.start(texts);
  }
  if (images.length) pictures.start(images[0]);
    choose(texts.length ? "write" : images.length ? "pictures" : "explain");
  document.body.dataset.ready = "yes";
}

$("prompt").value = "Once upon a time, there was a dog named Max. Max loved to [8]. One day, Max saw a ___ and [10]. Then his friend [12]. They were both very happy.";
$("key-form").addEventListener("submit", (event) => { event.preventDefault(); setKey($("key").value); begin().catch(complain); });
wire();
begin().catch(complain);
