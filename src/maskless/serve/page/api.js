// Talking to the server: JSON, and server-sent events read from a fetch, so that a key can go along and a stop works.

let key = sessionStorage.getItem("maskless-key") || "";
export const setKey = (value) => { key = value; sessionStorage.setItem("maskless-key", value); };

export class Refused extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

function headers(more) {
  return { ...(key ? { authorization: `Bearer ${key}` } : {}), ...more };
}

async function checked(response) {
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try { message = (await response.json()).error.message; } catch { /* not JSON: the status says it */ }
  throw new Refused(message, response.status);
}

async function sent(path, options) {
  try {
    return await checked(await fetch(path, options));
  } catch (error) {
    if (error instanceof TypeError) throw new Refused("the server does not answer: is it still running?", 0);
    throw error;
  }
}

export async function get(path) {
  return (await sent(path, { headers: headers() })).json();
}

export async function post(path, body, signal) {
  const options = { method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body), signal };
  return (await sent(path, options)).json();
}

// Calls on[name](data) for each event; ends after "done", and throws what an "error" says.
export async function stream(path, body, on, signal) {
  const more = { "content-type": "application/json", accept: "text/event-stream" };
  const response = await sent(path, { method: "POST", headers: headers(more), body: JSON.stringify({ ...body, stream: true }), signal });
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
