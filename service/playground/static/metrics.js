// What the server does now, from its metrics.

import { getText } from "./api.js";
import { show } from "./format.js";

const SECONDS_BETWEEN_LOOKS = 2;

/** The samples of Prometheus' text format that have no labels: name to value. */
export const samples = (text) =>
  new Map(
    text
      .split("\n")
      .map((line) => line.match(/^(\w+) (\S+)$/))
      .filter(Boolean)
      .map(([, name, value]) => [name, Number(value)]),
  );

async function look() {
  if (document.hidden) return;
  const found = samples(await getText("metrics"));
  const share = found.get("ropewalk_kv_cache_usage_ratio") ?? 0;
  show("running", `${found.get("ropewalk_num_requests_running") ?? 0}`);
  show("waiting", `${found.get("ropewalk_num_requests_waiting") ?? 0}`);
  show("cache", `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`);
  document.getElementById("cache-meter").value = share;
}

let timer;

/** Keep the server's gauges up to date; they are dashes while it cannot be asked, and where it wants another key. */
export async function watch() {
  clearTimeout(timer);
  const isRefused = await look().then(
    () => false,
    (error) => {
      for (const id of ["running", "waiting", "cache"]) show(id, "–");
      return error.status === 401;
    },
  );
  if (!isRefused) timer = setTimeout(watch, SECONDS_BETWEEN_LOOKS * 1000);
}
