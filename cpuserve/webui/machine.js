/** The machine view: cores with their threads, memory bandwidth, the KV cache, and a request timeline. */

import { json, ServerError } from "./api.js";
import { lineChart, timeline } from "./charts.js";
import { h, svg } from "./dom.js";

const ACTIVITY_MS = 500;
const REPORT_MS = 4000;
const WINDOW_S = 60;

/**
 * The body of GET /v1/activity.
 * @typedef {{
 *   number: number, arrived_s: number, scheduled_s: number | null, first_s: number | null,
 *   ended_s: number | null, state: string, prompt_tokens: number, cached_tokens: number,
 *   output_tokens: number,
 * }} SequenceActivity
 * @typedef {{
 *   model: string, running: number, waiting: number, kv_usage: number, kv_bytes: number,
 *   prompt_tokens: number, output_tokens: number, cached_tokens: number, busy_s: number,
 *   weight_bytes: number, roofline_bytes_per_s: number | null, sequences: SequenceActivity[],
 * }} ModelActivity
 * @typedef {{cpu: number, busy_s: number, idle_s: number}} CpuTimes
 * @typedef {{time: number, models: ModelActivity[], cpus: CpuTimes[]}} Activity
 */

export class MachineView {
  /** @param {HTMLElement} element */
  constructor(element) {
    this.element = element;
    /** @type {Activity[]} the last WINDOW_S seconds */
    this.past = [];
    this.seen = new Date();
    /** @type {any} the body of GET /v1/cpu */
    this.report = null;
    this.shown = false;
    this.parts = {
      title: h("p", { class: "machine-title" }),
      trouble: h("p", { class: "wrong", role: "alert", hidden: true }),
      tiles: h("div", { class: "tiles" }),
      cores: h("div", { class: "panel cores" }),
      bandwidth: h("div", { class: "panel" }),
      memory: h("div", { class: "panel" }),
      requests: h("div", { class: "panel wide" }),
    };
    const { title, trouble, tiles, cores, bandwidth, memory, requests } = this.parts;
    const panels = h("div", { class: "panels" }, cores, bandwidth, memory, requests);
    element.append(h("h2", { class: "hidden" }, "Machine"), title, trouble, tiles, panels);
  }

  /**
   * Starts or stops following the server.
   * @param {boolean} shown
   */
  show(shown) {
    if (shown && !this.shown) {
      this.shown = true;
      this.follow(ACTIVITY_MS, () => this.readActivity());
      this.follow(REPORT_MS, () => this.readReport());
    }
    this.shown = shown;
  }

  /**
   * @param {number} interval
   * @param {() => Promise<void>} read
   */
  async follow(interval, read) {
    while (this.shown) {
      try {
        await read();
        this.parts.trouble.hidden = true;
        this.element.classList.remove("stale");
      } catch (error) {
        this.sayTrouble(error instanceof ServerError ? error.message : String(error));
      }
      await new Promise((resolve) => setTimeout(resolve, interval));
    }
  }

  /**
   * Says why there are no new figures; the last ones stay, and are no longer shown as those of now.
   * @param {string} text
   */
  sayTrouble(text) {
    const { trouble } = this.parts;
    const known = this.past.length > 0;
    const last = known ? ` These are the figures of ${this.seen.toLocaleTimeString()}.` : "";
    if (trouble.textContent !== text + last) trouble.textContent = text + last;
    trouble.hidden = false;
    this.element.classList.toggle("stale", known);
  }

  async readActivity() {
    const activity = /** @type {Activity} */ (await json("v1/activity"));
    const last = this.past.at(-1);
    // If a counter has become smaller, the server has restarted.
    if (last && outputTokens(activity) < outputTokens(last)) this.past = [];
    this.past.push(activity);
    this.seen = new Date();
    while (this.past[0].time < activity.time - WINDOW_S - 2) this.past.shift();
    this.draw();
  }

  async readReport() {
    try {
      this.report = await json("v1/cpu");
    } catch (error) {
      // Without this report of the server, the view shows everything else.
      if (!(error instanceof ServerError) || error.status !== 404) throw error;
    }
    this.draw();
  }

  draw() {
    const now = this.past.at(-1);
    if (!now || !this.shown) return;
    this.drawTitle();
    this.drawTiles(now);
    this.drawCores(now);
    this.drawBandwidth(now);
    this.drawMemory(now);
    this.drawRequests(now);
  }

  drawTitle() {
    if (!this.report) return;
    const { machine, isa } = this.report;
    const cores = `${machine.cores} ${machine.cores === 1 ? "core" : "cores"}`;
    const memory = `${Math.round(machine.memory_total / 2 ** 30)} GiB`;
    this.parts.title.textContent = [machine.cpu, cores, memory, `kernels for ${isa}`].join(" · ");
  }

