/** The settings that this browser stores: sampling, tools and appearance. Each number is a row of NUMBERS. */

import { byId, h } from "./dom.js";
import { BUILT_IN, parseTools } from "./tools.js";

/**
 * @typedef {object} Settings
 * @property {string} model
 * @property {string} system the system prompt of new conversations
 * @property {string} temperature "" leaves the server's default
 * @property {string} top_p
 * @property {string} top_k
 * @property {string} min_p
 * @property {string} repetition_penalty
 * @property {string} max_tokens
 * @property {string} seed
 * @property {string} stop a line for each stop string
 * @property {string} reasoning_effort
 * @property {string[]} tools the names of the built-in tools that are on
 * @property {string} ownTools JSON
 * @property {string} extra JSON that is added to each request
 * @property {string} theme "system", "light" or "dark"
 */

const KEY = "cpuserve.settings";

/** @type {Settings} */
const DEFAULTS = {
  model: "",
  system: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  repetition_penalty: "",
  max_tokens: "",
  seed: "",
  stop: "",
  reasoning_effort: "",
  tools: [],
  ownTools: "",
  extra: "",
  theme: "system",
};

/** @returns {Settings} */
export function loadSettings() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(KEY) ?? "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

/** @param {Settings} settings */
export function saveSettings(settings) {
  localStorage.setItem(KEY, JSON.stringify(settings));
}

const NUMBERS = /** @type {const} */ ([
  ["temperature", "Temperature", "0 always takes the most likely token", 0, 2, 0.1],
  ["top_p", "Top-p", "the share of probability that may be sampled", 0, 1, 0.05],
  ["top_k", "Top-k", "how many tokens may be sampled; 0 means all", 0, 1000, 1],
  ["min_p", "Min-p", "the least probability, as a share of the most likely token", 0, 1, 0.01],
  ["repetition_penalty", "Repetition penalty", "above 1, repeated tokens become less likely", 0.1, 2, 0.05],
  ["max_tokens", "Max tokens", "the longest response", 1, 1_000_000, 1],
  ["seed", "Seed", "the same seed samples the same text", 0, 2 ** 31, 1],
]);

/**
 * Returns the members of a request that the settings set.
 * @param {Settings} settings
 * @returns {Record<string, unknown>}
 */
export function requestFields(settings) {
  /** @type {Record<string, unknown>} */
  const fields = {};
  for (const [name] of NUMBERS) {
    if (settings[name] !== "") fields[name] = Number(settings[name]);
  }
  const stops = settings.stop.split("\n").filter(Boolean);
  if (stops.length) fields.stop = stops;
  if (settings.reasoning_effort) fields.reasoning_effort = settings.reasoning_effort;
  const own = parseTools(settings.ownTools);
  const builtIn = BUILT_IN.filter((tool) => settings.tools.includes(tool.name));
  const tools = [...builtIn, ...own].map(({ name, description, parameters }) => ({
    type: "function",
    function: { name, description, parameters },
  }));
  if (tools.length) fields.tools = tools;
  return { ...fields, ...(settings.extra.trim() ? JSON.parse(settings.extra) : {}) };
}

/**
 * Builds the form of the settings and keeps them up to date.
 * @param {Settings} settings
 * @param {{system: () => string, setSystem: (text: string) => void, changed: () => void}} page
 */
export function showSettings(settings, page) {
  const changed = () => {
    saveSettings(settings);
    applyTheme(settings);
    page.changed();
  };
  const system = h("textarea", { rows: 4, id: "system" }, page.system());
  system.addEventListener("input", () => page.setSystem(/** @type {any} */ (system).value));
  byId("settings-form").replaceChildren(
    h("h2", {}, "Settings"),
    field("System prompt", "how the model should behave in this conversation", system),
    group("Sampling", ...NUMBERS.map((row) => numberField(settings, row, changed)), stops(settings, changed)),
    group("Thoughts", effort(settings, changed)),
    group("Tools", ...BUILT_IN.map((tool) => toolField(settings, tool, changed)), ownTools(settings, changed)),
    group("Appearance", theme(settings, changed)),
    group("Request", extra(settings, changed)),
  );
}

/** @param {Settings} settings */
export function applyTheme(settings) {
  document.documentElement.dataset.theme = settings.theme;
}

/**
 * @param {string} label
 * @param {string} help
 * @param {HTMLElement} control
 */
