/** The page's dialogs: settings, the API key, and one question. Escape and Cancel change nothing. */

import { DEFAULTS } from "./settings.js";

/** Opens the settings. @param {(settings: object) => void} onSave */
export function openSettings(dialog, settings, onSave) {
  const form = dialog.querySelector("form");
  for (const [name, value] of Object.entries(settings)) form.elements[name].value = value ?? "";
  onSubmit(dialog, () => onSave(readSettings(form)));
  dialog.showModal();
}

/** Asks for a key. @param {(key: ?string, remember: boolean) => void} onSave  null: without a key */
export function openKey(dialog, key, onSave) {
  const { elements } = dialog.querySelector("form");
  elements.key.value = key ?? "";
  onSubmit(dialog, () => onSave(elements.key.value.trim() || null, elements.remember.checked));
  dialog.showModal();
}

/** Asks before something is lost. */
export function openConfirm(dialog, question, onYes) {
  dialog.querySelector("p").textContent = question;
  onSubmit(dialog, onYes);
  dialog.showModal();
}

function readSettings(form) {
  const entries = Object.entries(DEFAULTS).map(([name, empty]) => {
    const value = form.elements[name].value.trim();
    return [name, typeof empty === "string" ? value : numberOrNull(value)];
  });
  return Object.fromEntries(entries);
}

function numberOrNull(text) {
  return text === "" ? null : Number(text);
}

/** One listener at a time: a dialog opens often. */
function onSubmit(dialog, act) {
  const form = dialog.querySelector("form");
  dialog.querySelector("[data-cancel]").onclick = () => dialog.close();
  form.onsubmit = (event) => {
    event.preventDefault();
    dialog.close();
    act();
  };
}
