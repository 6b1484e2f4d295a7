// Speaks with the service that the page came from: keys, errors, events, and whether it is there at all.

const ROOT = new URL(location.pathname.replace(/\/(console|docs)\/*$/, "/"), location.origin);
const KEPT = "serve_app.key";
const NO_ANSWER = new Set([502, 504]);
const BROKEN = "The connection to the service was lost. What had arrived is still here.";

export const signals = new EventTarget();

export const session = {
  get key() {
    return sessionStorage.getItem(KEPT);
  },
  set key(key) {
    if (key) sessionStorage.setItem(KEPT, key);
    else sessionStorage.removeItem(KEPT);
  },
};

/** What the service refused, with everything that it said. */
export class Refused extends Error {
  constructor(status, said, headers = new Headers()) {
    const error = said?.error ?? said ?? {};
    super(error.message || `The service answered ${status}.`);
    this.status = status;
    this.param = error.param ?? null;
    this.facts = {
      status,
      type: error.type,
      code: error.error_code ?? error.code,
      param: error.param,
      "retry after": headers.get("retry-after") && `${headers.get("retry-after")} s`,
      "request id": headers.get("x-request-id"),
    };
  }
}

/** Nobody answered, or what was being answered broke off. */
export class Lost extends Error {}

export const address = (path) => new URL(path, ROOT);

/** The JSON of an answer. Raises Refused, Lost. */
export async function ask(path, { method = "GET", body, signal } = {}) {
  const response = await open(path, { method, body, signal });
  return await said(response);
}

/** The bytes of an answer. Raises Refused, Lost. */
export async function download(path) {
  const response = await open(path, { method: "GET", accept: "*/*" });
  return await response.blob().catch((error) => broken(error));
}

const PAUSES_MS = [200, 500, 1000, 2000, 4000];

/**
 * The data of each event of a stream, as text. What breaks off is fetched behind what came; a request of which nothing
 * had come is sent once more. Raises Refused, Lost.
 */
export async function* listen(path, { method = "GET", body, signal } = {}) {
  let asked = { path, method, body };
  let hasBegun = false;
  for (let attempt = 0; ; attempt += 1) {
    try {
      for await (const { data, id } of events(asked.path, { ...asked, signal, lastId: asked.lastId })) {
        if (id && method === "POST" && data.startsWith("{")) {
          const named = asked.named ?? JSON.parse(data).id;
          asked = { path: `${path}/${encodeURIComponent(named)}`, method: "GET", named, lastId: id };
        }
        hasBegun = true;
        yield data;
        if (data === "[DONE]") return;
      }
      if (!asked.lastId) return;
      throw new Lost(BROKEN);
    } catch (error) {
      const isLost = error instanceof Lost;
      const mayRepeat = asked.lastId ? isLost || error.status === 503 : isLost && !hasBegun && attempt === 0;
      if (!mayRepeat || attempt >= PAUSES_MS.length) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSES_MS[attempt]));
  }
}

async function* events(path, { method, body, signal, lastId }) {
  const response = await open(path, { method, body, signal, lastId, accept: "text/event-stream" });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read().catch((error) => broken(error, signal));
      if (done) return;
      const pieces = (rest + value).split("\n\n");
      rest = pieces.pop();
      for (const piece of pieces) {
        const lines = piece.split("\n");
        const of = (field) => lines.filter((line) => line.startsWith(field)).map((line) => line.slice(field.length).trim());
        const data = of("data:");
        if (data.length) yield { data: data.join("\n"), id: of("id:").at(-1) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The event of an error within a stream. */
export function refusalIn(chunk) {
  const isError = chunk.error !== undefined || chunk.object === "error";
  return isError ? new Refused(chunk.error?.code ?? chunk.code ?? 500, chunk) : null;
}

/** Looks for the service for ever: often while it is lost, now and then while it is there. */
export async function watch() {
  let state = null;
  while (true) {
    const found = await look();
    if (found.state !== state || found.state === "loading") {
      signals.dispatchEvent(new CustomEvent("state", { detail: { ...found, before: state } }));
      state = found.state;
    }
    await nextLook(state === "lost" ? 1000 : 4000);
    if (state !== "lost" && hasFailed) state = "doubted";
    hasFailed = false;
  }
}

let hasFailed = false;
let wake = () => {};

/** A failure brings it forward, but no two looks are nearer than a second. */
function nextLook(milliseconds) {
  const startedAt = performance.now();
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    wake = () => {
      clearTimeout(timer);
      setTimeout(resolve, Math.max(0, 1000 - (performance.now() - startedAt)));
    };
  });
}

async function look() {
  try {
    const response = await fetch(address("health"), { cache: "no-store", signal: AbortSignal.timeout(5000) });
    const body = await response.json();
    if (response.ok || body.status === "failed") return { state: "ready" };
    return body.status === "loading" ? { state: "loading", models: body.models ?? [] } : { state: "lost" };
  } catch {
    return { state: "lost" };
  }
}

async function open(path, { method, body, signal, lastId, accept = "application/json" }) {
  const headers = { accept };
  if (lastId) headers["last-event-id"] = lastId;
  if (session.key) headers.authorization = `Bearer ${session.key}`;
  const isForm = body instanceof FormData; // the browser says its boundary
  if (body !== undefined && !isForm) headers["content-type"] = "application/json";
  const sent = { method, headers, signal, body: isForm ? body : JSON.stringify(body) };
  const response = await fetch(address(path), sent).catch((error) => broken(error, signal));
  if (!response.ok) await said(response);
  return response;
}

async function said(response) {
  const text = await response.text().catch((error) => broken(error));
  const body = await new Response(text).json().catch(() => null);
  if (response.ok && body !== null) return body;
  if (body === null && NO_ANSWER.has(response.status)) broken(new Error(text));
  const refused = new Refused(response.status, body ?? { message: text.slice(0, 2000) }, response.headers);
  if (response.status === 401) signals.dispatchEvent(new CustomEvent("unknown", { detail: refused }));
  throw refused;
}

function broken(error, signal) {
  if (signal?.aborted || error.name === "AbortError") throw error;
  hasFailed = true;
  wake();
  throw new Lost(BROKEN, { cause: error });
}
