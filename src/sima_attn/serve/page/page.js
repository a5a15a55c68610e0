// Analysis of a photo: classes, maps of all layers, contributions to one patch, time and cost.
import {
  $, ask, bar, drawPhoto, fit, listClasses, percent, say, showClasses, showFacts, showPhoto, showResult, summary,
  takePhotos, text,
} from "./parts.js";

// Colors at equal steps, as in the pictures of the command line and in the legend of page.css.
const HEAT = [[20, 24, 110], [20, 110, 220], [60, 200, 170], [250, 220, 60], [230, 40, 30]];
const EFFECT = [[20, 60, 200], [245, 245, 245], [210, 30, 30]];

const view = $("view");
const NOTHING = { photo: null, bitmap: null, analysis: null, effect: null, cursor: null };
const state = { ...NOTHING, asked: 0 };

function post(photo, path, values = {}, kind = "json") {
  const query = new URLSearchParams(values);
  const options = { method: "POST", body: photo, headers: { "Content-Type": "application/octet-stream" } };
  return ask(`${path}?${query}`, options, kind);
}

// --- drawing ---------------------------------------------------------------------------------------------------

function color(value, ramp) {
  const place = Math.min(1, Math.max(0, value)) * (ramp.length - 1);
  const low = Math.min(Math.floor(place), ramp.length - 2);
  return ramp[low].map((c, i) => c + (ramp[low + 1][i] - c) * (place - low));
}

function paintGrid(rows, paint) {
  const small = new OffscreenCanvas(rows[0].length, rows.length);
  const context = small.getContext("2d");
  const pixels = context.createImageData(small.width, small.height);
  rows.forEach((row, y) => row.forEach((value, x) => {
    const [r, g, b, a] = paint(value);
    pixels.data.set([r, g, b, a], 4 * (y * small.width + x));
  }));
  context.putImageData(pixels, 0, 0);
  return small;
}

const part = () => document.querySelector("input[name=part]:checked").value;
const layer = () => Number($("layer").value) - 1;
const maps = () => state.analysis.layers[layer()];

function draw() {
  $("layer-shown").textContent = `${$("layer").value} of ${$("layer").max}`;
  $("opacity-shown").textContent = `${$("opacity").value} %`;
  if (!state.analysis?.layers.length) return;
  const opacity = Number($("opacity").value) / 100;
  const showsEffect = part() === "effect" && state.effect !== null;
  const context = drawPhoto(view, state.bitmap, showsEffect ? "grayscale(1)" : "none");
  const small = showsEffect
    ? paintGrid(state.effect.values, (v) => [...color((v + 1) / 2, EFFECT), 255 * opacity * Math.sqrt(Math.abs(v))])
    : paintGrid(maps()[part() === "k" ? "k" : "q"], (v) => [...color(v, HEAT), 255 * opacity]);
  context.drawImage(small, 0, 0, view.width, view.height);
  $("legend").classList.toggle("effect", showsEffect);
  $("least").textContent = showsEffect ? "negative" : "least";
  $("most").textContent = showsEffect ? "positive" : "most";
  if (state.cursor) frame(context);
}

function frame(context) {
  const { rows, columns } = grid();
  const width = view.width / columns, height = view.height / rows;
  const pixel = view.width / view.getBoundingClientRect().width;  // one screen pixel in canvas units
  for (const [colorOfLine, line] of [["#fff", 4], ["#111", 2]]) {
    context.strokeStyle = colorOfLine;
    context.lineWidth = line * pixel;
    context.strokeRect(state.cursor.column * width, state.cursor.row * height, width, height);
  }
}

function grid() {
  const q = maps().q;
  return { rows: q.length, columns: q[0].length };
}

function clampCursor() {
  if (!state.cursor) return;
  const { rows, columns } = grid();
  state.cursor.row = Math.min(rows - 1, Math.max(0, state.cursor.row));
  state.cursor.column = Math.min(columns - 1, Math.max(0, state.cursor.column));
}

// --- a photo ---------------------------------------------------------------------------------------------------

async function analyze(photo) {
  const asked = ++state.asked;
  say("analyzing");
  try {
    const facts = await model();
    const analysis = await post(photo, "api/analyze");
    const bitmap = await toBitmap(photo);
    if (asked !== state.asked) return;  // a newer photo was chosen in the meantime
    Object.assign(state, NOTHING, { photo, bitmap, analysis });
    fit(view, bitmap);
    $("layer").max = analysis.layers.length;
    $("layer").value = analysis.layers.length;
    choosePart("q", false);
    $("times").replaceChildren();
    $("map").hidden = $("controls").hidden = !analysis.layers.length;
    showPhoto(bitmap, analysis.guesses.length ? facts.crop_ratio : null);
    showClasses(analysis, facts.classes.length);
    showResult(true);
    draw();
    say(summary(analysis));
  } catch (error) {
    if (asked !== state.asked) return;
    Object.assign(state, NOTHING);
    showResult(false);
    say(error.message, true);
  }
}

// The server draws what the browser cannot show, such as TIFF.
function toBitmap(photo) {
  return createImageBitmap(photo).catch(async () => createImageBitmap(await post(photo, "api/picture", {}, "blob")));
}