  /** @param {Activity} now */
  drawTiles(now) {
    const output = this.rate((activity) => outputTokens(activity));
    const prompt = this.rate((activity) => total(activity, (model) => model.prompt_tokens));
    const cached = total(now, (model) => model.cached_tokens);
    const prompts = total(now, (model) => model.prompt_tokens);
    const running = total(now, (model) => model.running);
    const waiting = total(now, (model) => model.waiting);
    this.parts.tiles.replaceChildren(
      tile("Generated", short(output), "tokens/s"),
      tile("Prompts", short(prompt), "tokens/s"),
      tile("Running", String(running), running === 1 ? "sequence" : "sequences"),
      tile("Waiting", String(waiting), waiting === 1 ? "sequence" : "sequences"),
      tile("From the cache", prompts ? `${Math.round((100 * cached) / prompts)} %` : "–", "of all prompt tokens"),
    );
  }

  /**
   * Returns how fast a counter grew over the last three seconds, per second.
   * @param {(activity: Activity) => number} counter
   */
  rate(counter) {
    const now = this.past[this.past.length - 1];
    const before = this.past.find((activity) => activity.time >= now.time - 3) ?? now;
    const seconds = now.time - before.time;
    return seconds > 0 ? (counter(now) - counter(before)) / seconds : 0;
  }

  /** @param {Activity} now */
  drawCores(now) {
    const before = this.past.at(-3) ?? this.past[0];
    const earlier = new Map(before.cpus.map((times) => [times.cpu, times]));
    const busy = new Map(now.cpus.map((times) => [times.cpu, busyShare(times, earlier.get(times.cpu))]));
    const { nodes, threadOf, frontEnd } = this.layout(now);
    const drawn = nodes.map(({ name, cpus }) =>
      h(
        "div",
        { class: "node" },
        nodes.length > 1 && h("h4", {}, name),
        h("div", { class: "dies" }, ...cpus.map((cpu) => core(cpu, busy.get(cpu) ?? 0, threadOf.get(cpu), frontEnd.has(cpu)))),
      ),
    );
    this.parts.cores.replaceChildren(
      h("h3", {}, "Cores"),
      ...drawn,
      h("p", { class: "legend" }, "Filled: how busy the core is. t: a compute thread. f: the front end."),
    );
  }

  /**
   * Returns the CPUs of each node, the compute thread on each CPU, and the front end's CPUs.
   * @param {Activity} now
   * @returns {{
   *   nodes: {name: string, cpus: number[]}[], threadOf: Map<number, number>, frontEnd: Set<number>,
   * }}
   */
  layout(now) {
    const report = this.report;
    const all = now.cpus.map((times) => times.cpu);
    /** @type {Map<number, number>} */
    const threadOf = new Map();
    if (!report) return { nodes: [{ name: "", cpus: all }], threadOf, frontEnd: new Set() };
    const bound = cpuList(report.placement.bind);
    const on = report.live.threads_on.length ? report.live.threads_on : bound;
    on.forEach((/** @type {number} */ cpu, /** @type {number} */ thread) => threadOf.set(cpu, thread));
    const nodes = report.machine.nodes.map((/** @type {any} */ node) => ({
      name: `Node ${node.node}`,
      cpus: cpuList(node.cpus),
    }));
    return { nodes, threadOf, frontEnd: new Set(cpuList(report.placement.frontend)) };
  }

  /** @param {Activity} now */
  drawBandwidth(now) {
    const points = this.series((from, to) => {
      const busy = total(to, (m) => m.busy_s) - total(from, (m) => m.busy_s);
      const bytes = total(to, (m) => m.weight_bytes) - total(from, (m) => m.weight_bytes);
      return busy > 0 ? bytes / (to.time - from.time) / 1e9 : 0;
    });
    const roofline = Math.max(0, ...now.models.map((m) => m.roofline_bytes_per_s ?? 0)) / 1e9;
    const last = points.at(-1)?.value ?? 0;
    const share = roofline ? ` – ${Math.round((100 * last) / roofline)} % of the roofline` : "";
    this.parts.bandwidth.replaceChildren(
      h("h3", {}, "Memory bandwidth for weights"),
      h("p", { class: "figure" }, `${last.toFixed(1)} GB/s`, h("small", {}, share)),
      lineChart(points, {
        width: inner(this.parts.bandwidth),
        window: WINDOW_S,
        limit: roofline || null,
        unit: "GB/s",
        label: "Bandwidth in the last minute",
      }),
      h(
        "p",
        { class: "legend" },
        roofline
          ? `Dashed: ${roofline.toFixed(1)} GB/s, measured on this machine. Prompts are bound by arithmetic and stay below.`
          : "The roofline has not been measured yet.",
      ),
      h("p", { class: "legend" }, toldLimits(this.report?.live.limits ?? [])),
    );
  }

