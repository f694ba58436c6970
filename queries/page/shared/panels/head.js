// The chosen head: its statistics, subsets and profiles.
import { tryToAsk } from "../asking.js";
import { behind, literal, summaries } from "../behind.js";
import {
  curveCard,
  fillPercentile,
  marksOf,
  sentence,
  statisticsTable,
  subsetBars,
} from "../card.js";
import { MOST_WIDTH, fillAndDraw, html, isUndefined } from "../draw.js";
import { pairing, percentile, ranked, whereHead } from "../numbers.js";
import {
  SUMMARY,
  by,
  choose,
  chosen,
  head,
  label,
  otherScope,
  scope,
  state,
  turns,
} from "../state.js";
import { showHeadEffects } from "./effects.js";
import { showHistograms, showUnderBrushes } from "./histograms.js";
import { showAttention, showExtremes } from "./sequences.js";
import { offer } from "./sql.js";

// What a choice of a head changes at once, where it is already drawn.
export function showChoice() {
  state.map?.figures.forEach((figure) => figure.choose(...chosen.head));
  by("said").textContent = `${label(chosen.head)} is chosen; its numbers are shown.`;
}

export async function showHead() {
  if (!chosen.head) return;
  const turn = ++turns.head;
  by("head-name").textContent = `Head ${label(chosen.head)}`;
  if (!(await showHistograms(turn))) return;
  const underBrushes = showUnderBrushes();
  showExtremes();
  showAttention();
  showCard(turn);
  if (state.run.subsets.length) showSubsets(turn);
  if (state.run.has_curves) showCurves(turn);
  await underBrushes;
}

// The rows of the same head elsewhere, with the differences that are known of the same sequences.
async function comparedRows() {
  if (!chosen.other) return undefined;
  const ask = (where) => tryToAsk({ kind: "heatmap", head: head(), ...where });
  const other = await ask({ scope: otherScope() });
  const pairs = pairing();
  const changes = pairs && (await ask({ scope: pairs.changed, changes: true }));
  return other?.rows.map((row) => {
    const change = changes?.rows.find((one) => one.statistic === row.statistic);
    if (isUndefined(change?.mean)) return row;
    return { ...row, change: pairs.sign * change.mean, change_error: change.standard_error };
  });
}

async function showCard(turn) {
  const own = await tryToAsk({ kind: "heatmap", scope: scope(), head: head() });
  const compared = await comparedRows();
  if (!own || turn !== turns.head) return;
  state.card = own.rows;
  for (const [name, figure] of state.histograms)
    figure.mark(marksOf(state.card.find((row) => row.statistic === name)));
  const titles = Object.fromEntries(
    state.overview.statistics.map(({ name, meaning }) => [name, meaning]),
  );
  const options = {
    label: label(chosen.head),
    statistic: chosen.statistic,
    onStatistic: (name) => choose({ statistic: name }),
    percentile,
    titles,
    compared,
  };
  const scrolled = by("card-rows").scrollTop;
  by("card-rows").replaceChildren(statisticsTable(state.card, options));
  by("card-rows").scrollTop = scrolled;
  showHeadEffects();
  saySentence();
}

// Percentiles need the numbers of all heads, which come after those of the head.
export function fillPercentiles() {
  for (const row of by("card-rows").querySelectorAll("tbody tr")) {
    fillPercentile(row.querySelector(".percentile"), percentile(row.dataset.statistic));
  }
}

export function saySentence() {
  const row = state.card.find((one) => one.statistic === chosen.statistic);
  by("sentence").textContent = chosen.head
    ? sentence(
        label(chosen.head),
        row,
        percentile(chosen.statistic),
        ranked(chosen.statistic).length,
      )
    : "";
}

async function showSubsets(turn) {
  const statistic = chosen.statistic;
  const answer = await tryToAsk({ kind: "subsets", scope: scope(), head: head(), statistic });
  if (!answer || turn !== turns.head) return;
  by("subsets-note").textContent =
    `Mean ${statistic} of ${label(chosen.head)}, ± standard error over ` +
    "documents. The number of sequences is in brackets.";
  const columns = ["subset", ...SUMMARY];
  by("subsets").replaceChildren(
    subsetBars(
      answer.rows,
      statistic,
      state.numbers[statistic]?.uniform_baseline,
      Math.min(by("subsets").clientWidth, MOST_WIDTH),
    ),
    behind({
      plot: by("subsets"),
      askSql: offer,
      columns,
      name: `${label(chosen.head)}-${statistic}-subsets`,
      rows: () => answer.rows.map((row) => columns.map((column) => row[column])),
      sql:
        "SELECT pile_set_name, mean, standard_error, documents, count\nFROM " +
        `subset_summaries\nWHERE ${whereHead()}\n  AND statistic = ` +
        `${literal(statistic)}`,
    }),
  );
}

async function showCurves(turn) {
  const answer = await tryToAsk({ kind: "curves", scope: scope(), head: head() });
  if (!answer || turn !== turns.head) return;
  const cards = answer.rows.map((curve) =>
    curveCard(curve, label(chosen.head), whereHead(), offer),
  );
  const none = { element: html("p", { class: "note" }, "This head has no profiles.") };
  fillAndDraw(by("curves"), cards.length ? cards : [none]);
}

export function beginHead() {
  // The last one is no column of the view.
  const columns = [
    "statistic",
    "mean",
    "standard_error",
    "documents",
    "minimum",
    "maximum",
    "count",
    "undefined",
    "uniform_baseline",
  ];
  by("card").append(
    behind({
      askSql: offer,
      columns,
      name: () => `${label(chosen.head)}-statistics`,
      sql: () => summaries(columns.slice(0, -1), whereHead()),
      rows: () => state.card.map((row) => columns.map((column) => row[column])),
    }),
  );
}
