/** Builds DOM nodes. No function here parses HTML, so text of a model cannot become markup. */

/** @typedef {Node | string | null | undefined | false} Child */

/**
 * Returns an element with attributes and children. A function as an attribute, such as `onclick`,
 * becomes a listener; null, undefined and false leave an attribute out.
 * @param {string} tag
 * @param {Record<string, unknown>} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElement}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  fill(element, attributes, children);
  return element;
}

/**
 * Returns whether a key belongs to an input method, which composes a character with it.
 * Safari tells the Enter that ends the composition after its end, and only with this code.
 * @param {KeyboardEvent} event
 */
export const composes = (event) => event.isComposing || event.keyCode === 229;

const SVG = "http://www.w3.org/2000/svg";

/**
 * Returns an SVG element; the arguments are as in `h`.
 * @param {string} tag
 * @param {Record<string, unknown>} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {SVGElement}
 */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  fill(element, attributes, children);
  return element;
}

const MATHML = "http://www.w3.org/1998/Math/MathML";

/**
 * Returns a MathML element; the arguments are as in `h`.
 * @param {string} tag
 * @param {Record<string, unknown>} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {Element}
 */
export function mathml(tag, attributes = {}, ...children) {
  const element = document.createElementNS(MATHML, tag);
  fill(element, attributes, children);
  return element;
}

/**
 * @param {Element} element
 * @param {Record<string, unknown>} attributes
 * @param {(Child | Child[])[]} children
 */
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") {
      element.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(.../** @type {(Node | string)[]} */ (children.flat().filter(isShown)));
}

/** @param {Child} child */
const isShown = (child) => child !== null && child !== undefined && child !== false;

/**
 * Returns the element with this id in index.html.
 * @param {string} id
 * @returns {HTMLElement}
 */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`index.html has no element ${id}`);
  return element;
}

/**
 * Returns an icon from the paths in ICONS. It is hidden from screen readers: the button around it
 * has a label.
 * @param {keyof typeof ICONS} name
 */
export function icon(name) {
  return svg(
    "svg",
    { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" },
    svg("path", { d: ICONS[name] }),
  );
}

/**
 * Returns a button that shows only an icon; the label is its name and its tooltip.
 * @param {keyof typeof ICONS} name
 * @param {string} label
 * @param {(event: Event) => void} onclick
 * @param {Record<string, unknown>} [more]
 */
export function iconButton(name, label, onclick, more = {}) {
  return h(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...more },
    icon(name),
  );
}

const ICONS = {
  send: "M12 19V5M5 12l7-7 7 7",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 13l4 4L19 7",
  edit: "M4 20h4L19 9l-4-4L4 16zM13.5 6.5l4 4",
  retry: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  play: "M7 5l12 7-12 7z",
  left: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  trash: "M5 7h14M10 11v6M14 11v6M6 7l1 13h10l1-13M9 7V4h6v3",
  clip: "M20 11l-8.5 8.5a5 5 0 0 1-7-7L13 4a3.4 3.4 0 0 1 5 5l-8.5 8.5a1.7 1.7 0 0 1-2.5-2.5L14.5 8",
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  menu: "M4 6h16M4 12h16M4 18h16",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4v6M9 14v6",
  tool: "M14 6a4 4 0 0 0 5 5l-9 9a2.5 2.5 0 0 1-4-4l9-9M14 6l3-2.5",
  branch: "M6 4v16M6 12c8 0 10-2 10-6M16 3l-3 3M16 3l3 3",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  down: "M12 5v14M5 12l7 7 7-7",
};
