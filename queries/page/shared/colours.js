// Colours of values and of series, for a light and a dark page.
//
// Lightness runs one way along `sequential`, and `diverging` runs from blue to orange: both can be
// read without seeing red or green. Series are the colours of Okabe and Ito.

// A page says `color-scheme: light dark`, and CSS takes the first or the second colour.
const both = (light, dark) => `light-dark(${light}, ${dark})`;

const SEQUENTIAL_LIGHT = [
  [240, 244, 246],
  [150, 193, 218],
  [53, 126, 178],
  [8, 48, 97],
];
const SEQUENTIAL_DARK = [
  [34, 41, 47],
  [28, 88, 122],
  [72, 160, 190],
  [222, 247, 240],
];
const DIVERGING_LIGHT = [
  [24, 88, 160],
  [134, 178, 219],
  [245, 243, 239],
  [235, 168, 115],
  [168, 72, 16],
];
const DIVERGING_DARK = [
  [132, 190, 250],
  [58, 104, 152],
  [36, 41, 45],
  [146, 89, 45],
  [250, 172, 112],
];

// The colour at t, which lies in 0..1, between the colours of a list.
function between(colours, t) {
  const place = Math.min(1, Math.max(0, t)) * (colours.length - 1);
  const first = Math.min(colours.length - 2, Math.floor(place));
  const share = place - first;
  const mixed = colours[first].map((low, i) =>
    Math.round(low + share * (colours[first + 1][i] - low)),
  );
  return `rgb(${mixed.join(" ")})`;
}

// From the ground of the page to the strongest colour.
export const sequential = (t) => both(between(SEQUENTIAL_LIGHT, t), between(SEQUENTIAL_DARK, t));

// Blue below the middle, orange above it.
export const diverging = (t) => both(between(DIVERGING_LIGHT, t), between(DIVERGING_DARK, t));

// Letters that can be read on the ground `sequential(t)`.
export const inkOn = (t) =>
  both(t > 0.63 ? "var(--card)" : "var(--text)", t > 0.49 ? "var(--card)" : "var(--text)");

const SERIES = [
  ["#0b6aa8", "#6cb8ee"],
  ["#c4550c", "#f0935a"],
  ["#00805c", "#4fc9a0"],
  ["#a8548a", "#dd9cc4"],
  ["#8a6a00", "#e3bd4c"],
  ["#555f68", "#aab4bc"],
];

// The colour of the series with a number. After the sixth they begin anew.
export const seriesColour = (number) => both(...SERIES[number % SERIES.length]);
