/**
 * The messages of a conversation as a tree: each names the one that it follows, and those that follow the same one are
 * siblings, other ways to go on. Messages stand in the order in which they were made.
 *
 * @typedef {{id: string, parent: ?string}} Node  any message
 */

/**
 * What leads to a message, and the message itself.
 * @template {Node} T
 * @param {T[]} messages
 * @param {?string} tip  id of the last one; null or an unknown one gives nothing
 */
export function pathTo(messages, tip) {
  /** @type {Map<?string, T>} */
  const known = new Map(messages.map((each) => [each.id, each]));
  const path = [];
  for (let at = known.get(tip); at !== undefined && path.length < messages.length; at = known.get(at.parent)) {
    path.push(at);
  }
  return path.reverse();
}

/**
 * All that follow the same message as this one does, itself among them.
 * @template {Node} T
 * @param {T[]} messages
 * @param {T} message
 */
export function siblingsOf(messages, { parent }) {
  return messages.filter((each) => each.parent === parent);
}

/** @param {Node[]} messages  @param {Node} message */
export function hasFollowers(messages, { id }) {
  return messages.some((each) => each.parent === id);
}

/**
 * Where the branch that was made last ends, of those that go through this message.
 * @template {Node} T
 * @param {T[]} messages
 * @param {T} message
 */
export function newestEnd(messages, message) {
  const newest = new Map(messages.map((each) => [each.parent, each])); // the last one of each parent stays
  let end = message;
  for (let steps = 0; steps < messages.length; steps += 1) end = newest.get(end.id) ?? end;
  return end;
}