  /** @param {Activity} now */
  drawMemory(now) {
    const share = (/** @type {Activity} */ activity) => {
      const bytes = total(activity, (m) => m.kv_bytes);
      return bytes ? (100 * total(activity, (m) => m.kv_usage * m.kv_bytes)) / bytes : 0;
    };
    const points = this.series((_, to) => share(to));
    const bytes = total(now, (m) => m.kv_bytes);
    this.parts.memory.replaceChildren(
      h("h3", {}, "KV cache"),
      h("p", { class: "figure" }, `${share(now).toFixed(1)} %`, h("small", {}, ` of ${(bytes / 2 ** 30).toFixed(1)} GiB`)),
      lineChart(points, {
        width: inner(this.parts.memory),
        window: WINDOW_S,
        limit: null,
        unit: "%",
        label: "Use of the KV cache in the last minute",
        area: true,
      }),
      h("p", { class: "legend" }, "Blocks that running sequences use. Others keep cached prefixes until they are needed."),
    );
  }

  /** @param {Activity} now */
  drawRequests(now) {
    const sequences = now.models.flatMap((model) => model.sequences.map((sequence) => ({ ...sequence, model: model.model })));
    this.parts.requests.replaceChildren(
      h("h3", {}, "Requests"),
      timeline(sequences, now.time, inner(this.parts.requests), WINDOW_S),
      h(
        "p",
        { class: "legend" },
        h("i", { class: "wait" }), " waiting ",
        h("i", { class: "prompt" }), " computing the prompt ",
        h("i", { class: "output" }), " generating ",
        h("i", { class: "bad" }), " ended by the client or an error",
      ),
    );
  }

  /**
   * Returns a value for each pair of consecutive samples; x is in seconds before now.
   * @param {(from: Activity, to: Activity) => number} value
   */
  series(value) {
    const now = this.past[this.past.length - 1].time;
    return this.past.slice(1).map((to, i) => ({ at: to.time - now, value: value(this.past[i], to) }));
  }
}

/**
 * Returns the inner width of a panel in pixels.
 * @param {HTMLElement} panel
 */
function inner(panel) {
  const { paddingLeft, paddingRight } = getComputedStyle(panel);
  return Math.max(200, panel.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight));
}

/**
 * @param {Activity} activity
 * @param {(model: ModelActivity) => number} value
 */
const total = (activity, value) => activity.models.reduce((sum, model) => sum + value(model), 0);

/** @param {Activity} activity */
const outputTokens = (activity) => total(activity, (model) => model.output_tokens);

/**
 * @param {CpuTimes} now
 * @param {CpuTimes | undefined} before
 */
function busyShare(now, before) {
  if (!before) return 0;
  const busy = now.busy_s - before.busy_s;
  const all = busy + now.idle_s - before.idle_s;
  return all > 0 ? Math.min(1, Math.max(0, busy / all)) : 0;
}

/**
 * Returns the numbers of a list such as "0-3,8".
 * @param {string} text
 * @returns {number[]}
 */
export function cpuList(text) {
  return text.split(",").filter(Boolean).flatMap((part) => {
    const [first, last = first] = part.split("-").map(Number);
    return Array.from({ length: last - first + 1 }, (_, i) => first + i);
  });
}

/**
 * @param {number} cpu
 * @param {number} busy
 * @param {number | undefined} thread
 * @param {boolean} frontEnd
 */
function core(cpu, busy, thread, frontEnd) {
  const percent = Math.round(100 * busy);
  const role = thread !== undefined ? `t${thread}` : frontEnd ? "f" : "";
  const words = thread !== undefined ? `compute thread ${thread}` : frontEnd ? "front end" : "no thread of this server";
  const kind = thread !== undefined ? "compute" : frontEnd ? "front" : "other";
  return svg(
    "svg",
    { class: `core ${kind}`, viewBox: "0 0 44 44", role: "img", "aria-label": `CPU ${cpu}: ${percent} % busy, ${words}` },
    svg("title", {}, `CPU ${cpu}: ${percent} % busy, ${words}`),
    svg("rect", { class: "case", x: 1, y: 1, width: 42, height: 42, rx: 7 }),
    svg("rect", { class: "fill", x: 3, y: 41 - 38 * busy, width: 38, height: 38 * busy, rx: 4 }),
    svg("text", { class: "number", x: 22, y: 20 }, String(cpu)),
    svg("text", { class: "role", x: 22, y: 35 }, role),
  );
}

/**
 * @param {string} label
 * @param {string} value
 * @param {string} unit
 */
function tile(label, value, unit) {
  return h("div", { class: "tile" }, h("span", { class: "label" }, label), h("strong", {}, value), h("small", {}, unit));
}

/** @param {number} value */
const short = (value) => (value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));

/**
 * Returns the limits of the decode rate as text, with a mark where arithmetic becomes the limit.
 * @param {{requests: number, tokens_per_s: number, by: string}[]} limits
 */
function toldLimits(limits) {
  const first = limits.find((limit) => limit.by === "arithmetic");
  const texts = limits.map((limit) => {
    const who = limit.requests === 1 ? "one request" : `${limit.requests} requests`;
    const mark = limit === first ? " (by arithmetic from here on)" : "";
    return `${Math.round(limit.tokens_per_s)} for ${who}${mark}`;
  });
  return texts.length ? `Tokens a second together, at most: ${texts.join(", ")}.` : "";
}
