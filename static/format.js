/** Numbers as people read them. */

/** 85 ms, 1.2 s, 48 s @param {number} ms */
export function duration(ms) {
  if (ms < 9.95) return `${Number(ms.toFixed(1))} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  return ms < 9950 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 1000)} s`;
}

/** 0.4, 7.2, 38, 1,240 @param {?number} value */
export function number(value) {
  if (value === null) return "–";
  const digits = Math.abs(value) < 9.95 && !Number.isInteger(value) ? 1 : 0;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** @param {?number} value  a part of 1 */
export function percent(value) {
  if (value === null) return "–";
  return `${Math.floor(value * 1000 + 1e-6) === 1000 || value === 0 ? value * 100 : floored(value)} %`;
}

/** Never 100 % of what is not whole. @param {number} value */
function floored(value) {
  const shown = value * 100;
  return shown < 99 ? Math.round(shown) : Math.floor(shown * 10) / 10;
}

/** @param {number} value  @param {string} noun  in the singular */
export function count(value, noun) {
  return `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** 1st, 2nd, 3rd, 11th @param {number} value */
export function ordinal(value) {
  const teens = value % 100 > 10 && value % 100 < 14;
  return `${value}${(!teens && ["th", "st", "nd", "rd"][value % 10]) || "th"}`;
}

/** @param {number} seconds */
export function ago(seconds) {
  return seconds === 0 ? "now" : `${number(seconds)} s ago`;
}
