/** What was written and not sent yet, by conversation: kept in the browser, through a reload too. */

import { readKept, writeKept } from "./settings.js";

const NAME = "penstock.drafts";
const MOST = 50; // conversations: the draft that was written last stays
const MOST_CHARS = 100_000;

/** @param {string} id  of a conversation; "" for the one that is not begun */
export function draftOf(id) {
  return drafts()[id] ?? "";
}

/** @param {string} id  @param {string} text  "" forgets it */
export function keepDraft(id, text) {
  const { [id]: _, ...others } = drafts();
  const kept = text === "" ? others : { ...others, [id]: text.slice(0, MOST_CHARS) };
  const newest = Object.entries(kept).slice(-MOST);
  writeKept("localStorage", NAME, newest.length > 0 ? JSON.stringify(Object.fromEntries(newest)) : null);
}

/** @returns {Record<string, string>} */
function drafts() {
  try {
    return JSON.parse(readKept("localStorage", NAME) ?? "{}");
  } catch {
    return {};
  }
}
