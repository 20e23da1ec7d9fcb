/** Lines at the lower edge of the page that say what has happened, each with a button such as "Undo". */

import { byId, h, iconButton } from "./dom.js";

const SHOWN_MS = 8000;
const WITH_BUTTON_MS = 30_000;
const MOST = 4;

/**
 * Shows texts, each on a line of its own, until their time is over or the user closes them. Notices stay below
 * each other, so that a later one takes no button away.
 * @param {string | string[]} texts
 * @param {{label: string, act: () => void}} [button]
 */
export function notify(texts, button) {
  const place = byId("notice");
  const remove = () => {
    notice.remove();
    place.hidden = !place.firstChild;
  };
  const click = () => {
    remove();
    button?.act();
  };
  const lines = [texts].flat().map((text) => h("p", {}, text));
  const notice = h(
    "div",
    { class: "notice" },
    h("div", {}, ...lines),
    button ? h("button", { type: "button", class: "act", onclick: click }, button.label) : "",
    iconButton("close", "Close the notice", remove),
  );
  // The same line twice says no more than once.
  for (const other of [...place.children]) if (!button && other.textContent === notice.textContent) other.remove();
  place.append(notice);
  while (place.children.length > MOST) place.firstElementChild?.remove();
  place.hidden = false;
  setTimeout(remove, button ? WITH_BUTTON_MS : SHOWN_MS + 2000 * lines.length);
}
