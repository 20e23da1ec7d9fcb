/**
 * Converts formulas from the LaTeX that models write to MathML, which browsers draw.
 *
 * The name of an unknown command is shown as text, so that no part of a formula disappears.
 */

import { mathml as m } from "./dom.js";

const LONGEST = 10_000;
const DEEPEST = 40;

/**
 * Returns the element of a formula.
 * @param {string} tex without its dollars or brackets
 * @param {boolean} display whether it stands on a line of its own
 * @returns {Element}
 */
export function formula(tex, display) {
  const attributes = display ? { display: "block" } : {};
  if (tex.length > LONGEST) return m("math", attributes, m("mtext", {}, tex));
  const row = new Parser(tex).row(() => false);
  return m("math", { ...attributes, "aria-label": tex.trim() }, ...row);
}

/** @param {string} text */
const map = (text) => {
  /** @type {Record<string, string>} */
  const table = {};
  const words = text.split(/\s+/);
  for (let i = 0; i < words.length; i += 2) table[words[i]] = words[i + 1];
  return table;
};

// As in LaTeX, small Greek letters are italic and capital ones are upright.
const SMALL_GREEK = map(
  "alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι " +
    "kappa κ lambda λ mu μ nu ν xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς " +
    "tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω",
);

const LETTERS = map(
  "Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω hbar ℏ ell ℓ Re ℜ Im ℑ aleph ℵ infty ∞ " +
    "emptyset ∅ varnothing ∅ partial ∂ nabla ∇ imath ı jmath ȷ wp ℘ top ⊤ bot ⊥ angle ∠ " +
    "degree ° prime ′ ldots … dots … cdots ⋯ vdots ⋮ ddots ⋱ dotsc … dotsb ⋯ square □ checkmark ✓",
);

const OPERATORS = map(
  "times × div ÷ cdot ⋅ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet • oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ " +
    "leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ equiv ≡ approx ≈ sim ∼ simeq ≃ cong ≅ propto ∝ ll ≪ gg ≫ " +
    "doteq ≐ prec ≺ succ ≻ preceq ⪯ succeq ⪰ leqslant ⩽ geqslant ⩾ " +
    "in ∈ notin ∉ ni ∋ subset ⊂ supset ⊃ subseteq ⊆ supseteq ⊇ subsetneq ⊊ cup ∪ cap ∩ setminus ∖ " +
    "land ∧ wedge ∧ lor ∨ vee ∨ neg ¬ lnot ¬ forall ∀ exists ∃ nexists ∄ vdash ⊢ models ⊨ " +
    "to → rightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ " +
    "Leftrightarrow ⇔ implies ⟹ impliedby ⟸ iff ⟺ mapsto ↦ longrightarrow ⟶ longleftarrow ⟵ " +
    "Longrightarrow ⟹ uparrow ↑ downarrow ↓ hookrightarrow ↪ rightharpoonup ⇀ rightleftharpoons ⇌ " +
    "mid ∣ nmid ∤ parallel ∥ perp ⊥ colon : therefore ∴ because ∵ triangle △ lt < gt >",
);

// Operators with limits above and below them in display formulas.
const LARGE = map(
  "sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀",
);
const INTEGRALS = map("int ∫ iint ∬ iiint ∭ oint ∮");
const LIMITS = new Set(
  "lim max min sup inf limsup liminf argmax argmin det gcd Pr".split(" "),
);
const FUNCTIONS = new Set(
  (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp deg dim ker " +
    "hom arg mod"
  ).split(" "),
);
const ACCENTS = map(
  "hat ^ widehat ^ bar ‾ overline ‾ vec → overrightarrow → dot ˙ ddot ¨ tilde ~ widetilde ~ " +
    "check ˇ breve ˘ acute ´ grave ` overbrace ⏞",
);
const UNDERS = map("underline _ underbrace ⏟");
const FENCES = map(
  "langle ⟨ rangle ⟩ lceil ⌈ rceil ⌉ lfloor ⌊ rfloor ⌋ lbrace { rbrace } lbrack [ rbrack ] " +
    "vert | lvert | rvert | Vert ‖ lVert ‖ rVert ‖ { { } } | ‖",
);
const SPACES = map(", 0.17em : 0.22em > 0.22em ; 0.28em ! -0.17em quad 1em qquad 2em enspace 0.5em thinspace 0.17em");
const VARIANTS = map(
  "mathrm normal mathbf bold boldsymbol bold-italic bm bold-italic mathit italic mathbb double-struck mathcal script " +
    "mathscr script mathfrak fraktur mathsf sans-serif mathtt monospace operatorname normal",
);
const TEXTS = new Set("text textrm textbf textit texttt textsf mbox textnormal".split(" "));
/** @type {Record<string, [string, string]>} */
const MATRICES = {
  matrix: ["", ""],
  smallmatrix: ["", ""],
  pmatrix: ["(", ")"],
  bmatrix: ["[", "]"],
  Bmatrix: ["{", "}"],
  vmatrix: ["|", "|"],
  Vmatrix: ["‖", "‖"],
  cases: ["{", ""],
};

