/** Sends requests to the server that served this page: JSON, streams, and the API key. */

import { local, session } from "./storage.js";

/** An error response of the server, or no response at all (status 0). */
export class ServerError extends Error {
  /**
   * @param {string} message
   * @param {number} status
   * @param {string} [code] the server's name of the error
   */
  constructor(message, status, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const KEY = "cpuserve.key";

/** @returns {string} the API key that this tab, or this browser, remembers */
export function apiKey() {
  return session.get(KEY) ?? local.get(KEY) ?? "";
}

/**
 * Stores the API key, either for this tab only or for this browser.
 * @param {string} key
 * @param {boolean} remember
 */
export function setApiKey(key, remember) {
  session.set(KEY, null);
  local.set(KEY, null);
  if (key) (remember ? local : session).set(KEY, key);
}

/** @type {() => Promise<boolean>} */
let askForKey = async () => false;

/**
 * Sets a function that asks the user for an API key; then a refused request is sent again. If the user
 * enters none, the request fails with status 401.
 * @param {() => Promise<boolean>} ask returns whether the user has entered a key
 */
export function onUnauthorized(ask) {
  askForKey = ask;
}

/**
 * Sends a request and returns its response; throws ServerError for an error status.
 * @param {string} path
 * @param {RequestInit & {json?: unknown}} [options] json: the body
 * @returns {Promise<Response>}
 */
export async function request(path, options = {}) {
  const { json, ...init } = options;
  for (;;) {
    const headers = new Headers(init.headers);
    const key = apiKey();
    if (key) headers.set("Authorization", `Bearer ${key}`);
    if (json !== undefined) headers.set("Content-Type", "application/json");
    const body = json === undefined ? init.body : JSON.stringify(json);
    const method = init.method ?? (json === undefined ? "GET" : "POST");
    /** @type {Response} */
    let response;
    try {
      response = await fetch(path, { ...init, method, headers, body });
    } catch (error) {
      if (init.signal?.aborted) throw error;
      throw new ServerError("The server cannot be reached. Is it running?", 0);
    }
    if (response.ok) return response;
    if (response.status !== 401) throw await errorOf(response);
    // Another request may have asked for the key in the meantime.
    if (apiKey() === key && !(await askForKey())) throw await errorOf(response);
  }
}

/**
 * @param {Response} response
 * @returns {Promise<ServerError>}
 */
async function errorOf(response) {
  let message = `The server responded with status ${response.status}.`;
  let code = "";
  try {
    const body = await response.json();
    message = body.error?.message ?? message;
    code = String(body.error?.code ?? "");
  } catch {
    // The body is not JSON, for example from a proxy, so only the status is known.
  }
  return new ServerError(message, response.status, code);
}

/**
 * Returns the JSON of a response.
 * @param {string} path
 * @param {RequestInit & {json?: unknown}} [options]
 * @returns {Promise<any>}
 */
export async function json(path, options) {
  return (await request(path, options)).json();
}

/**
 * Sends a request and yields the JSON of each server-sent event until [DONE].
 * @param {string} path
 * @param {unknown} body
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<any>}
 */
export async function* stream(path, body, signal) {
  const response = await request(path, { json: body, signal });
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  let held = "";
  for (;;) {
    /** @type {ReadableStreamReadResult<Uint8Array>} */
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      throw new ServerError("The connection ended before the response was complete.", 0);
    }
    held += decoder.decode(part.value ?? new Uint8Array(), { stream: !part.done });
    const events = held.split(/\r?\n\r?\n/);
    held = events.pop() ?? "";
    for (const event of events) {
      const data = dataOf(event);
      if (data === "[DONE]") return;
      if (!data) continue;
      const value = JSON.parse(data);
      if (value.error) throw new ServerError(value.error.message, value.error.code ?? 500);
      yield value;
    }
    if (part.done) {
      throw new ServerError("The server ended the response before it was complete.", 0);
    }
  }
}

/** @param {string} event */
function dataOf(event) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}
