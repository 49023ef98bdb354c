/**
 * The geometry of charts.
 *
 * @typedef {[x: number, y: number][]} Points  of a line
 */

/**
 * @param {number} most
 * @returns {number} the least of 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, … that is not below `most` and not below `least`
 */
export function niceTop(most, least = 1) {
  if (!(most > least)) return least;
  const power = 10 ** Math.floor(Math.log10(most));
  return power * ([1, 1.5, 2, 3, 4, 5, 6, 8].find((step) => step * power >= most * (1 - 1e-9)) ?? 10);
}

/**
 * Stretches of values without a gap, as points of a chart `width` by `height`, whose upper edge is `top`.
 * @param {(?number)[]} values
 * @param {{width: number, height: number, top: number}} size
 */
export function stretches(values, { width, height, top }) {
  const apart = width / Math.max(1, values.length - 1);
  /** @type {Points[]} */
  const found = [];
  values.forEach((value, i) => {
    if (value === null) return;
    /** @type {Points[number]} */
    const point = [round(i * apart), round(height * (1 - Math.min(value, top) / top))];
    if (i > 0 && values[i - 1] !== null) found.at(-1)?.push(point);
    else found.push([point]);
  });
  return found;
}

/** The `d` of a line through these stretches; a single point is a short dash. @param {Points[]} found */
export function linePath(found) {
  return found.map((points) => `M${points.join("L")}${points.length === 1 ? "h.6" : ""}`).join("");
}

/**
 * The `d` of the area between these stretches and those below them, or the lower edge.
 * @param {Points[]} found
 * @param {number} height
 * @param {?Points[]} below
 */
export function areaPath(found, height, below = null) {
  return found
    .map((points, i) => {
      const under = below?.[i] ?? [[points[0][0], height], [points[points.length - 1][0], height]];
      return `M${points.join("L")}L${[...under].reverse().join("L")}Z`;
    })
    .join("");
}

/** Each series on those before it. A value is null where the first series has none. @param {(?number)[][]} series */
export function stack(series) {
  const sums = [];
  /** @type {(?number)[]} */
  let before = series[0].map((value) => (value === null ? null : 0));
  for (const values of series) {
    before = before.map((sum, i) => (sum === null ? null : sum + (values[i] ?? 0)));
    sums.push(before);
  }
  return sums;
}

/** @param {number} number */
function round(number) {
  return Math.round(number * 100) / 100;
}