// The code point of "A", "a" and "0" in each alphabet, and exceptions for letters that Unicode has
// elsewhere (Unicode 15, Mathematical Alphanumeric Symbols).
/** @type {Record<string, [number, number, number]>} */
const ALPHABETS = {
  bold: [0x1d400, 0x1d41a, 0x1d7ce],
  italic: [0x1d434, 0x1d44e, 0],
  "bold-italic": [0x1d468, 0x1d482, 0x1d7ce],
  script: [0x1d49c, 0x1d4b6, 0],
  fraktur: [0x1d504, 0x1d51e, 0],
  "double-struck": [0x1d538, 0x1d552, 0x1d7d8],
  "sans-serif": [0x1d5a0, 0x1d5ba, 0x1d7e2],
  monospace: [0x1d670, 0x1d68a, 0x1d7f6],
};
const ELSEWHERE = map(
  "script-B ℬ script-E ℰ script-F ℱ script-H ℋ script-I ℐ script-L ℒ script-M ℳ script-R ℛ " +
    "script-e ℯ script-g ℊ script-o ℴ fraktur-C ℭ fraktur-H ℌ fraktur-I ℑ fraktur-R ℜ fraktur-Z ℨ " +
    "double-struck-C ℂ double-struck-H ℍ double-struck-N ℕ double-struck-P ℙ double-struck-Q ℚ " +
    "double-struck-R ℝ double-struck-Z ℤ italic-h ℎ",
);

/**
 * Returns the text in an alphabet, such as "double-struck".
 * @param {string} text
 * @param {string} alphabet
 */
function inAlphabet(text, alphabet) {
  const starts = ALPHABETS[alphabet];
  if (!starts) return text;
  return [...text]
    .map((char) => {
      const other = ELSEWHERE[`${alphabet}-${char}`];
      if (other) return other;
      const bases = ["A", "a", "0"].map((base) => char.charCodeAt(0) - base.charCodeAt(0));
      const which = bases.findIndex((offset, i) => offset >= 0 && offset < (i < 2 ? 26 : 10));
      if (which < 0 || !starts[which]) return char;
      return String.fromCodePoint(starts[which] + bases[which]);
    })
    .join("");
}

/** A recursive descent parser of one formula; each method returns MathML. */
class Parser {
  /** @param {string} tex */
  constructor(tex) {
    this.tokens = tex.match(/\\[A-Za-z]+\*?|\\[\s\S]|\d+(?:\.\d+)?|\s+|[\s\S]/g) ?? [];
    this.at = 0;
    this.depth = 0;
    /** @type {string | undefined} the alphabet of the letters */
    this.alphabet = undefined;
  }

  /** Returns the next token that is no space, without consuming it. */
  peek() {
    while (this.at < this.tokens.length && /^\s+$/.test(this.tokens[this.at])) this.at += 1;
    return this.tokens[this.at];
  }

  next() {
    const token = this.peek();
    this.at += 1;
    return token;
  }

  /**
   * Returns the nodes up to the first token that `ends` accepts; this token is not consumed.
   * @param {(token: string) => boolean} ends
   * @returns {Element[]}
   */
  row(ends) {
    /** @type {Element[]} */
    const nodes = [];
    for (let token = this.peek(); token !== undefined && !ends(token); token = this.peek()) {
      const before = this.at;
      const node = this.scripted();
      if (node) nodes.push(node);
      if (this.at === before) this.at += 1;
    }
    return nodes;
  }

