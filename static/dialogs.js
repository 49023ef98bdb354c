/** The page's dialogs: settings, the API key, and one question. Escape and Cancel change nothing. */

import { DEFAULTS, wireName } from "./settings.js";

/**
 * Opens the settings.
 * @param {?{max_model_len: number, defaults: object}} model  whose defaults stand where nothing was chosen
 * @param {(settings: object) => void} onSave
 */
export function openSettings(dialog, settings, model, onSave) {
  const form = dialog.querySelector("form");
  const given = { ...OPENAI_DEFAULTS, ...model?.defaults, max_tokens: roomOf(model) };
  for (const [name, empty] of Object.entries(DEFAULTS)) {
    form.elements[name].value = settings[name] ?? "";
    if (empty === null) form.elements[name].placeholder = given[wireName(name)] ?? "";
  }
  const isRare = [...form.querySelectorAll("details [name]")].some((each) => each.value !== "");
  form.querySelector("details").open = isRare;
  form.querySelector("[data-reset]").onclick = () => {
    for (const [name, value] of Object.entries(DEFAULTS)) form.elements[name].value = value ?? "";
  };
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

// Those that a checkpoint cannot change.
const OPENAI_DEFAULTS = { presence_penalty: 0, frequency_penalty: 0, seed: "random" };

function roomOf(model) {
  return model?.max_model_len ? `what fits in ${model.max_model_len.toLocaleString("en")}` : "";
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
