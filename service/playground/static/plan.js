// The plan in words: its name, the server's reason and what becomes of the pairs.

import { count, show } from "./format.js";
import { draw, markIcon, unscaledIcon } from "./picture.js";

const KINDS = {
  kept: "kept",
  blended: "blended",
  interpolated: "interpolated",
  divided: "divided by its own number",
};

/** Of models that rotate nothing: what their positions are, and what that means, in place of a picture. */
const FIXED = {
  learned: [
    "Learned positions",
    "Nothing is rotated: the model has learned an embedding for each position, and none beyond its native length.",
  ],
  sinusoidal: [
    "Sinusoidal positions",
    "Nothing is rotated: sines and cosines are added to the embeddings. Their formula goes on beyond the native length, " +
      "the model’s training does not.",
  ],
  alibi: [
    "ALiBi",
    "Nothing is rotated: attention falls with distance, by a slope for each head, within the native length and beyond.",
  ],
};

const kindOf = (pair) => (pair.kind in KINDS ? pair.kind : "divided");

export const planName = ({ scheme, factor }) =>
  scheme === "default" ? "Unscaled" : (FIXED[scheme]?.[0] ?? `${scheme} × ${Number(factor.toFixed(3))}`);

function entry(icon, text) {
  const item = document.createElement("li");
  item.append(icon, text);
  return item;
}

/** Show a plan as `POST /v1/rope/plan` tells it. */
export function showPlan(plan) {
  show("plan-name", planName(plan));
  show("covers", `covers ${count(plan.plan_max_length)} tokens`);
  show("reason", plan.reason);
  show("no-picture", FIXED[plan.scheme]?.[1] ?? "");
  document.getElementById("figure").hidden = plan.pairs.length === 0;
  if (plan.pairs.length === 0) return;
  const pairs = plan.pairs.map((pair) => ({ ...pair, kind: kindOf(pair) }));
  const told = Object.keys(KINDS)
    .map((kind) => ({ kind, number: pairs.filter((pair) => pair.kind === kind).length }))
    .filter(({ number }) => number > 0);
  document.getElementById("legend").replaceChildren(
    ...told.map(({ kind, number }) => entry(markIcon(kind), `${number} ${KINDS[kind]}`)),
    entry(unscaledIcon(), "unscaled"),
  );
  const length = plan.prompt_tokens + plan.max_tokens;
  const summary = told.map(({ kind, number }) => `${number} ${KINDS[kind]}`).join(", ");
  draw({
    pairs,
    nativeLength: plan.native_length,
    length,
    label:
      `Wavelengths of ${pairs.length} pairs of dimensions under ${planName(plan)}: ${summary}. ` +
      `Native length ${count(plan.native_length)} tokens, this request ${count(length)}.`,
  });
}
