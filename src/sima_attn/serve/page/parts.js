// Shared by both pages: photo input, and display of classes and facts.

const LONGER_SIDE = 1024;

export const $ = (id) => document.getElementById(id);
export const percent = (p) => `${(100 * p).toFixed(1)} %`;

export function say(message, wrong = false) {
  $("status").textContent = message;
  $("status").classList.toggle("error", wrong);
}

export async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("the server does not answer");
  }
  const answer = await response.json().catch(() => ({ detail: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(answer.detail);
  return answer;
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

export function showGuesses(guesses) {
  $("guesses").replaceChildren(...guesses.map(({ name, probability }) => {
    const item = document.createElement("li");
    item.append(text("span", name), text("span", percent(probability)), bar(probability, 1));
    return item;
  }));
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

// --- photo input: chosen, pasted, dropped, or a sample ---------------------------------------------------------

export function takePhotos(analyse) {
  $("file").addEventListener("change", () => {
    if ($("file").files[0]) analyse($("file").files[0]);
    $("file").value = "";  // so that the same file can be chosen again
  });
  document.addEventListener("paste", (event) => {
    const file = [...event.clipboardData.files].find((f) => f.type.startsWith("image/"));
    if (file) analyse(file);
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
    if (file) analyse(file);
  });
  offerSamples(analyse);
}

async function offerSamples(analyse) {
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
        analyse(await response.blob());
      } catch (error) {
        say(error.message, true);
      }
    });
    return button;
  }));
}
