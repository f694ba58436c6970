// The pattern of a head on a text as a picture: a row for each query, a column for each key.
import { html } from "./draw.js";

const MOST_PIXELS = 480;
const MOST_OF_A_CELL = 14;

// `weights` are [query key], NaN where a query cannot look. `onHover(query, key)` hears what the
// pointer is on, without arguments that it has left; `onChoose(query)` hears clicks.
export function patternPicture(weights, { onHover, onChoose }) {
  const size = Math.round(Math.sqrt(weights.length));
  const cell = Math.min(MOST_OF_A_CELL, MOST_PIXELS / size);
  const picture = html("canvas", {
    class: "pattern",
    width: size,
    height: size,
    role: "img",
    "aria-label": `The attention of ${size} tokens, each a row, to those before them, columns`,
  });
  picture.style.width = `${size * cell}px`;
  // The page must hold it: its colour is that of the page, light or dark.
  requestAnimationFrame(() => paint(picture, weights, size));
  const at = (event) => {
    const box = picture.getBoundingClientRect();
    const place = (offset, length) => Math.min(size - 1, Math.floor((offset / length) * size));
    return [
      place(event.clientY - box.top, box.height),
      place(event.clientX - box.left, box.width),
    ];
  };
  picture.onpointermove = (event) => {
    const [query, key] = at(event);
    if (key <= query) onHover(query, key);
    else onHover();
  };
  picture.onpointerleave = () => onHover();
  picture.onclick = (event) => onChoose(at(event)[0]);
  return html(
    "figure",
    { class: "pattern-figure" },
    picture,
    html(
      "figcaption",
      { class: "note" },
      "A row for each token that looks, a column for each that it looks at. The strength of a " +
        "colour is the root of the weight.",
    ),
  );
}

function paint(picture, weights, size) {
  const context = picture.getContext("2d");
  context.fillStyle = getComputedStyle(picture).color;
  for (let query = 0; query < size; query++)
    for (let key = 0; key <= query; key++) {
      // By the root, as the grounds of tokens: many weights are small beside that of a sink.
      context.globalAlpha = Math.sqrt(weights[query * size + key] || 0);
      context.fillRect(key, query, 1, 1);
    }
}
