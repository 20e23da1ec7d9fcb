/** A line at the lower edge of the page that says what has happened, with a button such as "Undo". */

import { byId, h, iconButton } from "./dom.js";

const SHOWN_MS = 8000;
const WITH_BUTTON_MS = 30_000;

let timer = 0;

/**
 * Shows a text until its time is over, the user closes it, or another text takes its place.
 * @param {string} text
 * @param {{label: string, act: () => void}} [button]
 */
export function notify(text, button) {
  const line = byId("notice");
  const click = () => {
    hide();
    button?.act();
  };
  line.replaceChildren(
    h("span", {}, text),
    button ? h("button", { type: "button", class: "act", onclick: click }, button.label) : "",
    iconButton("close", "Close the notice", hide),
  );
  line.hidden = false;
  clearTimeout(timer);
  timer = setTimeout(hide, button ? WITH_BUTTON_MS : SHOWN_MS);
}

function hide() {
  const line = byId("notice");
  line.hidden = true;
  line.replaceChildren();
}
