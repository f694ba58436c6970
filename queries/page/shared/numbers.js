// What the numbers of all heads say: ranks, ranges, differences, and which statistics look alike.
import { aboutHeads } from "./asking.js";
import { literal, summaries } from "./behind.js";
import { plusMinus } from "./card.js";
import { isUndefined, number } from "./draw.js";
import { adjustedP } from "./significance.js";
import {
  MOST_Q,
  SUMMARY,
  cellAt,
  chosen,
  conditions,
  defined,
  facts,
  label,
  labelAt,
  matrix,
  otherScope,
  place,
  scope,
  state,
} from "./state.js";

const LOOK_ALIKE = 0.95;

// From 0 to 1 if that is the range, even around 0 if the sign has a meaning, else from the smallest
// to the largest value. A reader may ask for the values' own range.
export function rangeOf(name, values) {
  const inside = defined(values);
  const [low, high] = inside.length ? [Math.min(...inside), Math.max(...inside)] : [0, 1];
  const { range_low: lowest, range_high: highest } = facts(name);
  if (lowest === 0 && highest === 1 && !chosen.ownRange)
    return { range: [0, 1], scale: "sequential" };
  if (low >= 0 || high <= 0) return { range: [low, high], scale: "sequential" };
  const largest = Math.max(-low, high);
  return { range: [-largest, largest], scale: "diverging" };
}

// Where the run measured both with and without an intervention, its changes are the differences,
// or the differences with the other sign. Null for runs whose sequences are not the same.
export function pairing() {
  const [own, other] = [scope(), otherScope()];
  const isPaired =
    own.run_id === other.run_id && [own.intervention, other.intervention].includes("none");
  const isForward = own.intervention === "none";
  return isPaired ? { changed: isForward ? other : own, sign: isForward ? 1 : -1 } : null;
}

// What a statistic is compared with, and the differences: of the same sequences, or else as if the
// sequences of the two were independent.
export async function comparison(statistic) {
  if (!chosen.other) return null;
  const [other, pairs] = [otherScope(), pairing()];
  const about = await aboutHeads(other, statistic);
  const theirs = about?.values[statistic];
  const ours = state.numbers[statistic];
  if (!theirs || !ours) return null;
  const changes = pairs && (await aboutHeads(pairs.changed, statistic, true))?.values[statistic];
  const both = (column, combine) =>
    Array.from(ours[column], (one, i) =>
      isUndefined(one) || isUndefined(theirs[column][i]) ? null : combine(one, theirs[column][i]),
    );
  const difference = changes
    ? {
        ...changes,
        mean: changes.mean.map((change) => (isUndefined(change) ? change : pairs.sign * change)),
      }
    : {
        mean: both("mean", (one, two) => two - one),
        standard_error: both("standard_error", Math.hypot),
        degrees_of_freedom: both("degrees_of_freedom", Math.min),
      };
  const level = (i) => Math.max(Math.abs(ours.mean[i]), Math.abs(theirs.mean[i]));
  return { theirs, isPaired: Boolean(changes), ...difference, q: adjustedP(difference, level) };
}

// Pale: a head that is not surely different. Even around 0, where less than a millionth of the
// means is the rounding of sums.
export function differenceLooks(difference, means) {
  const largestOf = (list) => Math.max(0, ...defined(list).map(Math.abs));
  const largest = Math.max(largestOf(difference.mean), 1e-6 * largestOf(means)) || 1;
  return {
    range: [-largest, largest],
    scale: "diverging",
    faint: (...cell) => difference.q[place(cell)] > MOST_Q,
  };
}

export const sampled = (every) =>
  every > 1 ? `A large run: 1 of ${every} sequences is read.` : "";

// q of means less a baseline, as if that were known. Null without one.
export function againstBaseline(own, baseline) {
  const above = {
    ...own,
    mean: Array.from(own.mean, (mean) =>
      isUndefined(mean) || isUndefined(baseline) ? null : mean - baseline,
    ),
  };
  return adjustedP(above, () => baseline);
}

export function ranked(name) {
  const own = state.numbers[name];
  // An estimate of a change is held against no change.
  const nothing = facts(name).measured_by ? 0 : own?.uniform_baseline;
  const q = own && againstBaseline(own, nothing);
  const entries = Array.from(own?.mean ?? [], (mean, i) => ({
    i,
    mean,
    error: own.standard_error[i],
    q: q[i],
  }));
  return entries
    .filter(({ mean }) => !isUndefined(mean))
    .sort((one, other) => other.mean - one.mean);
}

