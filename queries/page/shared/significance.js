// How sure differences are, as macros.sql says it.
import { isUndefined } from "./draw.js";

const POINTS = [
  [0.0198550717512319, 0.0506142681451881],
  [0.1016667612931866, 0.1111905172266872],
  [0.2372337950418355, 0.1568533229389436],
  [0.4082826787521751, 0.181341891689181],
];

// The two-sided p of Student's t: the tail over the whole.
function twoSidedP(difference, error, df, level) {
  if (isUndefined(difference) || isUndefined(error)) return null;
  const isRounding = Math.abs(difference) <= 1e-6 * Math.abs(level);
  if (isRounding || error === 0) return Number(isRounding);
  const r = df - 0.5;
  const density = (y) => (Math.exp((y * y) / -2) * y) / Math.sqrt(Math.sinh((y * y) / (2 * r)));
  const tail = (low, width = Math.sqrt(low * low + 24) - low) =>
    width *
    POINTS.reduce(
      (sum, [place, weight]) =>
        sum + weight * (density(low + place * width) + density(low + width - place * width)),
      0,
    );
  return tail(Math.sqrt(r * Math.log1p((difference / error) ** 2 / df))) / tail(0);
}

// Benjamini and Hochberg's q of differences by head. `level(i)` is the size of what differs.
export function adjustedP({ mean, standard_error: errors, degrees_of_freedom: freedom }, level) {
  const p = Array.from(mean, (difference, i) =>
    twoSidedP(difference, errors[i], freedom[i], level(i)),
  );
  const falling = p.filter((one) => one !== null).sort((one, other) => other - one);
  let least = 1;
  const q = new Map(
    falling.map((one, i) => [
      one,
      (least = Math.min(least, (one * falling.length) / (falling.length - i))),
    ]),
  );
  return p.map((one) => q.get(one) ?? null);
}
