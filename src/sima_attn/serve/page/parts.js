// Shared by the pages: photo input, and display of classes and facts.

const LONGER_SIDE = 1024;

export const $ = (id) => document.getElementById(id);
export const percent = (p) => `${(100 * p).toFixed(1)} %`;

export function say(message, wrong = false) {
  $("status").textContent = message;
  $("status").classList.toggle("error", wrong);
}

// An answer of the server: "json", or a "blob" where it is a picture.
export async function ask(path, options, kind = "json") {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("the server does not answer");
  }
  if (response.ok) return response[kind]();
  const refusal = await response.json().catch(() => ({ detail: `the server answered ${response.status}` }));
  throw new Error(refusal.detail);
}

export function text(tag, content) {
  const element = document.createElement(tag);
  element.textContent = content;
  return element;
}

export function bar(value, of, kind) {
  const progress = document.createElement("progress");
  progress.max = of;
  progress.value = value;
  if (kind) progress.className = kind;
  progress.setAttribute("aria-hidden", "true");
  return progress;
}

// The classes of a photo. `unsure`: it may be of none of the `known` classes.
export function showClasses({ guesses, unsure }, known) {
  $("classes").hidden = !guesses.length;
  $("classes").classList.toggle("unsure", unsure);
  $("unsure").hidden = !unsure;
  $("unsure").textContent = `Unsure: this may be none of the ${known} classes that the model knows.`;
  $("guesses").replaceChildren(...guesses.map(({ name, probability }) => shareItem(name, probability)));
}

// A name with a share of 1, in words and as a bar.
export function shareItem(name, share) {
  const item = document.createElement("li");
  item.append(text("span", name), text("span", percent(share)), bar(share, 1));
  return item;
}

export function summary({ guesses, unsure }) {
  if (!guesses.length) return "";
  return unsure ? "unsure: maybe none of its classes" : `${guesses[0].name}, ${percent(guesses[0].probability)}`;
}

export function listClasses(names) {
  const [title, list] = $("known").children;
  title.textContent = `The ${names.length.toLocaleString("en")} classes that it knows`;
  list.replaceChildren(...names.map((name) => text("li", name)));
  $("known").hidden = !names.length;
}

export function showFacts(pairs) {
  $("facts").replaceChildren(...pairs.map(([name, value]) => {
    const fact = document.createElement("div");
    fact.append(text("dt", name), text("dd", value));
    return fact;
  }));
}

// Give a canvas the aspect ratio of a photo; small photos are enlarged.
export function fit(canvas, { width, height }) {
  const scale = LONGER_SIDE / Math.max(width, height);
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
}

// Draw a photo, white where it is transparent, as the model sees it.
export function drawPhoto(canvas, photo, filter = "none") {
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.filter = filter;
  context.drawImage(photo, 0, 0, canvas.width, canvas.height);
  context.filter = "none";
  return context;
}

// The photo, dimmed where the model does not look to classify it: it takes a square of the middle.
export function showPhoto(photo, cropRatio) {
  const canvas = $("photo");
  fit(canvas, photo);
  const context = drawPhoto(canvas, photo);
  const { width, height } = canvas, side = Math.min(width, height) * (cropRatio ?? 1);
  const cropped = cropRatio !== null && Math.max(width, height) > side + 1;
  $("classified").textContent = cropped ? "The bright square is classified." : "";
  if (!cropped) return;
  const outside = new Path2D();
  outside.rect(0, 0, width, height);
  outside.rect((width - side) / 2, (height - side) / 2, side, side);
  context.fillStyle = "rgb(0 0 0 / .5)";
  context.fill(outside, "evenodd");
}

export function showResult(shown) {
  $("result").hidden = !shown;
  $("pick").classList.toggle("small", shown);
}

// --- photo input: chosen, pasted, dropped, or a sample ---------------------------------------------------------

export function takePhotos(analyze) {
  $("file").addEventListener("change", () => {
    if ($("file").files[0]) analyze($("file").files[0]);
    $("file").value = "";  // so that the same file can be chosen again
  });
  document.addEventListener("paste", (event) => {
    const file = [...event.clipboardData.files].find((f) => f.type.startsWith("image/"));
    if (file) analyze(file);
  });
  for (const kind of ["dragenter", "dragover"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault();
      $("drop").classList.add("over");
    });
  }
  document.addEventListener("dragleave", () => $("drop").classList.remove("over"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    $("drop").classList.remove("over");
    const file = event.dataTransfer.files[0];
    if (file) analyze(file);
  });
  offerSamples(analyze);
}

async function offerSamples(analyze) {
  const names = await ask("api/samples").catch(() => []);
  $("samples").replaceChildren(...names.map((name) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = name;
    const image = document.createElement("img");
    image.src = `api/samples/${encodeURIComponent(name)}?side=144`;
    image.alt = name;
    button.append(image);
    button.addEventListener("click", async () => {
      try {
        const response = await fetch(`api/samples/${encodeURIComponent(name)}`);
        if (!response.ok) throw new Error("cannot load the sample");
        analyze(new File([await response.blob()], name));
      } catch (error) {
        say(error.message, true);
      }
    });
    return button;
  }));
}
