// Runs the model in this browser with onnxruntime-web; the photo is not sent anywhere.
import {
  $, ask, listClasses, percent, say, showClasses, showFacts, showPhoto, showResult, summary, takePhotos,
} from "./parts.js";

const TILE = 2048;  // pixels per side; large canvases fail on some devices
// As in Python: sima_attn/data/images.py and serve/limits.py.
const MAX_RATIO = 100, MAX_RESIZED_RATIO = 10, MAX_PIXELS = 50e6;
const state = { ort: null, model: null, session: null, asked: 0 };

// --- preprocessing ---------------------------------------------------------------------------------------------

// The filters of PIL, which are used in training.
const FILTERS = {
  bilinear: { reach: 1, at: (x) => 1 - x },
  bicubic: { reach: 2, at: (x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : ((-0.5 * x + 2.5) * x - 4) * x + 2) },
};

// For each of `to` pixels: the first of the `from` pixels within its reach, and their weights. The reach grows when a
// photo shrinks, so that all pixels contribute.
function windows(from, to, { reach, at }) {
  const scale = from / to, stretch = Math.max(scale, 1);
  return Array.from({ length: to }, (_, i) => {
    const center = (i + 0.5) * scale;
    const first = Math.max(0, Math.trunc(center - reach * stretch + 0.5));
    const end = Math.min(from, Math.trunc(center + reach * stretch + 0.5));
    const weights = Array.from({ length: end - first }, (_, j) => {
      const x = Math.abs(first + j - center + 0.5) / stretch;
      return x < reach ? at(x) : 0;
    });
    const sum = weights.reduce((a, b) => a + b, 0);
    return { first, weights: weights.map((w) => w / sum) };
  });
}

// RGB bytes, rows of pixels -> width resized, then transposed; applied twice, it resizes both sides.
function resizeAndTranspose({ data, width, height }, to, filter) {
  const result = new Uint8ClampedArray(to * height * 3);  // rounds and clips, as PIL does
  windows(width, to, filter).forEach(({ first, weights }, x) => {
    for (let y = 0; y < height; y++) {
      for (let c = 0; c < 3; c++) {
        let sum = 0;
        for (let j = 0; j < weights.length; j++) sum += weights[j] * data[3 * (y * width + first + j) + c];
        result[3 * (x * height + y) + c] = sum;
      }
    }
  });
  return { data: result, width: height, height: to };
}

// round(excess / 2), half to even: the offset of torchvision's center crop.
const middle = (excess) => Math.floor((excess + (Math.floor(excess / 2) % 2)) / 2);

// RGB bytes -> [3, size, size]: resized to size / crop_ratio, center crop, normalized.
function prepare(photo, { size, crop_ratio, crop_mode, interpolation, mean, std }) {
  const shorter = Math.floor(size / crop_ratio), { width, height } = photo;
  const squash = crop_mode === "squash"; // both sides resized, whatever the aspect ratio
  const columns = squash ? shorter : Math.max(shorter, Math.floor((shorter * width) / height));
  const rows = squash ? shorter : Math.max(shorter, Math.floor((shorter * height) / width));
  const filter = FILTERS[interpolation];
  const resized = resizeAndTranspose(resizeAndTranspose(photo, columns, filter), rows, filter);
  const left = middle(columns - size), top = middle(rows - size);
  const image = new Float32Array(3 * size * size);
  for (let c = 0; c < 3; c++) {
    for (let y = 0; y < size; y++) {
      for (let x = 0; x < size; x++) {
        const value = resized.data[3 * ((top + y) * columns + left + x) + c] / 255;
        image[(c * size + y) * size + x] = (value - mean[c]) / std[c];
      }
    }
  }
  return image;
}

// A file -> its pixels, upright by its EXIF orientation.
async function decode(file) {
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: "none" }).catch(() => {
    throw new Error("this is not an image that the browser can read");
  });
  const { width, height } = bitmap, says = `the photo has ${width} x ${height} pixels`;
  if (Math.max(width, height) > MAX_RATIO * Math.min(width, height)) {
    throw new Error(`${says}; the longer side may be at most ${MAX_RATIO} times the shorter one: crop it`);
  }
  if (width * height > MAX_PIXELS) throw new Error(`${says}; at most ${MAX_PIXELS / 1e6} million are allowed`);
  return bitmap;
}

