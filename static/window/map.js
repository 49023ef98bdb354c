/** The KV blocks as a field of tanks: held water stands in them, cached content above it. */

/** @import { Blocks } from "./blocks.js" */

import { el, tableOf } from "../dom.js";
import { fit, levels, strength } from "./blocks.js";
import { number, percent } from "../format.js";
import { context, palette } from "./paint.js";

const HEIGHT = 232;
/** @type {[color: string, name: keyof Blocks["numbers"], label: string][]} */
const KINDS = [
  ["deep", "shared", "held by several sequences"],
  ["water", "alone", "held by one"],
  ["tint", "cached", "free, content cached"],
  ["free", "free", "free"],
];

export class BlockField {
  /** @type {?Blocks} */
  #blocks = null;
  #canvas = el("canvas", { role: "img" });
  #note = el("p", { class: "note" });
  #cells = KINDS.map(() => [el("span", {}, "–"), el("span", {}, "–")]);

  constructor() {
    const rows = KINDS.map(([color, , label], i) => {
      return [el("span", {}, el("i", { class: `swatch ${color}` }), label), ...this.#cells[i]];
    });
    this.element = el(
      "figure",
      { class: "blocks" },
      el("figcaption", {}, "KV cache, block by block"),
      this.#canvas,
      this.#note,
      tableOf("KV blocks by what becomes of them", ["Kind", "Blocks", "Share"], rows),
    );
  }

  /** @param {Blocks} blocks */
  set(blocks) {
    this.#blocks = blocks;
  }

  draw() {
    if (this.#blocks === null) return;
    const { held, holders, numBlocks, perCell, numbers, numSaved } = this.#blocks;
    const width = this.#canvas.clientWidth;
    const { side, columns, rows } = fit(held.length, width, HEIGHT);
    const paint = context(this.#canvas, width, rows * side);
    const colors = palette();
    const size = side > 3 ? side - 1 : side;
    for (let i = 0; i < held.length; i += 1) {
      const [x, y] = [(i % columns) * side, Math.floor(i / columns) * side];
      const stand = levels(this.#blocks, i, size);
      /** @param {string} color  @param {number} from  @param {number} to */
      const fill = (color, from, to, alpha = 1) => {
        if (to <= from) return;
        paint.globalAlpha = alpha;
        paint.fillStyle = color;
        paint.fillRect(x, y + size - to, size, to - from);
      };
      fill(colors.line, 0, size, 0.55);
      fill(colors.water, stand.held, stand.cached, 0.35);
      fill(colors.water, stand.shared, stand.held);
      fill(colors.deep, 0, stand.shared, 0.75 + 0.25 * strength(holders[i]));
    }
    const each = perCell === 1 ? "Each cell is a block" : `Each cell is ${number(perCell)} blocks`;
    const saved = numSaved > 0 ? ` Sharing saves ${number(numSaved)} blocks now.` : "";
    this.#note.textContent = `${each}.${saved}`;
    this.#tell(numBlocks, numbers);
  }

  /** @param {number} numBlocks  @param {Blocks["numbers"]} numbers */
  #tell(numBlocks, numbers) {
    for (const [i, [, name]] of KINDS.entries()) {
      const [blocks, share] = this.#cells[i];
      blocks.textContent = number(numbers[name]);
      share.textContent = percent(numbers[name] / numBlocks);
    }
    const said = KINDS.map(([, name, label]) => `${number(numbers[name])} ${label}`);
    this.#canvas.setAttribute("aria-label", `${number(numBlocks)} KV blocks: ${said.join(", ")}.`);
  }
}
