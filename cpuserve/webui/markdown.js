/**
 * Markdown to DOM nodes: the parts of GitHub's dialect that models write, and formulas.
 *
 * The text never becomes HTML, and pictures become links, so that no response can make the browser
 * send a request.
 */

import { h } from "./dom.js";
import { endOfDetails, entity, isDetails, partsOfDetails, tagged } from "./markdown_html.js";
import { highlight } from "./highlight.js";
import { formula } from "./math.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const QUOTE = /^ {0,3}> ?/;
const INDENTED = /^ {4,}\S/;
const FOOTNOTE = /^ {0,3}\[\^([\w-]{1,40})\]:\s*/;
const ENVIRONMENT = /^\s*\\begin\{((?:align|equation|gather|multline|eqnarray)\*?)\}/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
// A longer run of text without a blank line is shown as it is, because the search for the other end
// of a mark takes a time that grows with the square of the length.
const LONGEST_INLINE = 20_000;
const DEEPEST = 12;

/**
 * Updates `into` so that it shows `text`. Blocks that have not changed keep their nodes, so that a
 * stream costs the time of its last block, and a selection stays.
 * @param {HTMLElement} into
 * @param {string} text
 */
export function showMarkdown(into, text) {
  const sources = splitBlocks(text);
  const nodes = /** @type {(HTMLElement & {source?: string})[]} */ ([...into.children]);
  let same = 0;
  while (same < sources.length && nodes[same]?.source === sources[same]) same += 1;
  for (const node of nodes.slice(same)) node.remove();
  for (const source of sources.slice(same)) {
    const node = /** @type {HTMLElement & {source?: string}} */ (block(source, 0));
    node.source = source;
    // Each block has the direction of its first letters: Arabic and Hebrew begin at the right.
    node.dir = "auto";
    into.append(node);
  }
}

/**
 * Returns the source text of each Markdown block.
 * @param {string} text
 * @returns {string[]}
 */
export function splitBlocks(text) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  /** @type {string[]} */
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = endOfBlock(lines, at);
    blocks.push(lines.slice(at, end).join("\n"));
    at = end;
  }
  return blocks;
}

/**
 * Returns the number of the line after the block that begins at line `begin`.
 * @param {string[]} lines
 * @param {number} begin
 */
function endOfBlock(lines, begin) {
  const first = lines[begin];
  const fence = FENCE.exec(first);
  if (fence) return endOfFence(lines, begin, fence[1]);
  const math = mathOpening(first);
  if (math) return endOfMath(lines, begin, math);
  if (HEADING.test(first) || RULE.test(first)) return begin + 1;
  if (isDetails(first)) return endOfDetails(lines, begin);
  let end = begin + 1;
  if (INDENTED.test(first)) {
    for (let at = end; at < lines.length && (/^ {4}/.test(lines[at]) || !lines[at].trim()); at += 1) {
      if (lines[at].trim()) end = at + 1;
    }
    return end;
  }
  if (QUOTE.test(first)) {
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    return end;
  }
  if (ITEM.test(first)) return endOfList(lines, begin);
  if (isTable(lines, begin)) {
    while (end < lines.length && lines[end].includes("|")) end += 1;
    return end;
  }
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end += 1;
  return end;
}

/**
 * Whether the line begins a block even if it follows a paragraph without a blank line.
 * @param {string[]} lines
 * @param {number} at
 */
function interrupts(lines, at) {
  const line = lines[at];
  const begins = FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line);
  const item = ITEM.exec(line);
  // Only a list that begins with 1 may interrupt a paragraph, because a line may begin with a year.
  const list = item !== null && (!/\d/.test(item[2]) || Number.parseInt(item[2], 10) === 1);
  const other = isDetails(line) || FOOTNOTE.test(line) || mathOpening(line) !== null;
  return begins || list || other || isTable(lines, at);
}

/**
 * @param {string[]} lines
 * @param {number} begin
 * @param {string} mark
 */
