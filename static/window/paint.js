/** Canvases in the page's colours, sharp on every screen. */

import { byId } from "../dom.js";

/** The page's colours as they are now, light or dark, and its font. */
export function palette() {
  const probe = byId("window");
  const style = getComputedStyle(probe);
  /** @param {string} name */
  const color = (name) => {
    probe.style.setProperty("outline-color", `var(--${name})`);
    return style.outlineColor; // resolved, which a custom property is not
  };
  const [deep, water, leaf, sun, muted, line] = ["deep", "water", "leaf", "sun", "muted", "line"].map(color);
  probe.style.removeProperty("outline-color");
  return { deep, water, leaf, sun, muted, line, font: style.fontFamily };
}

/**
 * A cleared canvas of its own width, in CSS pixels.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 */
export function context(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const paint = canvas.getContext("2d");
  if (paint === null) throw new Error("This browser draws on no canvas.");
  paint.scale(scale, scale);
  return paint;
}
