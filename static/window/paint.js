/** Canvases in the page's colours, sharp on every screen. */

const NAMES = ["accent", "water", "green", "amber", "muted", "line", "tint", "sunken", "edge"];

/** The page's colours as they are now: light or dark. */
export function palette() {
  const probe = document.getElementById("window");
  const style = getComputedStyle(probe);
  const colors = { font: style.fontFamily };
  for (const name of NAMES) {
    probe.style.setProperty("outline-color", `var(--${name})`);
    colors[name] = style.outlineColor; // resolved, which a custom property is not
  }
  probe.style.removeProperty("outline-color");
  return colors;
}

/** A cleared canvas that is as wide as its place, in CSS pixels. */
export function context(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const paint = canvas.getContext("2d");
  paint.scale(scale, scale);
  return { paint, width };
}