function endOfFence(lines, begin, mark) {
  const closes = new RegExp(`^ {0,3}\\${mark[0]}{${mark.length},} *$`);
  let end = begin + 1;
  while (end < lines.length && !closes.test(lines[end])) end += 1;
  return Math.min(end + 1, lines.length);
}

/** @param {string} line */
function mathOpening(line) {
  const start = line.trimStart();
  if (start.startsWith("$$")) return "$$";
  if (start.startsWith("\\[")) return "\\]";
  const environment = ENVIRONMENT.exec(line);
  return environment && `\\end{${environment[1]}}`;
}

/**
 * @param {string[]} lines
 * @param {number} begin
 * @param {string} closing
 */
function endOfMath(lines, begin, closing) {
  if (closing.length > 2) {
    const last = lines.findIndex((line, i) => i >= begin && line.includes(closing));
    return last < 0 ? lines.length : last + 1;
  }
  if (lines[begin].trim().length > 2 && lines[begin].trim().slice(2).includes(closing)) {
    return begin + 1;
  }
  let end = begin + 1;
  while (end < lines.length && !lines[end].includes(closing)) end += 1;
  return Math.min(end + 1, lines.length);
}

/**
 * @param {string[]} lines
 * @param {number} begin
 */
function endOfList(lines, begin) {
  const ordered = isOrdered(lines[begin]);
  let end = begin + 1;
  for (let at = end; at < lines.length; at += 1) {
    const line = lines[at];
    if (!line.trim()) continue;
    const indented = /^ {2,}/.test(line);
    const item = ITEM.test(line) && !RULE.test(line) && isOrdered(line) === ordered;
    const lazy = at === end && !interrupts(lines, at) && lines[at - 1].trim() !== "";
    if (!indented && !item && !lazy) break;
    end = at + 1;
  }
  return end;
}

/** @param {string} line */
const isOrdered = (line) => /^ *\d/.test(line);

/**
 * @param {string[]} lines
 * @param {number} at
 */
function isTable(lines, at) {
  const rule = lines[at + 1];
  return lines[at].includes("|") && rule !== undefined && rule.includes("-") && TABLE_RULE.test(rule);
}

/**
 * Returns the element of a block.
 * @param {string} source
 * @param {number} depth
 * @returns {HTMLElement}
 */
function block(source, depth) {
  const lines = source.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) return codeBlock(lines, fence);
  const math = mathOpening(lines[0]);
  if (math) return mathBlock(source, math);
  const heading = HEADING.exec(lines[0]);
  if (heading) {
    // Headings of the page itself use the first two levels.
    return h(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2]));
  }
  if (RULE.test(source)) return h("hr");
  if (depth < DEEPEST && isDetails(source)) return details(source, depth);
  if (INDENTED.test(lines[0])) return codeBlock(["", ...lines.map((line) => line.slice(4))], null);
  const footnote = FOOTNOTE.exec(source);
  if (footnote) {
    return h("p", { class: "footnote" }, h("sup", {}, footnote[1]), " ", ...inline(source.slice(footnote[0].length)));
  }
  if (depth < DEEPEST && QUOTE.test(source)) {
    const inner = lines.map((line) => line.replace(QUOTE, "")).join("\n");
    return h("blockquote", {}, ...splitBlocks(inner).map((text) => block(text, depth + 1)));
  }
  if (depth < DEEPEST && ITEM.test(source)) return list(lines, depth);
  if (isTable(lines, 0)) return table(lines);
  return h("p", {}, ...inline(source));
}

/**
 * @param {string[]} lines the first one is a fence
 * @param {RegExpExecArray | null} fence
 */