$("download").addEventListener("click", () => {
  view.toBlob((blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    const stem = (state.photo.name ?? "photo").replace(/\.[^.]*$/, "");
    link.download = `${stem}-${{ q: "queries", k: "keys", effect: "patch" }[part()]}-layer-${layer() + 1}.png`;
    link.click();
    URL.revokeObjectURL(link.href);
  });
});

function choosePart(name, effectToo) {
  const effect = document.querySelector("input[name=part][value=effect]");
  effect.disabled = !effectToo;
  document.querySelector(`input[name=part][value=${name}]`).checked = true;
}

// --- one patch -------------------------------------------------------------------------------------------------

async function showEffect() {
  if (!state.cursor || !state.analysis) return;
  const asked = ++state.asked;
  const { row, column } = state.cursor;
  say(`analyzing patch ${row}, ${column}`);
  try {
    const effect = await post(state.photo, "api/effect", { layer: layer(), row, column });
    if (asked !== state.asked) return;
    state.effect = effect;
    choosePart("effect", true);
    draw();
    say(`patch ${row}, ${column}: ${percent(effect.negative_share)} of the contributions are negative`);
  } catch (error) {
    if (asked === state.asked) say(error.message, true);
  }
}

function clearEffect() {
  if (!state.cursor) return;
  state.asked++;
  state.effect = null;
  state.cursor = null;
  choosePart(part() === "effect" ? "q" : part(), false);
  draw();
  say("");
}

view.addEventListener("click", (event) => {
  if (!state.analysis) return;
  const box = view.getBoundingClientRect();
  const { rows, columns } = grid();
  state.cursor = {
    row: Math.floor(((event.clientY - box.top) / box.height) * rows),
    column: Math.floor(((event.clientX - box.left) / box.width) * columns),
  };
  clampCursor();
  draw();
  showEffect();
});

const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
view.addEventListener("keydown", (event) => {
  if (!state.analysis) return;
  if (event.key in MOVES) {
    const { rows, columns } = grid();
    const [down, right] = MOVES[event.key];
    state.cursor ??= { row: Math.floor(rows / 2), column: Math.floor(columns / 2) };
    state.cursor.row += down;
    state.cursor.column += right;
    clampCursor();
    draw();
    say(`patch ${state.cursor.row}, ${state.cursor.column}`);
  } else if (event.key === "Enter" || event.key === " ") {
    showEffect();
  } else if (event.key === "Escape") {
    clearEffect();
  } else {
    return;
  }
  event.preventDefault();
});

$("layer").addEventListener("input", () => {
  if (!state.analysis) return;
  clampCursor();
  draw();
});
$("layer").addEventListener("change", () => {
  if (part() === "effect") showEffect();
});
$("opacity").addEventListener("input", draw);
$("parts").addEventListener("change", draw);

// --- time and facts --------------------------------------------------------------------------------------------

$("measure").addEventListener("click", async () => {
  const { photo } = state;
  if (!photo) return;
  $("measure").disabled = true;
  say("measuring for a few seconds");
  try {
    const times = await post(photo, "api/times", { size: $("size").value });
    if (photo !== state.photo) return;
    const slowest = Math.max(times.sima_ms, times.softmax_ms);
    const rows = [["SimA", times.sima_ms, ""], ["softmax", times.softmax_ms, "other"]];
    $("times").replaceChildren(...rows.flatMap(([name, ms, kind]) => {
      return [text("dt", name), text("dd", `${ms.toFixed(1)} ms`), bar(ms, slowest, kind)];
    }));
    say(`${times.tokens} tokens: SimA takes ${(times.sima_ms / times.softmax_ms).toFixed(2)} times as long as softmax`);
  } catch (error) {
    say(error.message, true);
  } finally {
    $("measure").disabled = false;
  }
});

// The facts about the model; asked for again only after a failure.
let asking = null;
function model() {
  asking ??= ask("api/model").catch((error) => {
    asking = null;
    throw error;
  });
  return asking;
}

const unsureBelow = (facts) => (facts.unsure_below === null ? "not measured" : percent(facts.unsure_below));

async function showModel() {
  try {
    const facts = await model();
    $("model").textContent = facts.name
      + (facts.trained ? "" : ": it has no trained weights, so its classes and maps are random");
    $("size").replaceChildren(...facts.sizes.map((size) => {
      const option = text("option", `${size} px`);
      option.value = size;
      option.selected = size === facts.size;
      return option;
    }));
    const number = (n) => (n === null ? "unknown" : n.toLocaleString("en"));
    showFacts([
      ["image", `${facts.size} px`],
      ["layers", number(facts.layers)],
      ["parameters", number(facts.params)],
      ["multiply-adds", number(facts.macs)],
      ["exp() in attention", number(facts.exps_in_attention)],
      ["exp() elsewhere", number(facts.exps_elsewhere)],
      ...(facts.classes.length ? [["unsure below", unsureBelow(facts)]] : []),
    ]);
    listClasses(facts.classes);
  } catch (error) {
    $("model").textContent = error.message;
  }
}

draw();
showModel();
takePhotos(analyze);
