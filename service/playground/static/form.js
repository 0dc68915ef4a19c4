// The request as the form has it. Knows the fields; knows nothing of answers.

import { getText, postJson } from "./api.js";

const QUESTION = "\n\nWhat is the text above about? Answer in one sentence.";

const form = document.getElementById("request");
const prompt = document.getElementById("prompt");
const sendAs = document.getElementById("send-as");
const error = document.getElementById("error");

/** The text that was counted last, how it is sent, and its token ids. */
let counted = { kind: null, text: null, ids: [] };

const number = (name) => (form.elements[name].value === "" ? undefined : Number(form.elements[name].value));
const omitEmpty = (fields) => Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined));

/** The token ids that the model will read. */
export async function promptTokens(signal) {
  const [kind, text] = [sendAs.value, prompt.value];
  if (counted.kind !== kind || counted.text !== text) {
    const body = kind === "chat" ? { messages: [{ role: "user", content: text }] } : { prompt: text };
    const { tokens } = await postJson("tokenize", body, signal);
    counted = { kind, text, ids: tokens };
  }
  return counted.ids;
}

/** What decides the plan, beside the prompt. */
export function planFields() {
  const rope = omitEmpty({ scheme: form.elements["rope.scheme"].value || undefined, factor: number("rope.factor") });
  return omitEmpty({ max_tokens: number("max_tokens"), rope: Object.keys(rope).length ? rope : undefined });
}

/** What the answer is sampled with. */
export const samplingFields = () => omitEmpty({ temperature: number("temperature") });

/** Offer the schemes and factors of the served model. */
export function offer({ rope_schemes: schemes, rope_factors: factors }) {
  const fill = (select, values, text) =>
    select.replaceChildren(select.options[0], ...values.map((value) => new Option(text(value), value)));
  fill(form.elements["rope.scheme"], schemes, (scheme) => scheme);
  fill(form.elements["rope.factor"], factors, (factor) => `× ${factor}`);
}

/** Put so many tokens of a real text into the prompt, and a question after them. */
export async function loadLongText(tokens) {
  const text = await getText("playground/long-text.txt");
  const shorter = text.slice(0, tokens * 8); // English has about four characters in a token
  const ids = (await postJson("tokenize", { prompt: shorter, add_special_tokens: false })).tokens;
  prompt.value = (await postJson("detokenize", { tokens: ids.slice(0, tokens) })).prompt + QUESTION;
  prompt.scrollTop = prompt.scrollHeight;
}

/** Say what the server refused, beside the field that it names; null when all is well. */
export function showError(problem) {
  error.textContent = problem ? `${problem.message}${problem.code ? ` (${problem.code})` : ""}` : "";
  for (const element of form.elements) {
    if (!element.name) continue;
    const isNamed = element.name === problem?.param;
    element.ariaInvalid = isNamed ? "true" : null;
    isNamed ? element.setAttribute("aria-describedby", "error") : element.removeAttribute("aria-describedby");
  }
}