function codeBlock(lines, fence) {
  const language = fence?.[2] ?? "";
  const last = fence && lines.length > 1 && lines.at(-1)?.trim().startsWith(fence[1]) ? -1 : undefined;
  const code = lines.slice(1, last).join("\n");
  const copy = h("button", { type: "button", class: "copy", "data-copy": code }, "Copy");
  return h(
    "figure",
    { class: "code" },
    h("figcaption", {}, h("span", {}, language || "text"), copy),
    // tabindex lets the keyboard scroll a long line.
    h("pre", { tabindex: "0" }, h("code", {}, ...highlight(code, language))),
  );
}

/**
 * @param {string} source
 * @param {string} closing
 */
function mathBlock(source, closing) {
  if (closing.length > 2) return h("div", { class: "formula" }, formula(source.trim(), true));
  const text = source.trim().slice(2);
  const end = text.lastIndexOf(closing);
  const rest = end < 0 ? "" : text.slice(end + 2).trim();
  const shown = h("div", { class: "formula" }, formula(end < 0 ? text : text.slice(0, end), true));
  return rest ? h("div", {}, shown, h("p", {}, ...inline(rest))) : shown;
}

/**
 * @param {string} source
 * @param {number} depth
 */
function details(source, depth) {
  const { summary, text, open } = partsOfDetails(source);
  const inner = splitBlocks(text).map((one) => block(one, depth + 1));
  return h("details", { open }, h("summary", {}, ...inline(summary || "Details")), ...inner);
}

/**
 * @param {string[]} lines
 * @param {number} depth
 */
function list(lines, depth) {
  const ordered = isOrdered(lines[0]);
  /** @type {string[][]} */
  const items = [];
  let indent = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && isOrdered(line) === ordered && (items.length === 0 || item[1].length < indent)) {
      indent = item[0].trimEnd().length + 1;
      items.push([line.slice(item[0].length)]);
    } else {
      const spaces = /^ */.exec(line)?.[0].length ?? 0;
      items.at(-1)?.push(line.slice(Math.min(spaces, indent)));
    }
  }
  const start = ordered ? Number.parseInt(lines[0].trim(), 10) : 1;
  // As in Markdown, a blank line between items makes each item a paragraph.
  const between = items.slice(0, -1).concat([items.at(-1)?.slice(0, -1) ?? []]);
  const loose = between.some((item) => item.some((line) => !line.trim()));
  const elements = items.map((item) => listItem(item.join("\n"), loose, depth));
  return h(ordered ? "ol" : "ul", { start: start === 1 ? null : start }, ...elements);
}

/**
 * @param {string} source
 * @param {boolean} loose
 * @param {number} depth
 */
function listItem(source, loose, depth) {
  const task = /^\[([ xX])\]\s+/.exec(source);
  const text = task ? source.slice(task[0].length) : source;
  const children = splitBlocks(text).flatMap((inner) => {
    const element = block(inner, depth + 1);
    return !loose && element.tagName === "P" ? [...element.childNodes] : [element];
  });
  if (!task) return h("li", {}, ...children);
  const done = task[1] !== " ";
  const box = h("input", { type: "checkbox", disabled: true, checked: done, "aria-label": "Done" });
  return h("li", { class: "task" }, box, " ", ...children);
}

