// Talking to the server: JSON, and server-sent events read from a fetch, so that a key can go along and a stop works.

let key = sessionStorage.getItem("maskless-key") || "";
export const setKey = (value) => { key = value; sessionStorage.setItem("maskless-key", value); };

export class Refused extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

// The answer to a request, which is a POST if it has a body; throws what an error says.
async function ask(path, body, { accept = "application/json", signal } = {}) {
  const headers = { accept, ...(body && { "content-type": "application/json" }), ...(key && { authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error instanceof TypeError) throw new Refused("the server does not answer: is it still running?", 0);
    throw error;
  }
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try { message = (await response.json()).error.message; } catch { /* not JSON: the status says it */ }
  throw new Refused(message, response.status);
}

export const get = async (path) => (await ask(path)).json();
export const post = async (path, body) => (await ask(path, body)).json();

// Calls on[name](data) for each event; ends after "done", and throws what an "error" says.
export async function stream(path, body, on, signal) {
  const response = await ask(path, { ...body, stream: true }, { accept: "text/event-stream", signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", ended = false;
  for (;;) {
    let part;
    try { part = await reader.read(); } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused("the connection broke before the end", 0);
    }
    if (part.done) break;
    const blocks = (rest + part.value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const name = /^event: (.*)$/m.exec(block)?.[1];
      const data = /^data: (.*)$/m.exec(block)?.[1];
      if (!name || !data) continue;
      const value = JSON.parse(data);
      if (name === "error") throw new Refused(value.error.message, value.error.code);
      if (name === "done") ended = true;
      on[name]?.(value);
    }
  }
  if (!ended) throw new Refused("the connection broke before the end", 0);
}
