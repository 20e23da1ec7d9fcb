/** Drawings in SVG: a line over time, and a timeline of requests. */

import { svg } from "./dom.js";

const HEIGHT = 150;
const LEFT = 44;
const BOTTOM = 20;

/**
 * @typedef {{at: number, value: number}} Point at: seconds before now, negative
 * @typedef {{
 *   width: number, window: number, limit: number | null, unit: string, label: string, area?: boolean,
 * }} ChartOptions width: pixels, so that texts have their own size
 */

/**
 * Returns a chart of values in the last `window` seconds.
 * @param {Point[]} points
 * @param {ChartOptions} options limit: a value that gets a dashed line
 */
export function lineChart(points, { width, window, limit, unit, label, area = false }) {
  const most = niceMaximum(Math.max(limit ?? 0, ...points.map((point) => point.value), 1));
  const x = (/** @type {number} */ at) => LEFT + ((width - LEFT) * (at + window)) / window;
  const y = (/** @type {number} */ value) => 6 + (HEIGHT - BOTTOM - 6) * (1 - value / most);
  const inside = points.filter((point) => point.at >= -window);
  const line = inside.map((point) => `${x(point.at).toFixed(1)},${y(point.value).toFixed(1)}`).join("L");
  const last = inside.at(-1);
  const close = last ? `L${x(last.at).toFixed(1)},${y(0)}L${x(inside[0].at).toFixed(1)},${y(0)}Z` : "";
  const ticks = [0, most / 2, most].map((value) => [
    svg("line", { class: "grid", x1: LEFT, x2: width, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, tickText(value)),
  ]);
  const summary = `${label}: now ${(last?.value ?? 0).toFixed(1)} ${unit}`;
  return svg(
    "svg",
    { class: "chart", viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": summary },
    ...ticks.flat(),
    ...timeTicks(window, x, HEIGHT),
    line && svg("path", { class: area ? "area strong" : "area", d: `M${line}${close}` }),
    line && svg("path", { class: "curve", d: `M${line}` }),
    limit !== null && svg("line", { class: "limit", x1: LEFT, x2: width, y1: y(limit), y2: y(limit) }),
  );
}

/**
 * @param {number} window
 * @param {(at: number) => number} x
 * @param {number} height
 */
function timeTicks(window, x, height) {
  return [-window, -window / 2, 0].map((at) => {
    const anchor = at === 0 ? "end" : at === -window ? "start" : "middle";
    const text = at === 0 ? "now" : `${-at} s ago`;
    return svg("text", { class: "tick", x: x(at), y: height - 5, "text-anchor": anchor }, text);
  });
}

/** @param {number} value */
function niceMaximum(value) {
  const scale = 10 ** Math.floor(Math.log10(value));
  const step = [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((factor) => factor * scale >= value * 1.05) ?? 10;
  return step * scale;
}

/** @param {number} value */
const tickText = (value) => (value >= 10 || value === 0 ? String(Math.round(value)) : value.toPrecision(2));

// The width of one character of a label in pixels.
const CHARACTER = 6.2;
const ROW = 22;
const MOST_ROWS = 12;

/** @typedef {import("./machine.js").SequenceActivity & {model: string}} Sequence */

/**
 * Returns a drawing with a bar for each sequence of the last `window` seconds.
 * @param {Sequence[]} sequences
 * @param {number} now
 * @param {number} width pixels
 * @param {number} window
 */
export function timeline(sequences, now, width, window) {
  const recent = sequences.filter((s) => (s.ended_s ?? now) > now - window);
  const { rows, hidden } = inRows(recent, now);
  const height = Math.max(3, rows.length) * ROW + BOTTOM + 4;
  const x = (/** @type {number} */ at) => (width * (Math.max(at, now - window) - (now - window))) / window;
  const bars = rows.flatMap((row, i) => row.map((sequence) => bar(sequence, now, 4 + i * ROW, x)));
  const empty = !recent.length && svg("text", { class: "tick", x: width / 2, y: 40, "text-anchor": "middle" }, "No requests in the last minute");
  const label = `${recent.length} sequences in the last minute`;
  return svg(
    "svg",
    { class: "chart timeline", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    ...bars,
    empty,
    hidden > 0 && svg("text", { class: "tick", x: width / 2, y: height - 5, "text-anchor": "middle" }, `and ${hidden} more`),
    ...timeTicks(window, (at) => x(now + at), height),
  );
}

/**
 * Assigns sequences to rows so that sequences in one row do not overlap; a sequence keeps its row while it
 * runs, because older sequences are placed first.
 * @param {Sequence[]} sequences
 * @param {number} now
 */
function inRows(sequences, now) {
  /** @type {Sequence[][]} */
  const rows = [];
  let hidden = 0;
  for (const sequence of [...sequences].sort((a, b) => a.arrived_s - b.arrived_s)) {
    const free = rows.find((row) => (row.at(-1)?.ended_s ?? now + 1) < sequence.arrived_s);
    if (free) free.push(sequence);
    else if (rows.length < MOST_ROWS) rows.push([sequence]);
    else hidden += 1;
  }
  return { rows, hidden };
}

/**
 * @param {Sequence} sequence
 * @param {number} now
 * @param {number} top
 * @param {(at: number) => number} x
 */
function bar(sequence, now, top, x) {
  const end = sequence.ended_s ?? now;
  const scheduled = sequence.scheduled_s ?? end;
  const first = sequence.first_s ?? end;
  const bad = ["abort", "error"].includes(sequence.state) ? " bad" : "";
  const part = (/** @type {string} */ kind, /** @type {number} */ from, /** @type {number} */ to) =>
    x(to) > x(from) && svg("rect", { class: kind + bad, x: x(from), y: top, width: x(to) - x(from), height: ROW - 6, rx: 3 });
  const words =
    `Request ${sequence.number} of ${sequence.model}: ${sequence.state}, prompt ${sequence.prompt_tokens} tokens ` +
    `(${sequence.cached_tokens} from the cache), ${sequence.output_tokens} generated, ${(end - sequence.arrived_s).toFixed(1)} s`;
  const label = `${sequence.output_tokens} tokens`;
  const fits = x(end) - x(first) > CHARACTER * label.length + 12;
  const text = fits && svg("text", { x: x(first) + 6, y: top + 12 }, label);
  return svg(
    "g",
    { class: "bar" },
    svg("title", {}, words),
    part("wait", sequence.arrived_s, scheduled),
    part("prompt", scheduled, first),
    part("output", first, end),
    text,
  );
}
