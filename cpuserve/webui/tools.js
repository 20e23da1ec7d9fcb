/** Tools: two that this page runs itself, and tools of the user, who enters their results by hand. */

/**
 * @typedef {object} Tool
 * @property {string} name
 * @property {string} description
 * @property {object} parameters a JSON schema
 */

/** @type {(Tool & {run: (given: any) => string})[]} */
export const BUILT_IN = [
  {
    name: "current_time",
    description: "Return the current date, time and time zone of the user.",
    parameters: { type: "object", properties: {} },
    run: () => {
      const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
      return `${new Date().toLocaleString("en", { dateStyle: "full", timeStyle: "long" })} (${zone})`;
    },
  },
  {
    name: "calculate",
    description: "Return the value of an arithmetic expression, such as (2 + 3) * sqrt(16) / 7^2.",
    parameters: {
      type: "object",
      properties: { expression: { type: "string" } },
      required: ["expression"],
    },
    run: (given) => String(calculate(String(given.expression ?? ""))),
  },
];

/**
 * Returns the result of calling a built-in tool; null for a tool of the user.
 * @param {string} name
 * @param {string} given the arguments as JSON
 */
export function runTool(name, given) {
  const tool = BUILT_IN.find((known) => known.name === name);
  if (!tool) return null;
  try {
    return tool.run(JSON.parse(given || "{}"));
  } catch (error) {
    return `Error: ${error instanceof Error ? error.message : error}`;
  }
}

/**
 * Parses a JSON text with a list of tools in the format of the API.
 * @param {string} text
 * @returns {Tool[]}
 */
export function parseTools(text) {
  if (!text.trim()) return [];
  const list = JSON.parse(text);
  if (!Array.isArray(list)) throw new Error("The tools must be a list: [{...}]");
  return list.map((item) => {
    const tool = item.function ?? item;
    if (typeof tool.name !== "string") throw new Error("Each tool needs a name");
    const { name, description = "", parameters = { type: "object", properties: {} } } = tool;
    return { name, description, parameters };
  });
}

/** @type {Record<string, (x: number) => number>} */
const FUNCTIONS = {
  sqrt: Math.sqrt,
  abs: Math.abs,
  sin: Math.sin,
  cos: Math.cos,
  tan: Math.tan,
  ln: Math.log,
  log: Math.log10,
  exp: Math.exp,
  round: Math.round,
  floor: Math.floor,
  ceil: Math.ceil,
};
/** @type {Record<string, number>} */
const CONSTANTS = { pi: Math.PI, e: Math.E };

/**
 * Returns the value of an arithmetic expression. It is parsed, because evaluating it as code would let a
 * model run anything in the browser.
 * @param {string} text
 * @returns {number}
 */
export function calculate(text) {
  const tokens = text.match(/\d*\.?\d+(?:[eE][+-]?\d+)?|[A-Za-z]+|\*\*|\S/g) ?? [];
  let at = 0;
  const take = (/** @type {string[]} */ ...signs) =>
    signs.includes(tokens[at]) ? tokens[at++] : undefined;

  /** @returns {number} */
  function sum() {
    let value = product();
    for (let sign = take("+", "-"); sign; sign = take("+", "-")) {
      value = sign === "+" ? value + product() : value - product();
    }
    return value;
  }

  function product() {
    let value = signed();
    for (let sign = take("*", "×", "/", "÷", "%"); sign; sign = take("*", "×", "/", "÷", "%")) {
      const right = signed();
      if (sign === "%") value %= right;
      else value = sign === "*" || sign === "×" ? value * right : value / right;
    }
    return value;
  }

  /** @returns {number} */
  function signed() {
    const sign = take("+", "-");
    return sign === "-" ? -signed() : sign ? signed() : power();
  }

  function power() {
    const base = atom();
    return take("^", "**") ? base ** signed() : base;
  }

  function atom() {
    const token = tokens[at++];
    if (token === undefined) throw new Error("The expression ends too early");
    if (/^[\d.]/.test(token) && !Number.isNaN(Number(token))) return Number(token);
    if (Object.hasOwn(CONSTANTS, token)) return CONSTANTS[token];
    const call = Object.hasOwn(FUNCTIONS, token) ? FUNCTIONS[token] : null;
    if (call && !take("(")) throw new Error(`${token} needs parentheses`);
    if (!call && token !== "(") throw new Error(`Unknown: ${token}`);
    const value = sum();
    if (!take(")")) throw new Error("A parenthesis is not closed");
    return call ? call(value) : value;
  }

  const value = sum();
  if (at < tokens.length) throw new Error(`Unknown: ${tokens[at]}`);
  return value;
}
