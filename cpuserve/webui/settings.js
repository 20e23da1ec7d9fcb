/**
 * The settings that this browser stores: sampling, tools and appearance. Each number is a row of NUMBERS.
 *
 * The model, the system prompt and the sampling belong to a conversation; the settings have the values with
 * which the next conversation begins.
 */

import { byId, h } from "./dom.js";
import { draftOf, keepDraft } from "./drafts.js";
import { local } from "./storage.js";
import { BUILT_IN, parseTools } from "./tools.js";

/**
 * @typedef {object} Settings
 * @property {string} model the model of new conversations; "" means the server's first one
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
    return { ...DEFAULTS, ...JSON.parse(local.get(KEY) ?? "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

/**
 * Stores settings; the others stay as another tab may have stored them.
 * @param {Settings} settings
 * @param {...(keyof Settings)} names those that have changed
 */
export function saveSettings(settings, ...names) {
  const changed = Object.fromEntries(names.map((name) => [name, settings[name]]));
  local.set(KEY, JSON.stringify({ ...loadSettings(), ...changed }));
}

/**
 * Takes over the settings that another tab stores.
 * @param {Settings} settings
 * @param {() => void} changed
 */
export function followSettings(settings, changed) {
  window.addEventListener("storage", ({ key }) => {
    if (key !== KEY) return;
    Object.assign(settings, loadSettings());
    applyTheme(settings);
    changed();
  });
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

/** @typedef {(typeof NUMBERS)[number][0] | "stop" | "reasoning_effort" | "model"} Option */

/** @type {Option[]} what each conversation has for itself, besides its system prompt */
const OPTIONS = [...NUMBERS.map(([name]) => name), "stop", "reasoning_effort", "model"];

/**
 * Returns the options with which a new conversation begins.
 * @param {Settings} settings
 * @returns {Record<string, string>}
 */
export function firstOptions(settings) {
  return Object.fromEntries(OPTIONS.map((name) => [name, settings[name]]));
}

/**
 * Returns the members of a request that the settings and the options of its conversation set.
 * @param {Settings} settings
 * @param {Record<string, string>} options
 * @returns {Record<string, unknown>}
 */
export function requestFields(settings, options) {
  const all = { ...settings, ...options };
  /** @type {Record<string, unknown>} */
  const fields = {};
  for (const [name] of NUMBERS) {
    if (all[name] !== "") fields[name] = Number(all[name]);
  }
  const stops = all.stop.split("\n").filter(Boolean);
  if (stops.length) fields.stop = stops;
  if (all.reasoning_effort) fields.reasoning_effort = all.reasoning_effort;
  const tools = toolFields(settings);
  if (tools) fields.tools = tools;
  return { ...fields, ...(settings.extra.trim() ? JSON.parse(settings.extra) : {}) };
}

/**
 * Returns the tools as requests name them; undefined if there are none.
 * @param {Settings} settings
 */
export function toolFields(settings) {
  const own = parseTools(settings.ownTools);
  const names = new Set(own.map((tool) => tool.name));
  const builtIn = BUILT_IN.filter((tool) => settings.tools.includes(tool.name) && !names.has(tool.name));
  const tools = [...builtIn, ...own].map(({ name, description, parameters }) => ({
    type: "function",
    function: { name, description, parameters },
  }));
  return tools.length ? tools : undefined;
}

/**
 * Returns the names of the tools whose results the user writes.
 * @param {Settings} settings
 * @returns {Set<string>}
 */
export function ownTools(settings) {
  try {
    return new Set(parseTools(settings.ownTools).map((tool) => tool.name));
  } catch {
    return new Set();
  }
}

/**
 * The conversation whose options the form shows.
 * @typedef {object} Shown
 * @property {string} system
 * @property {(text: string) => void} setSystem
 * @property {Record<string, string>} options
 * @property {(name: Option, value: string) => void} setOption
 */

/**
 * Builds the form of the settings and keeps them up to date.
 * @param {Settings} settings
 * @param {Shown} shown
 */
export function showSettings(settings, shown) {
  const changed = (/** @type {string} */ name) => {
    saveSettings(settings, /** @type {Option} */ (name));
    applyTheme(settings);
  };
  /** @type {Values} */
  const own = {
    get: (name) => shown.options[name] ?? settings[/** @type {Option} */ (name)],
    set: (name, value) => {
      settings[/** @type {Option} */ (name)] = value;
      changed(name);
      shown.setOption(/** @type {Option} */ (name), value);
    },
  };
  /** @type {Values} */
  const common = {
    get: (name) => settings[/** @type {"theme"} */ (name)],
    set: (name, value) => {
      settings[/** @type {"theme"} */ (name)] = value;
      changed(name);
    },
  };
  const system = h("textarea", { rows: 4, id: "system", dir: "auto" }, shown.system);
  system.addEventListener("input", () => shown.setSystem(/** @type {any} */ (system).value));
  byId("settings-form").replaceChildren(
    h("h2", {}, "Settings"),
    h("p", { class: "note" }, "The model, the system prompt, sampling and thoughts belong to this conversation. ",
      "A new one begins with the last values."),
    field("System prompt", "how the model should behave in this conversation", system),
    group("Sampling", ...NUMBERS.map((row) => numberField(own, row)), stops(own)),
    group("Thoughts", effort(own)),
    group("Tools", ...BUILT_IN.map((tool) => toolField(settings, tool)), ownToolsField(common)),
    group("Appearance", theme(common)),
    group("Request", extra(common)),
  );
}

/**
 * Where the fields of the form read and write their values.
 * @typedef {{get: (name: string) => string, set: (name: string, value: string) => void}} Values
 */

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
 * @param {Values} values
 * @param {(typeof NUMBERS)[number]} row
 */
function numberField(values, [name, label, help, min, max, step]) {
  const input = /** @type {HTMLInputElement} */ (
    h("input", { type: "number", min, max, step, placeholder: "default", value: values.get(name) })
  );
  input.addEventListener("input", () => input.validity.valid && values.set(name, input.value));
  input.addEventListener("change", () => input.reportValidity());
  return field(label, help, input);
}

/**
 * Returns a field for a text, which `check` must accept.
 * @param {Values} values
 * @param {string} name
 * @param {string} label
 * @param {string} help
 * @param {(text: string) => void} [check]
 */
function textField(values, name, label, help, check = () => {}) {
  const given = { rows: 2, spellcheck: "false" };
  const draft = `setting ${name}`;
  const input = /** @type {HTMLTextAreaElement} */ (h("textarea", given, draftOf(draft)?.text ?? values.get(name)));
  const keep = () => {
    try {
      check(input.value);
      input.setCustomValidity("");
    } catch (error) {
      // A text that is not complete yet is kept as it is.
      keepDraft(draft, { text: input.value });
      input.setCustomValidity(String(error instanceof Error ? error.message : error));
      return;
    }
    keepDraft(draft, null);
    values.set(name, input.value);
  };
  input.addEventListener("input", keep);
  input.addEventListener("change", () => input.reportValidity());
  return field(label, help, input);
}

/** @param {Values} values */
function stops(values) {
  return textField(values, "stop", "Stop strings", "one in each line");
}

/** @param {Values} values */
function ownToolsField(values) {
  const help = "a JSON list of functions; you write the result of each call";
  return textField(values, "ownTools", "Your tools", help, parseTools);
}

/** @param {Values} values */
function extra(values) {
  const check = (/** @type {string} */ text) => {
    const value = text.trim() ? JSON.parse(text) : {};
    if (typeof value !== "object" || Array.isArray(value)) throw new Error("It must be an object: {...}");
  };
  return textField(values, "extra", "More fields", "a JSON object that is added to each request", check);
}

/**
 * @param {Values} values
 * @param {string} name
 * @param {[string, string][]} options
 */
function select(values, name, options) {
  const list = options.map(([value, text]) => h("option", { value, selected: values.get(name) === value }, text));
  const element = /** @type {HTMLSelectElement} */ (h("select", {}, ...list));
  element.addEventListener("change", () => values.set(name, element.value));
  return element;
}

/** @param {Values} values */
function theme(values) {
  /** @type {[string, string][]} */
  const options = [["system", "As the system"], ["light", "Light"], ["dark", "Dark"]];
  return field("Colors", "light, dark, or what the system uses", select(values, "theme", options));
}

/** @param {Values} values */
function effort(values) {
  /** @type {[string, string][]} */
  const options = [["", "default"], ["none", "none"], ["low", "low"], ["medium", "medium"], ["high", "high"]];
  const control = select(values, "reasoning_effort", options);
  return field("Reasoning effort", "how long a thinking model thinks", control);
}

/**
 * @param {Settings} settings
 * @param {import("./tools.js").Tool} tool
 */
function toolField(settings, tool) {
  const on = settings.tools.includes(tool.name);
  const box = /** @type {HTMLInputElement} */ (h("input", { type: "checkbox", checked: on }));
  box.addEventListener("change", () => {
    const others = loadSettings().tools.filter((name) => name !== tool.name);
    settings.tools = box.checked ? [...others, tool.name] : others;
    saveSettings(settings, "tools");
  });
  return h("label", { class: "check" }, box, h("code", {}, tool.name), h("small", {}, tool.description));
}
