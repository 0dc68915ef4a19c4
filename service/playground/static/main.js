// What happens when: typing counts and plans, a button generates.

import { getJson, key, postJson } from "./api.js";
import { stream } from "./answer.js";
import { loadLongText, offer, planFields, promptTokens, samplingFields, showError } from "./form.js";
import { count, show } from "./format.js";
import { watch } from "./metrics.js";
import { showPlan } from "./plan.js";

const MS_AFTER_TYPING = 250;
const MS_UNTIL_NEXT_TRY = 2000;
const LONGEST_TEXT = 100_000; // tokens; the text that the server has is not much longer

const [form, generate, stop, long, keyField, keyInput] = ["request", "generate", "stop", "long", "key-field", "key"].map(
  (id) => document.getElementById(id),
);
const problems = { answer: null, plan: null };
let planning = new AbortController();
let timer;
let running = null;

function setProblem(where, problem) {
  problems[where] = problem;
  showError(problems.answer ?? problems.plan);
}

/** Whether it went well; what the server says against it is shown, and it is tried again while the server is not ready. */
async function attempt(where, action, again = null) {
  try {
    await action();
    setProblem(where, null);
    return true;
  } catch (error) {
    if (error.name === "AbortError") return false;
    setProblem(where, error);
    if (error.status === 401) keyField.hidden = false;
    if (error.status === 503 && again) setTimeout(again, MS_UNTIL_NEXT_TRY);
    return false;
  }
}

async function plan() {
  planning.abort();
  const { signal } = (planning = new AbortController());
  const showAll = async () => {
    const ids = await promptTokens(signal);
    show("count", `${count(ids.length)} tokens`);
    showPlan(await postJson("v1/rope/plan", { prompt_tokens: ids.length, ...planFields() }, signal));
  };
  await attempt("plan", showAll, plan);
}

function planSoon() {
  setProblem("answer", null);
  clearTimeout(timer);
  timer = setTimeout(plan, MS_AFTER_TYPING);
}

async function loadModel() {
  const showModel = async () => {
    const { data } = await getJson("v1/models");
    const { id, native_length: nativeLength, max_model_len: maxLength } = data[0];
    show("model", `${id} · native length ${count(nativeLength)} · serves up to ${count(maxLength)}`);
    offer(data[0]);
    offerLongText(nativeLength);
  };
  if (await attempt("plan", showModel)) await plan();
}

/** A text of one and a half times the native length, in round numbers. */
function offerLongText(nativeLength) {
  const wanted = Math.min(1.5 * nativeLength, LONGEST_TEXT);
  const step = 10 ** Math.max(Math.floor(Math.log10(wanted)) - 1, 0);
  const tokens = Math.floor(wanted / step) * step;
  long.textContent = `Show me ${count(tokens)} tokens`;
  long.hidden = false;
  long.onclick = async () => {
    if (await attempt("answer", () => loadLongText(tokens))) await plan();
  };
}

function setRunning(controller) {
  running = controller;
  generate.ariaDisabled = String(running !== null);
  stop.ariaDisabled = String(running === null);
}

async function run() {
  if (running) return;
  setProblem("answer", null);
  setRunning(new AbortController());
  const { signal } = running;
  await attempt("answer", async () => {
    const prompt = await promptTokens(signal);
    await stream({ prompt, ...planFields(), ...samplingFields() }, signal);
  });
  setRunning(null);
}

function useKey() {
  const given = keyInput.value.trim();
  if (given === key.get()) return;
  key.set(given);
  loadModel();
  watch();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
form.addEventListener("input", (event) => event.target !== keyInput && planSoon());
form.addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  if (event.target === keyInput) {
    event.preventDefault();
    useKey();
  } else if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    run();
  }
});
stop.addEventListener("click", () => running?.abort());
keyInput.addEventListener("change", useKey);

keyInput.value = key.get();
keyField.hidden = !key.get();
loadModel();
watch();
