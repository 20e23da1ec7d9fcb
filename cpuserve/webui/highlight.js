/** Colors code: comments, strings, numbers and keywords, with one set of rules for all languages. */

import { h } from "./dom.js";

const HASH = new Set(
  "bash sh shell zsh python py ruby rb perl r yaml yml toml dockerfile makefile cmake ini conf".split(" "),
);
const DASHES = new Set("sql lua haskell hs ada vhdl".split(" "));
const PLAIN = new Set(["", "text", "txt", "plain", "output", "console", "markdown", "md", "diff"]);
const MARKUP = new Set(["html", "xml", "svg", "vue"]);
// Longer code is not colored, because each token would become an element of the page.
const LONGEST = 60_000;

const WORDS = new Set(
  (
    "abstract and as assert async await auto bool boolean break case catch char class const " +
    "constexpr continue def default defer del delete do double elif else elsif end enum except " +
    "export extends extern false False final finally float fn for foreach from func function go " +
    "goto if impl implements import in include instanceof int interface is lambda let long loop " +
    "match mod module mut namespace new nil None not null nullptr of operator or override package " +
    "pass private protected pub public raise return self short signed sizeof static str string " +
    "struct super switch template then this throw throws trait true True try type typedef typename " +
    "typeof undefined union unsafe unsigned use using var virtual void volatile when where while " +
    "with yield echo fi done esac local select insert update create table join group order by into " +
    "values set SELECT FROM WHERE INSERT UPDATE DELETE CREATE TABLE JOIN LEFT GROUP ORDER BY INTO " +
    "VALUES SET AND OR NOT NULL AS ON LIMIT"
  ).split(" "),
);

/**
 * Returns the nodes of a piece of code.
 * @param {string} code
 * @param {string} language the word after the fence
 * @returns {(Node | string)[]}
 */
export function highlight(code, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name) || code.length > LONGEST) return [code];
  const tokens = MARKUP.has(name) ? MARKUP_TOKENS : tokensOf(name);
  /** @type {(Node | string)[]} */
  const nodes = [];
  let end = 0;
  for (const found of code.matchAll(tokens)) {
    const kind = kindOf(found);
    if (!kind) continue;
    if (found.index > end) nodes.push(code.slice(end, found.index));
    nodes.push(h("span", { class: kind }, found[0]));
    end = found.index + found[0].length;
  }
  nodes.push(code.slice(end));
  return nodes;
}

const STRING = `"(?:\\\\.|[^"\\\\\\n])*"?|'(?:\\\\.|[^'\\\\\\n])*'?`;
const NUMBER = "\\b0[xX][\\da-fA-F_]+\\b|\\b\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?\\w{0,3}\\b";
const MARKUP_TOKENS =
  /(?<comment><!--[\s\S]*?(?:-->|$))|(?<string>"[^"]*"|'[^'\n]*')|(?<keyword><\/?[\w:-]+|\/?>)/g;

/** @param {string} name */
function tokensOf(name) {
  let comment = "/\\*[\\s\\S]*?(?:\\*/|$)|//[^\\n]*";
  if (HASH.has(name)) comment = "#[^\\n]*";
  if (DASHES.has(name)) comment = "--[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)";
  const long = `"""[\\s\\S]*?(?:"""|$)|'''[\\s\\S]*?(?:'''|$)|\`(?:\\\\.|[^\`\\\\])*\`?`;
  return new RegExp(
    `(?<comment>${comment})|(?<string>${long}|${STRING})|(?<number>${NUMBER})|(?<call>[A-Za-z_$][\\w$]*(?=\\())|(?<word>[A-Za-z_$][\\w$]*)`,
    "g",
  );
}

/** @param {RegExpMatchArray} found */
function kindOf(found) {
  const groups = found.groups ?? {};
  const word = groups.call ?? groups.word;
  if (word !== undefined) {
    if (WORDS.has(word)) return "keyword";
    return groups.call === undefined ? null : "function";
  }
  return ["comment", "string", "number", "keyword"].find((kind) => groups[kind] !== undefined);
}
