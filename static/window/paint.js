/** Canvases in the page's colours, sharp on every screen. */

const NAMES = ["deep", "water", "leaf", "sun", "muted", "line"];

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

/** A cleared canvas of its own width, in CSS pixels. */
export function context(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const paint = canvas.getContext("2d");
  paint.scale(scale, scale);
  return paint;
}
