// Talks to this server: one question, or the event stream of a text. The key stays in this module's memory.

let key = "";

/** What the server answers instead. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The key of all requests from now on. Raises Refused for one that no header can hold. */
export function useKey(given) {
  if (!/^[\x20-\x7e]*$/.test(given)) throw new Refused(401, "The key has characters beyond ASCII. Paste the key alone.");
  key = given;
}

/** What runs here. */
export async function info() {
  return (await call("/v1/outrider/info", {})).json().catch(broken);
}

/** Has the target check an answer with unverified text. */
export async function verify(id, signal) {
  const options = { method: "POST", body: JSON.stringify({ id }), headers: { "Content-Type": "application/json" }, signal };
  return (await call("/v1/outrider/verify", options)).json().catch(broken);
}

/** Generates a text; calls `take` with each event, and returns the last. */
export async function generate(request, signal, take) {
  const response = await call("/v1/outrider/generate", {
    method: "POST",
    body: JSON.stringify(request),
    headers: { "Content-Type": "application/json" },
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(broken);
    if (done) broken({});
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      const event = JSON.parse(block.slice(6));
      if (event.type === "error") throw new Refused(0, event.error.message);
      take(event);
      if (event.type === "end") return event;
    }
  }
}

/** An answer that breaks off. */
function broken(error) {
  if (error.name === "AbortError") throw error;
  throw new Refused(0, "The connection broke before the answer ended. Try again.");
}

async function call(path, options) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "This server does not answer. Is outrider serve still running?");
  }
  if (response.ok) return response;
  let message = `The server answers ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not this server's JSON
  }
  throw new Refused(response.status, message);
}
