/**
 * What a model thinks before it answers. The server tells it apart where it knows the model's format; else it stands in
 * the text, between tags, the first of which some templates already write into the prompt.
 */

const OPEN = "<think>";
const CLOSE = "</think>";

/**
 * @param {string} text  of an answer, perhaps not at its end
 * @returns {{thinking: string, answer: string, isThinking: boolean}}  isThinking: the reasoning goes on
 */
export function splitThinking(text) {
  const opened = text.trimStart().startsWith(OPEN);
  const start = opened ? text.indexOf(OPEN) + OPEN.length : 0;
  const end = text.indexOf(CLOSE, start);
  if (end === -1 && !opened) return { thinking: "", answer: text, isThinking: false };
  if (end === -1) return { thinking: text.slice(start).trim(), answer: "", isThinking: true };
  const answer = text.slice(end + CLOSE.length).trimStart();
  return { thinking: text.slice(start, end).trim(), answer, isThinking: false };
}

/**
 * @param {{thinking: string, text: string}} message
 * @returns {{thinking: string, answer: string, isThinking: boolean}} as splitThinking
 */
export function partsOf({ thinking, text }) {
  return thinking ? { thinking, answer: text, isThinking: text === "" } : splitThinking(text);
}
