// The page of a detector: the server draws boxes, names and masks on the photo.

import { $, ask, bar, fit, percent, say, takePhotos, text } from "./parts.js";

const state = { photo: null, asked: 0 };

async function detect(photo) {
  const asked = ++state.asked;  // a later request makes this one obsolete
  state.photo = photo;
  say("detecting");
  try {
    const answer = await ask(`api/detect?threshold=${$("threshold").value}`, { method: "POST", body: photo });
    const picture = await createImageBitmap(jpeg(answer.picture));
    if (asked === state.asked) show(answer.objects, picture);
  } catch (error) {
    if (asked !== state.asked) return;
    $("result").hidden = true;  // the old result is not that of this photo
    say(error.message, true);
  }
}

function jpeg(base64) {
  return new Blob([Uint8Array.from(atob(base64), (character) => character.charCodeAt(0))], { type: "image/jpeg" });
}

function show(objects, picture) {
  const canvas = $("view");
  fit(canvas, picture);
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  $("guesses").replaceChildren(...objects.map(({ name, score }) => {
    const item = document.createElement("li");
    item.append(text("span", name), text("span", percent(score)), bar(score, 1));
    return item;
  }));
  $("result").hidden = false;
  say(objects.length ? "" : "No object has this score: lower it.");
}

$("threshold").addEventListener("input", () => {
  $("least").textContent = `${Math.round(100 * $("threshold").value)} %`;
});
$("threshold").addEventListener("change", () => detect(state.photo));

takePhotos(detect);
ask("api/model").then(({ name, kind, classes }) => {
  $("model").textContent = `${kind} on ${name}, ${classes.length} classes`;
}, (error) => say(error.message, true));