function field(label, help, control) {
  return h("label", { class: "field" }, h("span", {}, label), control, h("small", {}, help));
}

/**
 * @param {string} title
 * @param {...HTMLElement} children
 */
function group(title, ...children) {
  return h("fieldset", {}, h("legend", {}, title), ...children);
}

/**
 * @param {Settings} settings
 * @param {(typeof NUMBERS)[number]} row
 * @param {() => void} changed
 */
function numberField(settings, [name, label, help, min, max, step], changed) {
  const input = /** @type {HTMLInputElement} */ (
    h("input", { type: "number", min, max, step, placeholder: "default", value: settings[name] })
  );
  input.addEventListener("change", () => {
    if (!input.reportValidity()) return;
    settings[name] = input.value;
    changed();
  });
  return field(label, help, input);
}

/**
 * Returns a field for a text, which `check` must accept.
 * @param {Settings} settings
 * @param {"stop" | "ownTools" | "extra"} name
 * @param {string} label
 * @param {string} help
 * @param {(text: string) => void} check
 * @param {() => void} changed
 */
function textField(settings, name, label, help, check, changed) {
  const input = /** @type {HTMLTextAreaElement} */ (h("textarea", { rows: 2, spellcheck: "false" }, settings[name]));
  input.addEventListener("change", () => {
    try {
      check(input.value);
      input.setCustomValidity("");
    } catch (error) {
      input.setCustomValidity(String(error instanceof Error ? error.message : error));
      input.reportValidity();
      return;
    }
    settings[name] = input.value;
    changed();
  });
  return field(label, help, input);
}

/**
 * @param {Settings} settings
 * @param {() => void} changed
 */
function stops(settings, changed) {
  return textField(settings, "stop", "Stop strings", "one in each line", () => {}, changed);
}

/**
 * @param {Settings} settings
 * @param {() => void} changed
 */
function ownTools(settings, changed) {
  const help = "a JSON list of functions; you write the result of each call";
  return textField(settings, "ownTools", "Your tools", help, (text) => parseTools(text), changed);
}

/**
 * @param {Settings} settings
 * @param {() => void} changed
 */
function extra(settings, changed) {
  const check = (/** @type {string} */ text) => {
    const value = text.trim() ? JSON.parse(text) : {};
    if (typeof value !== "object" || Array.isArray(value)) throw new Error("It must be an object: {...}");
  };
  return textField(settings, "extra", "More fields", "a JSON object that is added to each request", check, changed);
}

/**
 * @param {Settings} settings
 * @param {"theme" | "reasoning_effort"} name
 * @param {[string, string][]} options
 * @param {() => void} changed
 */
function select(settings, name, options, changed) {
  const list = options.map(([value, text]) => h("option", { value, selected: settings[name] === value }, text));
  const element = /** @type {HTMLSelectElement} */ (h("select", {}, ...list));
  element.addEventListener("change", () => {
    settings[name] = element.value;
    changed();
  });
  return element;
}

/**
 * @param {Settings} settings
 * @param {() => void} changed
 */
function theme(settings, changed) {
  /** @type {[string, string][]} */
  const options = [["system", "As the system"], ["light", "Light"], ["dark", "Dark"]];
  return field("Colors", "light, dark, or what the system uses", select(settings, "theme", options, changed));
}

/**
 * @param {Settings} settings
 * @param {() => void} changed
 */
function effort(settings, changed) {
  /** @type {[string, string][]} */
  const options = [["", "default"], ["none", "none"], ["low", "low"], ["medium", "medium"], ["high", "high"]];
  const control = select(settings, "reasoning_effort", options, changed);
  return field("Reasoning effort", "how long a thinking model thinks", control);
}

/**
 * @param {Settings} settings
 * @param {import("./tools.js").Tool} tool
 * @param {() => void} changed
 */
function toolField(settings, tool, changed) {
  const on = settings.tools.includes(tool.name);
  const box = /** @type {HTMLInputElement} */ (h("input", { type: "checkbox", checked: on }));
  box.addEventListener("change", () => {
    const others = settings.tools.filter((name) => name !== tool.name);
    settings.tools = box.checked ? [...others, tool.name] : others;
    changed();
  });
  return h("label", { class: "check" }, box, h("code", {}, tool.name), h("small", {}, tool.description));
}
