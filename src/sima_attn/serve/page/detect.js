// The page of a detector: the server draws boxes, names and masks on the photo.

import { $, ask, drawPhoto, fit, listClasses, say, shareItem, showFacts, showResult, takePhotos } from "./parts.js";

const state = { photo: null, asked: 0 };

async function detect(photo) {
  const asked = ++state.asked;  // a later request makes this one obsolete
  state.photo = photo;
  say("detecting");
  try {
    const answer = await ask(`api/detect?threshold=${$("threshold").value / 100}`, { method: "POST", body: photo });
    const picture = await createImageBitmap(jpeg(answer.picture));
    if (asked === state.asked) show(answer.objects, picture);
  } catch (error) {
    if (asked !== state.asked) return;
    showResult(false);  // the old result is not that of this photo
    say(error.message, true);
  }
}

function jpeg(base64) {
  return new Blob([Uint8Array.from(atob(base64), (character) => character.charCodeAt(0))], { type: "image/jpeg" });
}

function show(objects, picture) {
  fit($("photo"), picture);
  drawPhoto($("photo"), picture);
  $("guesses").replaceChildren(...objects.map(({ name, score }) => shareItem(name, score)));
  showResult(true);
  const found = objects.length === 1 ? "1 object" : `${objects.length} objects`;
  say(objects.length ? found : "No object has this score: lower it.");
}

$("threshold").addEventListener("input", () => {
  $("threshold-shown").textContent = `${$("threshold").value} %`;
});
$("threshold").addEventListener("change", () => detect(state.photo));

takePhotos(detect);
ask("api/model").then(({ name, kind, params, classes }) => {
  $("model").textContent = `${kind} on ${name}`;
  showFacts([["parameters", params.toLocaleString("en")]]);
  listClasses(classes);
}, (error) => say(error.message, true));
