/**
 * The picture of the KV blocks: what the event `kv` says, cell by cell.
 *
 * @typedef {object} Blocks
 * @property {Uint8Array} held
 * @property {Uint8Array} shared
 * @property {Uint8Array} cached
 * @property {Uint8Array} holders
 * @property {number} numBlocks
 * @property {number} perCell
 * @property {{shared: number, alone: number, cached: number, free: number}} numbers
 * @property {number} numSaved
 */

const BYTE = 255;

/**
 * @param {import("../api.js").BlocksStatus} told
 * @returns {Blocks}
 */
export function decodeBlocks(told) {
  /** @param {string} text */
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return {
    held: bytes(told.held),
    shared: bytes(told.shared),
    cached: bytes(told.cached),
    holders: bytes(told.holders),
    numBlocks: told.num_blocks,
    perCell: told.blocks_per_cell,
    numbers: {
      shared: told.num_shared,
      alone: told.num_held - told.num_shared,
      cached: told.num_cached,
      free: told.num_blocks - told.num_held - told.num_cached,
    },
    numSaved: told.num_saved,
  };
}

/**
 * Columns, rows and the side of a cell so that `count` cells fill a field as well as they can.
 * @param {number} count
 * @param {number} width
 * @param {number} height
 */
export function fit(count, width, height, most = 18) {
  let side = Math.min(most, Math.max(2, Math.floor(Math.sqrt((width * height) / count))));
  while (side > 2 && Math.floor(width / side) * Math.floor(height / side) < count) side -= 1;
  const columns = Math.max(1, Math.floor(width / side));
  return { side, columns, rows: Math.ceil(count / columns) };
}

/**
 * How high the parts of a cell stand, as water in a tank: shared blocks at the bottom, those of one sequence on
 * them, cached ones above. A part that is there is seen.
 * @param {Pick<Blocks, "held"|"shared"|"cached">} blocks
 * @param {number} i  the cell's index
 * @param {number} height  px
 * @returns {{shared: number, held: number, cached: number}} px, each measured from the bottom
 */
export function levels({ held, shared, cached }, i, height) {
  /** @param {number} part */
  const level = (part) => (part > 0 ? Math.max(1, Math.round((part / BYTE) * height)) : 0);
  const lowest = level(shared[i]);
  const middle = Math.max(lowest, level(held[i]));
  return {
    shared: lowest,
    held: middle,
    cached: cached[i] > 0 ? Math.min(height, Math.max(middle + 1, level(Math.min(BYTE, held[i] + cached[i])))) : middle,
  };
}

/** How strongly a shared block shows: 0 for two holders, 1 for 32 and more. @param {number} holders */
export function strength(holders) {
  return holders < 2 ? 0 : Math.min(1, Math.log2(holders / 2) / 4);
}