  /** Parses an atom with its superscripts, subscripts or limits. */
  scripted() {
    const large = /^\\([A-Za-z]+)$/.exec(this.peek() ?? "")?.[1] ?? "";
    const limits = large in LARGE || LIMITS.has(large) || large === "underbrace";
    let base = this.peek() === "^" || this.peek() === "_" ? m("mrow") : this.atom();
    if (!base) return null;
    /** @type {Element | null} */
    let above = null;
    /** @type {Element | null} */
    let below = null;
    let primes = "";
    for (let token = this.peek(); ; token = this.peek()) {
      if (token === "'") {
        primes += "′";
        this.at += 1;
      } else if (token === "^" || token === "_") {
        this.at += 1;
        const script = this.argument();
        if (token === "^") above = script;
        else below = script;
      } else if (token === "\\limits" || token === "\\nolimits") {
        this.at += 1;
      } else {
        break;
      }
    }
    if (primes) above = above ? m("mrow", {}, m("mo", {}, primes), above) : m("mo", {}, primes);
    if (above && below) return m(limits ? "munderover" : "msubsup", {}, base, below, above);
    if (above) base = m(limits ? "mover" : "msup", {}, base, above);
    if (below) base = m(limits ? "munder" : "msub", {}, base, below);
    return base;
  }

  /** Returns the argument of a command: a group, or one atom. */
  argument() {
    const token = this.peek();
    if (token === undefined) return m("mrow");
    if (/^\d/.test(token) && token.length > 1) {
      // x^10 raises to 1, as in LaTeX.
      this.tokens[this.at] = token.slice(1);
      return m("mn", {}, token[0]);
    }
    return this.atom() ?? m("mrow");
  }

  /** Returns the source text of a group in braces. */
  textArgument() {
    if (this.peek() !== "{") return this.next() ?? "";
    this.at += 1;
    let text = "";
    for (let open = 1; this.at < this.tokens.length; this.at += 1) {
      const token = this.tokens[this.at];
      if (token === "{") open += 1;
      if (token === "}" && --open === 0) break;
      text += token.startsWith("\\") && token.length === 2 ? token.slice(1) : token;
    }
    this.at += 1;
    return text;
  }

  /** @returns {Element | null} */
  atom() {
    const token = this.next();
    if (token === undefined) return null;
    if (this.depth > DEEPEST) return m("mtext", {}, token);
    this.depth += 1;
    try {
      return token.startsWith("\\") ? this.command(token.slice(1)) : this.character(token);
    } finally {
      this.depth -= 1;
    }
  }

