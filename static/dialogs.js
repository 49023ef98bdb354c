/** The page's dialogs: settings, the API key, and one question. Escape and Cancel change nothing. */

import { find } from "./dom.js";
import { DEFAULTS, settingNames, wireName } from "./settings.js";

/**
 * @import { Model } from "./api.js"
 * @import { Settings } from "./settings.js"
 *
 * @typedef {HTMLInputElement|HTMLTextAreaElement|HTMLSelectElement} Field
 */

/**
 * Opens the settings.
 * @param {HTMLDialogElement} dialog
 * @param {{settings: Settings, own: ?string, model: ?Model}} shown  own: the system prompt of the conversation that is
 *   open; model: whose defaults stand where nothing was chosen
 * @param {(settings: Settings, own: ?string) => void} onSave
 */
export function openSettings(dialog, { settings, own, model }, onSave) {
  const form = formIn(dialog);
  const ownPrompt = find("[name=ownPrompt]", HTMLTextAreaElement, form);
  ownPrompt.value = own ?? "";
  /** @type {Record<string, string|number>} */
  const given = { ...OPENAI_DEFAULTS, ...model?.defaults, max_tokens: roomOf(model) };
  for (const name of settingNames) {
    const field = fieldOf(form, name);
    field.value = String(settings[name] ?? "");
    if (field instanceof HTMLInputElement) field.placeholder = String(given[wireName(name)] ?? "");
  }
  offer(form, model);
  const details = find("details", HTMLDetailsElement, form);
  details.open = settingNames.some((name) => {
    const field = fieldOf(form, name);
    return details.contains(field) && field.value !== "";
  });
  find("[data-reset]", HTMLButtonElement, form).onclick = () => {
    for (const name of settingNames) fieldOf(form, name).value = String(DEFAULTS[name] ?? "");
    ownPrompt.value = "";
  };
  onSubmit(dialog, () => onSave(readSettings(form), ownPrompt.value.trim() || null));
  dialog.showModal();
}

/**
 * Asks for a key.
 * @param {HTMLDialogElement} dialog
 * @param {?string} key
 * @param {(key: ?string, remember: boolean) => void} onSave  null: without a key
 */
export function openKey(dialog, key, onSave) {
  const field = find("[name=key]", HTMLInputElement, dialog);
  const remember = find("[name=remember]", HTMLInputElement, dialog);
  field.value = key ?? "";
  onSubmit(dialog, () => onSave(field.value.trim() || null, remember.checked));
  dialog.showModal();
}

/**
 * Asks before something is lost.
 * @param {HTMLDialogElement} dialog
 * @param {string} question
 * @param {() => void} onYes
 */
export function openConfirm(dialog, question, onYes) {
  find("p", HTMLElement, dialog).textContent = question;
  onSubmit(dialog, onYes);
  dialog.showModal();
}

/** Leaves out what the key and the model do not allow. @param {HTMLFormElement} form  @param {?Model} model */
function offer(form, model) {
  const { options } = find("[name=lane]", HTMLSelectElement, form);
  const allowed = model?.lanes && ["auto", ...model.lanes];
  for (const lane of options) lane.hidden = lane.disabled = allowed?.includes(lane.value) === false;
  if (options[options.selectedIndex].disabled) options.selectedIndex = [...options].findIndex(({ disabled }) => !disabled);
  find(".effort", HTMLElement, form).hidden = !model?.reasoning;
}

/** @param {HTMLDialogElement} dialog */
function formIn(dialog) {
  return find("form", HTMLFormElement, dialog);
}

/** @param {HTMLFormElement} form  @param {keyof Settings} name */
function fieldOf({ elements }, name) {
  return /** @type {Field} */ (elements.namedItem(name));
}

// Those that a checkpoint cannot change.
const OPENAI_DEFAULTS = { presence_penalty: 0, frequency_penalty: 0, seed: "random" };

/** @param {?Model} model */
function roomOf(model) {
  return model?.max_model_len ? `what fits in ${model.max_model_len.toLocaleString("en")}` : "";
}

/**
 * @param {HTMLFormElement} form
 * @returns {Settings}
 */
function readSettings(form) {
  const entries = settingNames.map((name) => {
    const value = fieldOf(form, name).value.trim();
    return [name, typeof DEFAULTS[name] === "string" ? value : numberOrNull(value)];
  });
  return Object.fromEntries(entries);
}

/** @param {string} text */
function numberOrNull(text) {
  return text === "" ? null : Number(text);
}

/**
 * One listener at a time: a dialog opens often.
 * @param {HTMLDialogElement} dialog
 * @param {() => void} act
 */
function onSubmit(dialog, act) {
  const form = formIn(dialog);
  find("[data-cancel]", HTMLButtonElement, dialog).onclick = () => dialog.close();
  form.onsubmit = (event) => {
    event.preventDefault();
    dialog.close();
    act();
  };
}
