/** Copying, with a sign that it worked. */

import { icon, iconButton } from "./dom.js";

const CONFIRMED_MS = 1500;

/**
 * A button that copies what getText returns at the moment of the click.
 * @param {string} label
 * @param {() => string} getText
 */
export function copyButton(label, getText) {
  const button = iconButton("copy", label, async () => {
    const copied = await copyText(getText());
    show(button, copied ? "check" : "alert", copied ? "Copied" : "Copying was refused");
    setTimeout(() => show(button, "copy", label), CONFIRMED_MS);
  });
  return button;
}

/**
 * @param {HTMLButtonElement} button
 * @param {string} iconName
 * @param {string} label
 */
function show(button, iconName, label) {
  button.replaceChildren(icon(iconName));
  button.setAttribute("aria-label", label);
  button.title = label;
}

/** @param {string} text */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

/** The clipboard API exists only on https and localhost; this works on a LAN address too. @param {string} text */
function copyBySelection(text) {
  const focused = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (focused instanceof HTMLElement) focused.focus();
  return copied;
}
