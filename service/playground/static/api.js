// Calls of this server's API. Knows the key, the shape of errors and of streams; knows nothing of the page.

const KEY = "ropewalk-api-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** What the server refused or could not do, in its own words. */
export class ApiError extends Error {
  constructor({ message, param = null, code = null }, status) {
    super(message);
    this.param = param;
    this.code = code;
    this.status = status;
  }
}

async function call(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const options = { method: body === undefined ? "GET" : "POST", headers, body: JSON.stringify(body), signal };
  const response = await fetch(path, options).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new ApiError({ message: "the server cannot be reached" }, 0);
  });
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new ApiError(answer.error ?? { message: `the server answered ${response.status}` }, response.status);
}

export const getJson = async (path, signal) => (await call(path, { signal })).json();
export const getText = async (path, signal) => (await call(path, { signal })).text();
export const postJson = async (path, body, signal) => (await call(path, { body, signal })).json();

/** The JSON of each server-sent event of an answer, as it comes. */
export async function* postStream(path, body, signal) {
  const response = await call(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const event = JSON.parse(line.slice("data:".length));
      if (event.error) throw new ApiError(event.error, response.status);
      yield event;
    }
  }
}