// Heads by the size of what they differ by from another run or intervention, the largest first.
export function byDifference() {
  const { compared, numbers } = state;
  const own = numbers[chosen.statistic];
  const entries = Array.from(compared.mean, (difference, i) => ({
    i,
    difference,
    mean: own.mean[i],
    other: compared.theirs.mean[i],
    error: compared.standard_error[i],
    q: compared.q[i],
  }));
  return entries
    .filter(({ difference }) => !isUndefined(difference))
    .sort((one, other) => Math.abs(other.difference) - Math.abs(one.difference));
}

// The page begins with a head, so that no panel is empty.
export function strongest() {
  const [first] = ranked(chosen.statistic);
  return first ? cellAt(first.i) : null;
}

// Which head leads, and how many are high.
export function finding(name) {
  const heads = ranked(name);
  const [first] = heads;
  if (!first) return "";
  const baseline = state.numbers[name].uniform_baseline;
  let words = `${labelAt(first.i)} leads in ${name} with ${plusMinus(first.mean, first.error)}`;
  if (baseline) {
    const times = Number((first.mean / baseline).toPrecision(2));
    words += `, ${number(times)} times the uniform baseline`;
  }
  const { view, threshold, is_strict: isStrict } = state.run.rankings[name] ?? {};
  const isAbove = ({ mean, q }) =>
    isUndefined(baseline) || (mean > baseline && !isUndefined(q) && q <= MOST_Q);
  if (view) {
    const passes = ({ mean }) => (isStrict ? mean > threshold : mean >= threshold);
    const passing = heads.filter((one) => passes(one) && isAbove(one)).length;
    words +=
      `. ${number(passing)} of ${number(heads.length)} heads pass the threshold of ${view}, ` +
      `q <= ${MOST_Q}`;
  }
  return `${words}.`;
}

// The share of the other heads with a smaller mean, in percent. Undefined until the numbers of all
// heads are there.
export const percentile = (statistic) => state.numbers[statistic]?.percentile[place(chosen.head)];

// heads: a statistic differs between heads. layers: the heads of a layer share it. model: all do,
// or it is undefined everywhere.
export function kindOf({ mean, count, undefined: missing }) {
  const inside = defined(mean);
  if (!inside.length) return "model";
  // Means of equal numbers may differ in the order in which they were added up.
  const tolerance = 1e-9 + 1e-6 * Math.max(...inside.map(Math.abs));
  const spread = (list) => (list.length ? Math.max(...list) - Math.min(...list) : 0);
  const layers = matrix(mean).map(defined);
  const measured = matrix(Array.from(count, (one, i) => one + missing[i] > 0)).map(
    (row) => row.filter(Boolean).length,
  );
  // One head of a layer cannot show whether all its heads have the same value.
  const isVaried = layers.some(
    (row, i) => row.length && (spread(row) > tolerance || row.length < measured[i]),
  );
  if (isVaried || measured.every((heads) => heads < 2)) return "heads";
  return spread(inside) <= tolerance ? "model" : "layers";
}

// The correlation of two statistics over the heads in which both are defined.
function correlation(one, other) {
  const pairs = Array.from(one, (value, i) => [value, other[i]]).filter(
    ([x, y]) => !isUndefined(x) && !isUndefined(y),
  );
  const mean = (i) => pairs.reduce((sum, pair) => sum + pair[i], 0) / pairs.length;
  const [x, y] = [mean(0), mean(1)];
  const product = (f) => pairs.reduce((sum, pair) => sum + f(pair[0] - x, pair[1] - y), 0);
  const size = Math.sqrt(product((a) => a * a) * product((_, b) => b * b));
  return size > 0 ? product((a, b) => a * b) / size : 0;
}

// Statistics whose maps look alike, each group behind its first.
export function groups(names) {
  const found = [];
  for (const name of names) {
    const alike = found.find(
      ([first]) =>
        Math.abs(correlation(state.numbers[first].mean, state.numbers[name].mean)) > LOOK_ALIKE,
    );
    if (alike) alike.push(name);
    else found.push([name]);
  }
  return found;
}

export const axisValue = (axis, i) =>
  axis === "layer"
    ? Math.floor(i / state.run.n_heads)
    : axis === "head"
      ? i % state.run.n_heads
      : state.numbers[axis]?.mean[i];

export const summariesSql = (name) =>
  summaries(
    ["layer", "head", ...SUMMARY],
    `${conditions(chosen)}\n  AND statistic = ${literal(name)}`,
  );

export const whereHead = () => `${conditions(chosen)} AND label = ${literal(label(chosen.head))}`;