  /** @param {string} token */
  character(token) {
    if (token === "{") {
      const row = this.row((next) => next === "}");
      this.at += 1;
      return m("mrow", {}, ...row);
    }
    if (token === "}" || token === "&") return null;
    if (token === "~") return m("mspace", { width: "0.3em" });
    if (/^\d/.test(token)) return m("mn", {}, inAlphabet(token, this.alphabet ?? ""));
    if (/^\p{L}/u.test(token)) return this.letters(token);
    const fence = "()[]|/".includes(token) ? { stretchy: "false" } : {};
    return m("mo", fence, token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  /** @param {string} letter */
  letters(letter) {
    if (this.alphabet === "normal") return m("mi", { mathvariant: "normal" }, letter);
    return m("mi", {}, this.alphabet ? inAlphabet(letter, this.alphabet) : letter);
  }

  /**
   * @param {string} name
   * @returns {Element | null}
   */
  command(name) {
    if (name in SMALL_GREEK) return m("mi", {}, SMALL_GREEK[name]);
    if (name in LETTERS) return m("mi", { mathvariant: "normal" }, LETTERS[name]);
    if (name in OPERATORS) return m("mo", {}, OPERATORS[name]);
    if (name in LARGE) return m("mo", { movablelimits: "true", largeop: "true" }, LARGE[name]);
    if (name in INTEGRALS) return m("mo", { largeop: "true" }, INTEGRALS[name]);
    if (LIMITS.has(name)) return m("mo", { movablelimits: "true" }, name);
    if (FUNCTIONS.has(name)) return m("mi", {}, name);
    if (name in SPACES) return m("mspace", { width: SPACES[name] });
    if (name in FENCES) return m("mo", { stretchy: "false" }, FENCES[name]);
    if (TEXTS.has(name)) return m("mtext", {}, this.textArgument().replace(/^ | $/g, "\u00a0"));
    if (name in VARIANTS) return this.variant(VARIANTS[name], name === "operatorname");
    if (name in ACCENTS) return this.accent(ACCENTS[name], name.startsWith("over"));
    if (name in UNDERS) return m("munder", {}, this.argument(), m("mo", {}, UNDERS[name]));
    return this.structure(name);
  }

  /**
   * @param {string} sign
   * @param {boolean} wide
   */
  accent(sign, wide) {
    const stretchy = wide || sign === "‾" ? "true" : "false";
    return m("mover", { accent: "true" }, this.argument(), m("mo", { stretchy }, sign));
  }

  /**
   * @param {string} alphabet
   * @param {boolean} operator
   */
  variant(alphabet, operator) {
    if (operator || alphabet === "normal") {
      return m("mi", { mathvariant: "normal" }, this.textArgument().trim());
    }
    const outer = this.alphabet;
    this.alphabet = alphabet;
    const argument = this.argument();
    this.alphabet = outer;
    return argument;
  }

  /** @param {string} name */
  structure(name) {
    switch (name) {
      case "frac":
      case "dfrac":
      case "tfrac":
      case "cfrac":
        return m("mfrac", {}, this.argument(), this.argument());
      case "binom":
        return this.binomial();
      case "sqrt":
        return this.root();
      case "left":
        return this.fenced();
      case "begin":
        return this.environment();
      case "not":
        return m("mo", {}, `${this.argument().textContent}\u0338`);
      case "boxed":
        return m("menclose", { notation: "box", class: "boxed" }, this.argument());
      case "stackrel":
      case "overset": {
        const above = this.argument();
        return m("mover", {}, this.argument(), above);
      }
      case "underset": {
        const below = this.argument();
        return m("munder", {}, this.argument(), below);
      }
      case "pmod":
        return m("mrow", {}, m("mo", {}, "("), m("mi", {}, "mod"), this.argument(), m("mo", {}, ")"));
      case "color":
      case "label":
      case "tag":
        this.textArgument();
        return null;
      default:
        return this.otherCommand(name);
    }
  }

  /** @param {string} name */
  otherCommand(name) {
    if (/^(display|text|script)style$|^big[lr]?$|^Big[lr]?$|^bigg[lr]?$|^right$|^middle$/.test(name)) {
      return null;
    }
    if (name === "\\" || name === "newline") return m("mspace", { linebreak: "newline" });
    if (name === " ") return m("mspace", { width: "0.25em" });
    return m("mtext", {}, name.length === 1 ? name : `\\${name}`);
  }

  binomial() {
    const fraction = m("mfrac", { linethickness: "0" }, this.argument(), this.argument());
    return m("mrow", {}, m("mo", {}, "("), fraction, m("mo", {}, ")"));
  }

  root() {
    if (this.peek() !== "[") return m("msqrt", {}, this.argument());
    this.at += 1;
    const degree = this.row((token) => token === "]");
    this.at += 1;
    return m("mroot", {}, this.argument(), m("mrow", {}, ...degree));
  }

  fence() {
    const token = this.next() ?? ".";
    if (token === ".") return "";
    return token.startsWith("\\") ? (FENCES[token.slice(1)] ?? token.slice(1)) : token;
  }

  fenced() {
    const left = this.fence();
    const inner = this.row((token) => token === "\\right");
    this.at += 1;
    const right = this.fence();
    const sign = (/** @type {string} */ text) => m("mo", { stretchy: "true", fence: "true" }, text);
    return m("mrow", {}, left && sign(left), ...inner, right && sign(right));
  }

  environment() {
    const name = this.textArgument().replace("*", "");
    if (name === "array" && this.peek() === "{") this.textArgument();
    /** @type {Element[]} */
    const rows = [];
    /** @type {Element[]} */
    let cells = [];
    const ends = (/** @type {string} */ token) => ["&", "\\\\", "\\end"].includes(token);
    for (;;) {
      cells.push(m("mtd", {}, ...this.row(ends)));
      const token = this.next();
      if (token === "&") continue;
      rows.push(m("mtr", {}, ...cells));
      cells = [];
      if (token === undefined || token === "\\end") break;
      // A line break at the end of the last row adds no empty row.
      if (this.peek() === "\\end") {
        this.at += 1;
        break;
      }
    }
    this.textArgument();
    return this.matrix(name, rows);
  }

  /**
   * @param {string} name
   * @param {Element[]} rows
   */
  matrix(name, rows) {
    const left = name === "cases" || !(name in MATRICES || name === "array");
    const table = m("mtable", { class: left ? (name === "cases" ? "cases" : "aligned") : null }, ...rows);
    const [open, close] = MATRICES[name] ?? ["", ""];
    const sign = (/** @type {string} */ text) => m("mo", { stretchy: "true", fence: "true" }, text);
    return m("mrow", {}, open && sign(open), table, close && sign(close));
  }
}
