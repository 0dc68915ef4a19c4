// One answer, as it streams in, and how fast it came.

import { postStream } from "./api.js";
import { count, seconds, show } from "./format.js";
import { planName } from "./plan.js";

const answer = document.getElementById("answer");
const REASONS = { stop: "the model ended it", length: "it reached its length" };

/** Send a request and show its answer. Throws what the API does; aborted, it shows what had come. */
export async function stream(body, signal) {
  const started = performance.now();
  const elapsed = () => (performance.now() - started) / 1000;
  let [tokens, first] = [0, null];
  answer.textContent = "";
  show("speed", "–");
  show("status", `Reading ${count(body.prompt.length)} tokens`);
  const clock = setInterval(() => show("first-token", seconds(elapsed())), 200);
  answer.ariaBusy = "true";
  try {
    for await (const event of postStream("generate", { ...body, stream: true }, signal)) {
      tokens += event.token_ids.length;
      if (first === null && tokens > 0) {
        first = { at: elapsed(), tokens };
        clearInterval(clock);
        show("first-token", seconds(first.at));
        show("status", "Writing");
      }
      const isAtEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 8;
      answer.append(event.text);
      if (isAtEnd) answer.scrollTop = answer.scrollHeight;
      if (first !== null && tokens > first.tokens) {
        show("speed", `${((tokens - first.tokens) / (elapsed() - first.at)).toFixed(1)}`);
      }
      if (event.rope) show("status", ending(event));
    }
  } catch (error) {
    show("status", error.name === "AbortError" ? "Stopped" : "");
    if (first === null) show("first-token", "–");
    if (error.name !== "AbortError") throw error;
  } finally {
    clearInterval(clock);
    answer.ariaBusy = "false";
  }
}

function ending({ finish_reason: reason, usage, rope }) {
  const moved = rope.rerotations ? `; grew to ${planName(rope)} in ${rope.rerotations} re-rotations` : "";
  return `${count(usage.completion_tokens)} tokens; ${REASONS[reason] ?? reason}${moved}`;
}
