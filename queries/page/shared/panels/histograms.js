// Histograms of the chosen head, and brushes over them.
import { remember } from "../address.js";
import { tryToAsk } from "../asking.js";
import { behind, literal } from "../behind.js";
import { Cube } from "../cube.js";
import { number } from "../draw.js";
import { histogram } from "../histogram.js";
import { sampled, whereHead } from "../numbers.js";
import { isLive } from "../source.js";
import {
  brushList,
  by,
  choose,
  chosen,
  facts,
  head,
  label,
  scope,
  state,
  turns,
} from "../state.js";
import { repaint } from "./heatmap.js";
import { showExtremes } from "./sequences.js";
import { offer } from "./sql.js";

export function makeHistograms() {
  state.histograms = new Map(
    chosen.shown.map((name) => [
      name,
      histogram(
        name,
        facts(name).meaning ?? "",
        isLive && {
          enter: () => warm(name),
          move: (range) => brushed(name, range),
          end: rested,
        },
      ),
    ]),
  );
  by("histograms").replaceChildren(...state.histograms.values());
}

const histogramsQuery = () => ({
  kind: "histograms",
  scope: scope(),
  head: head(),
  statistics: chosen.shown,
});

// The histograms of the chosen head. False if something else was chosen while they were asked for.
export async function showHistograms(turn) {
  const began = performance.now();
  const answer = await tryToAsk(histogramsQuery());
  if (!answer || turn !== turns.head) return false;
  state.sql.histograms = answer.sql?.join("\n") ?? histogramsSql();
  by("brush-note").textContent =
    `Drag over a histogram, or move its two handles with the arrow keys. ${sampled(answer.every)}`;
  for (const [name, figure] of state.histograms) {
    const own = answer.histograms[name];
    figure.hidden = !own?.counts.some((count) => count > 0);
    if (figure.hidden) continue;
    figure.setAxis(own.edges);
    figure.drawBefore(own.counts);
  }
  performance.measure("head", { start: began });
  return true;
}

// The same under the brushes, and what they leave of the heatmap.
export async function showUnderBrushes() {
  if (!chosen.brushes.size) return;
  const turn = turns.head;
  const answer = await tryToAsk({ ...histogramsQuery(), brushes: brushList() });
  if (!answer || turn !== turns.head) return;
  for (const name of chosen.shown) {
    state.histograms.get(name).drawOwn(answer.histograms[name].counts);
  }
  await applyBrushes();
}

export async function showBackgrounds() {
  if (!isLive) return;
  // One after the other: the head's own histograms come between them.
  for (const [name, figure] of [...state.histograms]) {
    const answer = await tryToAsk({ kind: "histograms", scope: scope(), statistics: [name] });
    if (!answer || state.histograms.get(name) !== figure) return;
    figure.drawAll(answer.histograms[name].counts);
  }
}

// The cube of a brush is asked for when a pointer or the focus comes near: moves then ask nothing.
function warm(name) {
  if (!chosen.head) return null;
  const others = brushList().filter((brush) => brush.statistic !== name);
  const statistics = chosen.shown.filter((one) => one !== name);
  if (!statistics.length) statistics.push(name);
  const query = {
    kind: "cube",
    scope: scope(),
    head: head(),
    active: name,
    statistic: chosen.statistic,
    statistics,
    brushes: others,
    meaning: chosen.meaning,
  };
  const key = JSON.stringify([query, state.overview.revision]);
  if (state.cube?.key !== key) {
    state.cube?.abort.abort();
    const asked = { key, abort: new AbortController(), whole: null };
    asked.done = tryToAsk(query, asked.abort.signal).then((answer) => {
      if (answer)
        asked.whole = new Cube(answer, statistics, state.run.n_layers * state.run.n_heads);
      else if (state.cube === asked) state.cube = null;
      return asked.whole;
    });
    state.cube = asked;
  }
  return state.cube;
}

async function brushed(name, range) {
  chosen.brushes.delete(name);
  // The last one is the one that the cube is of.
  if (range) chosen.brushes.set(name, range);
  const turn = ++turns.brush;
  // A cube has no rows in which the active statistic is undefined: these count again now.
  if (!range) return takeBrushAway();
  const asked = warm(name);
  const whole = asked?.whole ?? (await asked?.done);
  if (!whole || turn !== turns.brush) return;
  sayPicked(whole.picked(range), whole.rows);
  const began = performance.now();
  for (const [other, figure] of state.histograms)
    if (other !== name) figure.drawOwn(whole.histogram(other, range));
  repaint(whole.means(range));
  performance.measure("brush", { start: began });
}

// How much the brushes pick, and of how much.
export function sayPicked(count, total) {
  const hasBrush = chosen.brushes.size > 0;
  document.body.classList.toggle("brushed", hasBrush);
  by("clear").disabled = !hasBrush;
  const things = chosen.meaning === "rows" ? "rows of all heads" : "sequences";
  by("picked").textContent =
    hasBrush && total !== undefined ? `${number(count)} of ${number(total)} ${things} picked` : "";
}

function takeBrushAway() {
  sayPicked();
  if (chosen.brushes.size) return showUnderBrushes();
  for (const figure of state.histograms.values()) figure.drawUnbrushed();
  repaint(state.map.values);
}

function rested() {
  remember();
  showExtremes();
}

// Brushes stay when something else is chosen: the heatmap under them is asked for again.
export async function applyBrushes() {
  for (const [name, range] of chosen.brushes) state.histograms.get(name).setRange(range);
  const last = [...chosen.brushes].at(-1);
  if (!last) return sayPicked();
  await brushed(...last);
}

const histogramsSql = () => `SELECT statistic, low, high, sum(count) AS count
FROM distributions
WHERE ${whereHead()}
  AND statistic IN (${chosen.shown.map(literal).join(", ")})
GROUP BY ALL
ORDER BY ALL`;

export const isDragging = () =>
  [...state.histograms.values()].some((figure) => figure.isDragging());

// Nothing is brushed any more.
export function showUnbrushed() {
  state.cube?.abort.abort();
  state.cube = null;
  for (const figure of state.histograms.values()) figure.setRange(null);
  takeBrushAway();
  rested();
}

export function beginHistograms() {
  by("clear").onclick = () => choose({ brushes: new Map() });
  for (const input of document.getElementsByName("meaning")) {
    input.onchange = () => choose({ meaning: input.value });
  }
  by("hist-card").append(
    behind({
      askSql: offer,
      plot: by("histograms"),
      sql: () => state.sql.histograms,
      name: () => `${label(chosen.head)}-histograms`,
    }),
  );
}
