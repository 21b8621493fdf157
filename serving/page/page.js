// The page at /: asks the endpoint twice, with drafts and then plainly, and shows both answers with their figures.

import { ApiError, decode, hasChatTemplate, keepKey, servedModel } from "./api.js";
import { Pane, shown } from "./pane.js";

const byId = (id) => document.getElementById(id);
const form = byId("ask");
const drafted = new Pane(byId("drafted"), showTip);
const plain = new Pane(byId("plain"), showTip);
drafted.beside = plain;
plain.beside = drafted;
let running = null; // the AbortController of what runs

// -- what is served ---------------------------------------------------------------------------------------------------

async function look() {
  const model = await servedModel();
  const drafter = model.metadata?.drafter ?? {};
  byId("served").textContent = `${model.id} · ${drafterWords(drafter)}`;
  byId("key-field").hidden = true;
  return { name: model.id, maxLen: model.max_model_len, drafts: Boolean(drafter.name) };
}

function drafterWords(drafter) {
  if (!drafter.name) return "no drafter: every token is decoded plainly";
  const version = drafter.version ?? drafter.path?.split("/").filter(Boolean).pop();
  const words = [`drafter ${drafter.name}`, version, drafter.placement, drafter.away && "away: decoding plainly"];
  return words.filter(Boolean).join(" · ");
}

function takeKey() {
  if (byId("key").value) keepKey(byId("key").value);
  byId("key").value = "";
}

// -- one run ----------------------------------------------------------------------------------------------------------

function question(model) {
  const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
  return {
    model: model.name,
    prompt: byId("prompt").value,
    system: byId("system").value,
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
  };
}

async function run() {
  running = new AbortController();
  enable();
  showError(null);
  drafted.clear();
  plain.clear();
  showRace();
  try {
    takeKey();
    const model = await look();
    await answer(question(model), model.drafts, running.signal);
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else showError(error);
  } finally {
    running = null;
    enable();
  }
}

async function answer(asked, drafts, signal) {
  say(drafts ? "Decoding with drafts…" : "Decoding plainly, since no drafter is served…");
  await fill(drafted, asked, signal);
  showRace();
  if (!drafts || !byId("compare").checked) {
    say(`${drafted.ids.length} tokens.${templateWords()}`);
    return;
  }
  say("Decoding the same prompt plainly, to compare…"); // after the drafted run: at once, they would share the machine
  await fill(plain, { ...asked, num_draft_tokens: 0 }, signal);
  showRace();
  byId("speedup").textContent = drafted.speed && plain.speed ? `${shown(drafted.speed / plain.speed, 2)}×` : "–";
  say(`${comparison(asked)}${templateWords()}`);
}

async function fill(pane, asked, signal) {
  pane.start();
  try {
    for await (const chunk of decode(asked, signal)) pane.take(chunk);
  } finally {
    pane.end();
  }
}

function comparison(asked) {
  const same = drafted.text === plain.text;
  byId("verdict").dataset.equal = same;
  if (same) return `Both texts are equal (${drafted.ids.length} tokens): drafting changed nothing but the time.`;
  let at = 0;
  while (at < drafted.text.length && drafted.text[at] === plain.text[at]) at++;
  const where = `The texts differ after ${at} characters`;
  if (asked.temperature !== 0 && asked.seed === null)
    return `${where}, as they may: both were sampled without a seed. Give a seed to compare them.`;
  return `${where}. They should not, unless rounding (bfloat16) or sampled drafts are at work.`;
}

function templateWords() {
  if (hasChatTemplate()) return "";
  byId("system").disabled = true;
  return " The model has no chat template: it continued the prompt as text, without the system text.";
}

// -- what is said -----------------------------------------------------------------------------------------------------

function say(words) {
  byId("status").textContent = words;
}

function showError(error) {
  const line = byId("error");
  line.hidden = error === null;
  if (error === null) return;
  line.textContent = error instanceof ApiError ? error.line : `the page failed: ${error.message}`;
  if (error.status === 401) {
    keepKey(null);
    byId("key-field").hidden = false;
    byId("key").focus();
  }
  say("");
}

function showRace() {
  const longest = Math.max(drafted.seconds ?? 0, plain.seconds ?? 0);
  for (const [name, pane] of Object.entries({ drafted, plain })) {
    byId(`bar-${name}`).style.width = pane.seconds ? `${(100 * pane.seconds) / longest}%` : "0";
    byId(`time-${name}`).textContent = pane.seconds ? `${shown(pane.seconds, 2)} s` : "";
  }
  byId("speedup").textContent = "–";
  delete byId("verdict").dataset.equal;
}

function enable() {
  byId("run").disabled = running !== null;
  byId("stop").disabled = running === null;
}

// Beside the token, within the window.
function showTip(token) {
  const tip = byId("tip");
  tip.classList.toggle("shown", token !== null);
  if (token === null) return;
  tip.textContent = token.dataset.about;
  const box = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const above = box.top - tip.offsetHeight - 6;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above > 0 ? above : box.bottom + 6}px`;
}

// -- wiring -----------------------------------------------------------------------------------------------------------

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running === null) run();
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    form.requestSubmit();
  }
});
byId("stop").addEventListener("click", () => running?.abort());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => [drafted, plain].forEach((p) => p.draw()));

try {
  const { maxLen } = await look();
  byId("max-tokens").value = Math.min(byId("max-tokens").value, Math.max(1, Math.floor(maxLen / 2)));
} catch (error) {
  showError(error);
}
