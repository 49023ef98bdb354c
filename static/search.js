/** Finding conversations by their words, and naming how long ago they were. */

const BEFORE = 12; // characters of a message that an excerpt shows before what was found
const AFTER = 60;

/**
 * @typedef {{conversation: Conversation, excerpt: ?string}} Found
 *
 * @import { Conversation } from "./conversation.js"
 */

/**
 * @param {Conversation[]} conversations
 * @param {string} query  words that must all be there; case does not count
 * @returns {Found[]} those that have them in their title or in one message, of which the excerpt is
 */
export function find(conversations, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  return conversations.flatMap(/** @returns {Found[]} */ (conversation) => {
    if (hasAll(conversation.title, words)) return [{ conversation, excerpt: null }];
    const found = conversation.messages.findLast((each) => hasAll(each.text, words));
    return found ? [{ conversation, excerpt: excerpt(found.text, words[0]) }] : [];
  });
}

/** @param {string} text  @param {string[]} words  in lower case */
function hasAll(text, words) {
  const lower = text.toLowerCase();
  return words.every((word) => lower.includes(word));
}

/** @param {string} text  @param {string} word  in it */
function excerpt(text, word) {
  const at = text.toLowerCase().indexOf(word);
  const start = text.lastIndexOf(" ", at - BEFORE) + 1;
  const end = at + word.length + AFTER;
  const middle = text.slice(start, end).replace(/\s+/g, " ").trim();
  return `${start > 0 ? "…" : ""}${middle}${end < text.length ? "…" : ""}`;
}

const DAY_MS = 86_400_000;

/**
 * The group that a conversation of that time stands in. Both are epochs, in ms.
 * @param {number} updated
 * @param {number} now
 */
export function ageOf(updated, now) {
  const midnight = new Date(now).setHours(0, 0, 0, 0);
  if (updated >= midnight) return "Today";
  if (updated >= midnight - DAY_MS) return "Yesterday";
  return updated >= midnight - 7 * DAY_MS ? "The last seven days" : "Earlier";
}