/** @param {string[]} lines */
function table(lines) {
  const aligned = cells(lines[1]).map(alignment);
  const row = (/** @type {string} */ line, /** @type {string} */ tag) =>
    h("tr", {}, ...cells(line).map((c, i) => h(tag, { class: aligned[i] }, ...inline(c))));
  const head = h("thead", {}, row(lines[0], "th"));
  const body = h("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return h("div", { class: "table", tabindex: "0" }, h("table", {}, head, body));
}

/** @param {string} line */
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** @param {string} rule */
function alignment(rule) {
  if (rule.endsWith(":")) return rule.startsWith(":") ? "center" : "right";
  return null;
}

/**
 * Returns the nodes of text inside of a block.
 * @param {string} text
 * @returns {(Node | string)[]}
 */
export function inline(text, depth = 0) {
  if (text.length > LONGEST_INLINE || depth > DEEPEST) return [text];
  /** @type {(Node | string)[]} */
  const nodes = [];
  let plain = "";
  let at = 0;
  while (at < text.length) {
    const found = MARKS[text[at]]?.(text, at, depth);
    if (!found) {
      plain += text[at];
      at += 1;
      continue;
    }
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(found.node);
    at = found.end;
  }
  if (plain) nodes.push(plain);
  return nodes;
}

/**
 * @typedef {{node: Node | string, end: number} | null} Found
 * @typedef {(text: string, at: number, depth: number) => Found} Mark
 */

/** @type {Record<string, Mark>} */
const MARKS = {
  "`": codeSpan,
  "\\": escape,
  $: dollars,
  "*": emphasis,
  _: emphasis,
  "~": strike,
  "[": link,
  "!": (text, at, depth) => (text[at + 1] === "[" ? link(text, at + 1, depth) : null),
  "<": (text, at, depth) => angle(text, at, depth) ?? tagged(text, at, (inner) => inline(inner, depth + 1)),
  "&": entity,
  h: bareLink,
  "\n": (text, at) => ({ node: / {2}$/.test(text.slice(0, at)) ? h("br") : "\n", end: at + 1 }),
};

/** @type {Mark} */
function codeSpan(text, at) {
  const mark = /^`+/.exec(text.slice(at))?.[0] ?? "`";
  let end = text.indexOf(mark, at + mark.length);
  while (end >= 0 && text[end + mark.length] === "`") {
    end = text.indexOf(mark, end + mark.length + 1);
  }
  if (end < 0) return { node: mark, end: at + mark.length };
  const code = text.slice(at + mark.length, end).replaceAll("\n", " ");
  const padded = code.length > 2 && code.startsWith(" ") && code.endsWith(" ");
  return { node: h("code", {}, padded ? code.slice(1, -1) : code), end: end + mark.length };
}

/** @type {Mark} */
function escape(text, at) {
  const next = text[at + 1];
  if (next === "(" || next === "[") {
    const end = text.indexOf(next === "(" ? "\\)" : "\\]", at + 2);
    if (end < 0) return null;
    return { node: formula(text.slice(at + 2, end), next === "["), end: end + 2 };
  }
  if (next === "\n") return { node: h("br"), end: at + 2 };
  return /[!-/:-@[-`{-~]/.test(next ?? "") ? { node: next, end: at + 2 } : null;
}

/** @type {Mark} */
function dollars(text, at) {
  if (text[at + 1] === "$") {
    const end = closingDollars(text, "$$", at + 2);
    return end < 0 ? null : { node: formula(text.slice(at + 2, end), true), end: end + 2 };
  }
  // As in Pandoc, prices are no formulas: no space after "$" or before the last "$", and no digit after it.
  const end = closingDollars(text, "$", at + 1);
  const inner = text.slice(at + 1, end);
  if (end < 0 || !inner.trim() || /^\s|\s$|\n\n/.test(inner)) return null;
  return /\d/.test(text[end + 1] ?? "") ? null : { node: formula(inner, false), end: end + 1 };
}

/**
 * Returns the index of the next dollars that no backslash escapes, or -1.
 * @param {string} text
 * @param {string} dollars
 * @param {number} begin
 */
function closingDollars(text, dollars, begin) {
  let end = text.indexOf(dollars, begin);
  // Two backslashes begin a line of the formula.
  while (text[end - 1] === "\\" && text[end - 2] !== "\\") end = text.indexOf(dollars, end + 1);
  return end;
}

/** @type {Mark} */
function emphasis(text, at, depth) {
  const mark = text[at];
  const run = new RegExp(`^\\${mark}+`).exec(text.slice(at))?.[0].length ?? 1;
  const length = Math.min(run, 3);
  const inWord = mark === "_" && /[\p{L}\p{N}]/u.test(text[at - 1] ?? "");
  if (inWord || /^(\s|$)/.test(text.slice(at + length, at + length + 1))) {
    return { node: mark.repeat(run), end: at + run };
  }
  const closing = mark.repeat(length);
  let end = text.indexOf(closing, at + length + 1);
  while (end >= 0 && !closes(text, end, length)) end = text.indexOf(closing, end + 1);
  if (end < 0) return { node: mark.repeat(run), end: at + run };
  const inner = inline(text.slice(at + length, end), depth + 1);
  const strong = length > 1 ? h("strong", {}, ...inner) : h("em", {}, ...inner);
  return { node: length === 3 ? h("em", {}, strong) : strong, end: end + length };
}

/**
 * Returns whether a mark of this length at `end` closes an emphasis.
 * @param {string} text
 * @param {number} end
 * @param {number} length
 */
function closes(text, end, length) {
  const mark = text[end];
  if (/\s/.test(text[end - 1]) || text[end - 1] === "\\") return false;
  if (mark === "_" && /[\p{L}\p{N}]/u.test(text[end + length] ?? "")) return false;
  // A single mark next to another one is a part of a ** mark.
  return length > 1 || (text[end + 1] !== mark && text[end - 1] !== mark);
}

/** @type {Mark} */
function strike(text, at, depth) {
  const end = text.startsWith("~~", at) ? text.indexOf("~~", at + 2) : -1;
  if (end < 0) return null;
  return { node: h("del", {}, ...inline(text.slice(at + 2, end), depth + 1)), end: end + 2 };
}

/** @type {Mark} */
function link(text, at, depth) {
  const footnote = /^\[\^([\w-]{1,40})\](?!:)/.exec(text.slice(at, at + 50));
  if (footnote) return { node: h("sup", {}, footnote[1]), end: at + footnote[0].length };
  const close = closingBracket(text, at);
  if (close < 0 || text[close + 1] !== "(") return null;
  const target = /^\(\s*<?([^\s<>()]*(?:\([^\s()]*\)[^\s()]*)*)>?(?:\s+["'(][^)]*)?\s*\)/.exec(
    text.slice(close + 1, close + 2001),
  );
  if (!target) return null;
  const label = text.slice(at + 1, close);
  const shown = label ? inline(label, depth + 1) : [target[1]];
  return { node: anchor(target[1], shown), end: close + 1 + target[0].length };
}

/**
 * @param {string} text
 * @param {number} at
 */
function closingBracket(text, at) {
  let open = 0;
  for (let i = at; i < text.length; i += 1) {
    if (text[i] === "\\") i += 1;
    else if (text[i] === "[") open += 1;
    else if (text[i] === "]" && --open === 0) return i;
  }
  return -1;
}

/** @type {Mark} */
function angle(text, at) {
  const rest = text.slice(at, at + 2000);
  const breaks = /^<br\s*\/?>/i.exec(rest);
  if (breaks) return { node: h("br"), end: at + breaks[0].length };
  const auto = /^<((?:https?:\/\/|mailto:)[^\s<>]*)>/.exec(rest);
  return auto ? { node: anchor(auto[1], [auto[1]]), end: at + auto[0].length } : null;
}

/** @type {Mark} */
function bareLink(text, at) {
  if (/[\p{L}\p{N}]/u.test(text[at - 1] ?? "")) return null;
  const found = /^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,:;!?)\]*_~]/.exec(text.slice(at, at + 2000));
  return found ? { node: anchor(found[0], [found[0]]), end: at + found[0].length } : null;
}

/**
 * Returns a link, or only its text if the scheme may run code.
 * @param {string} url
 * @param {(Node | string)[]} shown
 */
function anchor(url, shown) {
  if (!/^(https?:|mailto:)/i.test(url)) return h("span", {}, ...shown);
  return h("a", { href: url, target: "_blank", rel: "noreferrer noopener" }, ...shown);
}
