// Sums over a cube: what a brush shows, without asking anybody.
import { BINS } from "./histogram.js";

const DRAWN_BINS = BINS / 2;

// `from[k] + ... + from[k * n]` in place, so that every range is the difference of two places.
function accumulate(array, start, blockLength) {
  for (let i = start + blockLength; i < start + BINS * blockLength; i++)
    array[i] += array[i - blockLength];
}

function sumOver(array, start, blockLength, [first, last], i) {
  const upTo = array[start + last * blockLength + i];
  return first === 0 ? upTo : upTo - array[start + (first - 1) * blockLength + i];
}

export class Cube {
  // `answer` is the server's: counts [statistic active bin], sums and counts [active layer head],
  // rows that are picked [active].
  constructor(answer, statistics, heads) {
    [this.counts, this.sums, this.defined, this.pickedRows] = answer.arrays;
    this.rows = answer.rows;
    this.statistics = statistics;
    this.heads = heads;
    statistics.forEach((_, i) => accumulate(this.counts, i * BINS * DRAWN_BINS, DRAWN_BINS));
    accumulate(this.sums, 0, heads);
    accumulate(this.defined, 0, heads);
    accumulate(this.pickedRows, 0, 1);
  }

  // How many of all `rows` a range picks.
  picked(range) {
    return sumOver(this.pickedRows, 0, 1, range, 0);
  }

  // Counts by bin of one statistic, of the rows in a range of the active one.
  histogram(statistic, range) {
    const start = this.statistics.indexOf(statistic) * BINS * DRAWN_BINS;
    const counts = new Uint32Array(DRAWN_BINS);
    for (let i = 0; i < DRAWN_BINS; i++)
      counts[i] = sumOver(this.counts, start, DRAWN_BINS, range, i);
    return counts;
  }

  // The mean of the heatmap's statistic for each head. NaN where nothing is defined.
  means(range) {
    const means = new Float64Array(this.heads);
    for (let i = 0; i < this.heads; i++) {
      const count = sumOver(this.defined, 0, this.heads, range, i);
      means[i] = count ? sumOver(this.sums, 0, this.heads, range, i) / count : NaN;
    }
    return means;
  }
}