// A bitmap -> RGB bytes, white where it is transparent, and without the ends of a very long photo, as in Python.
function rgb(bitmap) {
  const longest = MAX_RESIZED_RATIO * Math.min(bitmap.width, bitmap.height);
  const [left, top] = [bitmap.width, bitmap.height].map((side) => Math.floor(Math.max(0, side - longest) / 2));
  const width = bitmap.width - 2 * left, height = bitmap.height - 2 * top;
  const data = new Uint8Array(3 * width * height);
  const tile = new OffscreenCanvas(Math.min(TILE, width), Math.min(TILE, height));
  const context = tile.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff";
  for (let y = 0; y < height; y += TILE) {
    for (let x = 0; x < width; x += TILE) {
      const columns = Math.min(TILE, width - x), rows = Math.min(TILE, height - y);
      context.fillRect(0, 0, columns, rows);
      context.drawImage(bitmap, left + x, top + y, columns, rows, 0, 0, columns, rows);
      const rgba = context.getImageData(0, 0, columns, rows).data;
      for (let row = 0; row < rows; row++) {
        for (let i = 4 * row * columns, j = 3 * ((y + row) * width + x); i < 4 * (row + 1) * columns; i += 4, j += 3) {
          [data[j], data[j + 1], data[j + 2]] = [rgba[i], rgba[i + 1], rgba[i + 2]];
        }
      }
    }
  }
  return { data, width, height };
}

// --- the model -------------------------------------------------------------------------------------------------

function input(photo) {
  const { ort, model } = state;
  if (model.prepares_itself) return new ort.Tensor("uint8", photo.data, [photo.height, photo.width, 3]);
  const { size } = model.preprocessing;
  return new ort.Tensor("float32", prepare(photo, model.preprocessing), [1, 3, size, size]);
}

function softmax(logits) {
  const largest = Math.max(...logits);
  const powers = Array.from(logits, (value) => Math.exp(value - largest));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((value) => value / sum);
}

async function analyze(file) {
  const asked = ++state.asked;
  try {
    await ready;
    if (!state.session) return;  // the page says why
    const bitmap = await decode(file);
    if (asked !== state.asked) return;  // another photo came in the meantime
    const { session, model } = state;
    showPhoto(bitmap, model.preprocessing.crop_ratio);
    showClasses({ guesses: [], unsure: false });
    showResult(true);
    say("analyzing");
    await new Promise(requestAnimationFrame);  // paint first: the model blocks this page
    const given = input(rgb(bitmap));
    bitmap.close();
    const start = performance.now();
    const answer = await session.run({ [session.inputNames[0]]: given });
    const milliseconds = performance.now() - start;
    const guesses = softmax(answer[session.outputNames[0]].data)
      .map((probability, k) => ({ name: model.classes?.[k] ?? `class ${k}`, probability }))
      .sort((a, b) => b.probability - a.probability);
    if (asked !== state.asked) return;
    const unsure = model.unsure_below !== null && guesses[0].probability < model.unsure_below;
    const found = { guesses: guesses.slice(0, 5), unsure };
    showClasses(found, guesses.length);
    say(`${summary(found)}, in ${milliseconds.toFixed(0)} ms`);
  } catch (error) {
    if (asked !== state.asked) return;
    showResult(false);
    say(error.message, true);
  }
}

async function load() {
  try {
    const model = await ask("api/browser");
    $("model").textContent = "loading the model into this browser";
    const ort = await import("./browser/ort.wasm.bundle.min.mjs");
    ort.env.wasm.numThreads = 1;  // more threads need a cross-origin isolated page
    const session = await ort.InferenceSession.create("browser/model.onnx", { executionProviders: ["wasm"] });
    Object.assign(state, { ort, model, session });
    $("model").textContent = `${model.name} runs in this browser: your photo does not leave it`;
    showFacts([
      ["image", `${model.preprocessing.size} px`],
      ["weights", model.precision],
      ["file", `${(model.bytes / 2 ** 20).toFixed(1)} MiB`],
      ["photo prepared by", model.prepares_itself ? "the model" : "this page"],
      ["unsure below", model.unsure_below === null ? "not measured" : percent(model.unsure_below)],
      ["onnxruntime-web", ort.env.versions.web],
    ]);
    listClasses(model.classes ?? []);
  } catch (error) {
    $("model").textContent = "there is no model to run in this browser";
    $("pick").hidden = true;
    $("missing").hidden = false;
    say(error.message);
  }
}

const ready = load();
takePhotos(analyze);
