// Pictures: draw one of a class, watch the grid fill in, paint over a region and redraw it.

import { stream } from "./api.js";
import { $, Replay, Run, complain, hue, make, newSeed, pace, say, seedOf, slide } from "./ui.js";

let model, replay, running = null, frames = [], came = [], tokens = null, upload = null, painted = new Set(), cursor = null, brush = null, last = null, asked = null;
const canvas = () => $("canvas");
const cells = () => model.grid;

export const busy = () => running !== null;
export const stop = () => running?.stop();

export function start(found) {
  model = found;
  $("label").replaceChildren(...model.classes.map((name, i) => make("option", { value: i, textContent: name })));
  if (!model.classes.length) { $("label").append(make("option", { value: "", textContent: "none" })); $("guidance").disabled = true; }
  $("p-steps").max = Math.min(model.max_steps, model.grid[0] * model.grid[1], 128);
  const parts = [2, 4, 8, 16].filter((n) => 2 * n <= Math.min(...model.grid));
  $("regions").replaceChildren(...parts.map((n) => new Option(`${n} × ${n}`, n, n === 4, n === 4)));
  if (!parts.length) $("p-order").querySelector("[value=regions]").remove();
  $("p-order").addEventListener("change", able);
  usual();
  replay = new Replay($("p-scrub"), $("p-play"), $("p-at"), draw);
  $("inpaint").addEventListener("click", inpaint);
  $("unpaint").addEventListener("click", () => { painted.clear(); marks(); });
  $("heat").addEventListener("change", () => draw());
  $("file").addEventListener("change", load);
  const surface = canvas();
  surface.addEventListener("pointerdown", (event) => {
    if (!frames.length || running) return;
    surface.setPointerCapture(event.pointerId);
    brush = !painted.has(cellAt(point(event)));
    last = null;
    stroke(point(event));
  });
  surface.addEventListener("pointermove", (event) => { if (brush !== null) stroke(point(event)); });
  for (const name of ["pointerup", "pointercancel"]) surface.addEventListener(name, () => { brush = null; });
  $("save").addEventListener("click", save);
  surface.addEventListener("keydown", keys);
  surface.addEventListener("blur", () => { cursor = null; draw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  draw();
}

// The model's own settings.
function usual() {
  const own = model.defaults;
  $("p-order").value = own.order ?? model.order;
  if (own.regions) $("regions").value = own.regions;
  for (const [id, value] of Object.entries({ guidance: own.guidance ?? 4, "p-steps": own.steps ?? 32, "p-temperature": own.temperature ?? 1 })) slide(id, value);
  able();
}

// Regions settle the steps: each draws a cell per step.
function able() {
  const regions = $("p-order").value === "regions";
  $("regions-field").hidden = !regions;
  $("p-steps-field").hidden = regions;
}

function settings(seed) {
  const label = $("label").value === "" ? null : Number($("label").value);
  return { label, guidance: label === null ? 0 : Number($("guidance").value), order: $("p-order").value,
    ...($("regions-field").hidden ? { steps: Number($("p-steps").value) } : { regions: Number($("regions").value) }),
    temperature: Number($("p-temperature").value), seed, frames: true, model: model.id };
}

// Who asks for the same again wants another one.
export async function drawNew() {
  let body = settings(seedOf("p-seed"));
  if (JSON.stringify(body) === asked) body = { ...body, seed: $("p-seed").value = newSeed() };
  if (await run("/v1/pictures", body)) asked = JSON.stringify(body);
}

async function inpaint() {
  const [h, w] = cells();
  $("p-seed").value = newSeed();
  const grid = (value) => Array.from({ length: h }, (_, y) => Array.from({ length: w }, (_, x) => value(y * w + x)));
  const known = upload ? { image: upload, mask: grid((i) => painted.has(i)) } : { tokens: grid((i) => painted.has(i) ? null : tokens[Math.floor(i / w)][i % w]) };
  await run("/v1/pictures/fill", { ...settings(seedOf("p-seed")), ...known });
}

async function run(path, body) {
  stop();
  complain(null);
  const own = running = new Run();
  $("draw-label").textContent = "Stop";
  const before = { frames, came, painted }, steps = Number(replay.slider.max), hint = $("p-hint").textContent;
  try {
    await stream(path, body, {
      start: (data) => {
        own.gap = pace("p-pace", data.steps);
        frames = [picture(data.image)];
        came = data.known.flat().map((known) => known ? -1 : Infinity);
        painted = new Set();
        replay.ready(data.steps);
        replay.mark(0);
        $("p-hint").textContent = data.unknown === came.length ? "Each step samples a few cells." : "Each step samples a few of the painted cells.";
        frames[0].decode().then(marks, marks);
      },
      step: (data) => {
        const frame = picture(data.image);
        own.push(() => {
          for (const one of data.sampled) came[one.row * cells()[1] + one.column] = data.step;
          frames[data.step + 1] = frame;
          replay.mark(data.step + 1);
          show(data.step + 1);
        });
      },
      done: (data) => own.push(() => {
        tokens = data.tokens;
        forget();
        frames[data.steps + 1] = picture(data.image);
        remember(data);
        show(data.steps);
        const facts = `${data.steps} step${data.steps === 1 ? "" : "s"}, ${data.seconds.toFixed(1)} s`;
        say(`Drawn: ${data.label ?? "a picture"}, ${facts}`);
        $("p-hint").textContent = `${facts}. Paint a part to redraw it.`;
        canvas().setAttribute("aria-label", `A picture${data.label === null ? "" : ` of ${data.label}`}. Paint over a region to redraw it: drag, or move with the arrow keys and press Space.`);
      }),
    }, own.signal);
    await own.last;
    own.signal.throwIfAborted();
    return true;
  } catch (error) {
    own.stop();
    complain(error);
    ({ frames, came, painted } = before);
    replay.ready(steps);
    $("p-hint").textContent = hint;
    return false;
  } finally {
    if (running === own) running = null;
    $("draw-label").textContent = "Draw";
    marks();
  }
}

function picture(data) {
  const image = new Image();
  image.src = `data:image/png;base64,${data}`;
  return image;
}

async function show(step) {
  const frame = frames[step + 1] && step === Number(replay.slider.max) ? frames[step + 1] : frames[step];
  try { await frame?.decode(); } catch { return; }
  draw(step);
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw(step = Number(replay?.slider.value ?? 0)) {
  const surface = canvas(), pen = surface.getContext("2d"), [h, w] = cells();
  const wide = surface.width / w, high = surface.height / h, end = Number(replay.slider.max);
  let nearest = step;
  while (nearest > 0 && !frames[nearest]) nearest--;
  const frame = step === end ? finished() : frames[nearest];
  pen.fillStyle = css("--field");
  pen.fillRect(0, 0, surface.width, surface.height);
  pen.imageSmoothingEnabled = model.pixels[0] > 16;  // smooth shows what it is; a picture of a few pixels shows them
  if (frame?.complete && frame.naturalWidth) pen.drawImage(frame, 0, 0, surface.width, surface.height);
  const heat = $("heat").checked, dark = document.documentElement.classList.contains("dark");
  for (let i = 0; i < h * w; i++) {
    const x = (i % w) * wide, y = Math.floor(i / w) * high, at = came[i] ?? Infinity;
    if (!frame || at >= step && at >= 0) { open(pen, x, y, wide, high, i); continue; }
    if (heat && at >= 0) { pen.fillStyle = `oklch(${dark ? 0.62 : 0.75} 0.15 ${hue(at, end)} / 0.62)`; pen.fillRect(x, y, wide, high); }
    if (at === step - 1 && step < end) { pen.strokeStyle = `oklch(0.72 0.19 ${hue(at, end)})`; pen.lineWidth = 3; pen.strokeRect(x + 1.5, y + 1.5, wide - 3, high - 3); }
  }
  if (!frame) { pen.fillStyle = css("--soft"); pen.font = "20px system-ui, sans-serif"; pen.textAlign = "center"; pen.fillText("Pick a class and press Draw", surface.width / 2, surface.height / 2); }
  for (const i of painted) { pen.fillStyle = "oklch(0.63 0.2 300 / 0.6)"; pen.fillRect((i % w) * wide, Math.floor(i / w) * high, wide, high); }
  if (cursor !== null) { pen.strokeStyle = css("--focus"); pen.lineWidth = 4; pen.strokeRect((cursor % w) * wide + 2, Math.floor(cursor / w) * high + 2, wide - 4, high - 4); }
}

function open(pen, x, y, wide, high, i) {
  pen.fillStyle = css((Math.floor(x / wide + 0.5) + Math.floor(y / high + 0.5)) % 2 ? "--field" : "--card");
  pen.fillRect(x, y, wide + 0.5, high + 0.5);
}

// Where a pointer is, in cells.
function point(event) {
  const box = canvas().getBoundingClientRect(), [h, w] = cells();
  return [(event.clientX - box.left) / box.width * w, (event.clientY - box.top) / box.height * h];
}

function cellAt([x, y]) {
  const [h, w] = cells();
  return Math.max(0, Math.min(h - 1, Math.floor(y))) * w + Math.max(0, Math.min(w - 1, Math.floor(x)));
}

// Paint all that lies between the last point and this one: a fast pointer reports few of them.
function stroke(to) {
  const from = last ?? to, dabs = 1 + Math.ceil(2 * Math.hypot(to[0] - from[0], to[1] - from[1]));
  for (let k = 1; k <= dabs; k++) dab(from.map((x, i) => x + (to[i] - x) * k / dabs), brush);
  last = to;
  marks();
}

// The square of the brush around a point, painted or not.
function dab([x, y], on) {
  const [h, w] = cells(), size = Number($("brush").value), left = Math.round(x - size / 2), top = Math.round(y - size / 2);
  for (let row = Math.max(0, top); row < Math.min(h, top + size); row++) {
    for (let column = Math.max(0, left); column < Math.min(w, left + size); column++) {
      if (on) painted.add(row * w + column); else painted.delete(row * w + column);
    }
  }
}

const finished = () => { const end = Number(replay.slider.max); return frames[end + 1] ?? frames[end]; };

function save() {
  make("a", { href: finished().src, download: "maskless.png" }).click();
}

function keys(event) {
  if (!frames.length || running || event.ctrlKey || event.metaKey) return;
  const [h, w] = cells(), moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: w, ArrowUp: -w };
  if (event.key in moves) {
    const next = cursor === null ? 0 : cursor + moves[event.key];
    if (next >= 0 && next < h * w) cursor = next;
  } else if (event.key === " " && cursor !== null) {
    dab([cursor % w + 0.5, Math.floor(cursor / w) + 0.5], !painted.has(cursor));
    say(`row ${Math.floor(cursor / w) + 1}, column ${cursor % w + 1} ${painted.has(cursor) ? "painted" : "kept"}`);
  } else return;
  event.preventDefault();
  marks();
}

function marks() {
  $("inpaint").disabled = running !== null || painted.size === 0;
  $("inpaint").classList.toggle("primary", painted.size > 0);
  $("unpaint").disabled = painted.size === 0;
  $("save").disabled = running !== null || !frames.length;
  draw();
}

function remember(data) {
  const all = { tokens: data.tokens, image: data.image, came: data.cell_steps.flat(), frames: [...frames], steps: data.steps };
  const button = make("button", { type: "button" }, make("img", { src: `data:image/png;base64,${data.image}`, alt: "" }));
  button.setAttribute("aria-label", `Back to this picture${data.label === null ? "" : ` of ${data.label}`}`);
  button.addEventListener("click", () => { ({ tokens, came, frames } = all); forget(); painted.clear(); replay.ready(all.steps); marks(); });
  $("recent").prepend(button);
  while ($("recent").children.length > 8) $("recent").lastChild.remove();
}

function forget() {
  upload = null;
  $("file").value = "";  // so that the same file can be chosen again
}

async function load() {
  const file = $("file").files[0];
  if (!file) return;
  try {
    const bitmap = await createImageBitmap(file), side = Math.min(bitmap.width, bitmap.height), size = model.pixels[0];
    const small = make("canvas", { width: size, height: size });
    small.getContext("2d").drawImage(bitmap, (bitmap.width - side) / 2, (bitmap.height - side) / 2, side, side, 0, 0, size, size);
    upload = small.toDataURL("image/png").split(",")[1];
    const image = picture(upload);
    await image.decode();
    frames = [image];
    came = new Array(cells()[0] * cells()[1]).fill(-1);
    painted.clear();
    replay.ready(0);
    $("p-hint").textContent = "Paint over a part to redraw it.";
    complain(null);
    marks();
  } catch { complain(new Error("This file is not a picture that the browser can read.")); }
}
