/**
 * What the user chose, kept in the browser. An empty choice leaves the value to the server.
 *
 * @typedef {object} Texts
 * @property {string} systemPrompt
 * @property {string} stop  one in a line
 * @property {string} lane
 * @property {string} effort  of thinking; "": the model's own
 * @property {string} kept  where conversations are: "server", or "browser" alone
 *
 * @typedef {"temperature"|"topP"|"topK"|"minP"|"presencePenalty"|"frequencyPenalty"|"repetitionPenalty"|"maxTokens"
 *   |"seed"} NumberName
 *
 * @typedef {Texts & Record<NumberName, ?number>} Settings
 *
 * @typedef {"localStorage"|"sessionStorage"} Area
 */

const SETTINGS = "penstock.settings";
const KEY = "penstock.key";

/**
 * Each lane and the service_tier that asks for it.
 * @type {Record<string, string>}
 */
export const LANES = { auto: "auto", interactive: "priority", standard: "default", batch: "flex" };

/** @type {Settings} */
export const DEFAULTS = {
  systemPrompt: "",
  temperature: null,
  topP: null,
  topK: null,
  minP: null,
  presencePenalty: null,
  frequencyPenalty: null,
  repetitionPenalty: null,
  maxTokens: null,
  seed: null,
  stop: "",
  lane: "auto",
  effort: "",
  kept: "server",
};

export const settingNames = /** @type {(keyof Settings)[]} */ (Object.keys(DEFAULTS));

/** @returns {Settings} */
export function loadSettings() {
  try {
    return { ...DEFAULTS, ...JSON.parse(readKept("localStorage", SETTINGS) ?? "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

/** @param {Settings} settings */
export function saveSettings(settings) {
  writeKept("localStorage", SETTINGS, JSON.stringify(settings));
}

/**
 * The fields of a chat completion request that follow from the settings.
 * @param {Settings} settings
 * @param {boolean} reasons  the model has a setting for how much it thinks
 */
export function requestFields(settings, reasons) {
  const stops = settings.stop.split("\n").filter(Boolean);
  const effort = reasons && settings.effort !== "" ? settings.effort : null;
  const chosen = { ...numbersOf(settings), stop: stops.length > 0 ? stops : null, reasoning_effort: effort };
  const set = Object.entries(chosen).filter(([, value]) => value !== null);
  return { ...Object.fromEntries(set), service_tier: LANES[settings.lane] ?? LANES.auto };
}

/** The settings that are numbers, by their names in a request: topP is top_p. @param {Settings} settings */
function numbersOf(settings) {
  const names = settingNames.filter((name) => DEFAULTS[name] === null);
  return Object.fromEntries(names.map((name) => [wireName(name), settings[name]]));
}

/**
 * @param {string} name  a setting's
 * @returns {string} the same in a request and in a model's defaults
 */
export function wireName(name) {
  return name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
}

/** The API key, or null. */
export function loadKey() {
  return readKept("sessionStorage", KEY) ?? readKept("localStorage", KEY);
}

/**
 * Keeps the key for this tab, or in this browser where the user asked for that.
 * @param {?string} key
 * @param {boolean} remember
 */
export function saveKey(key, remember) {
  writeKept("sessionStorage", KEY, remember ? null : key);
  writeKept("localStorage", KEY, remember ? key : null);
}

// A browser may refuse storage altogether: then a choice lasts as long as the page.
const fallback = new Map();

/**
 * @param {Area} area
 * @param {string} name
 * @returns {?string}
 */
export function readKept(area, name) {
  try {
    return globalThis[area].getItem(name);
  } catch {
    return fallback.get(area + name) ?? null;
  }
}

/**
 * @param {Area} area
 * @param {string} name
 * @param {?string} value
 */
export function writeKept(area, name, value) {
  try {
    if (value === null) globalThis[area].removeItem(name);
    else globalThis[area].setItem(name, value);
  } catch {
    fallback.set(area + name, value);
  }
}
