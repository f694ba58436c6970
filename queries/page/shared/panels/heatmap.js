// The heatmap of all heads, and what it is compared with.
import { aboutHeads, sqlOfHeads } from "../asking.js";
import { behind, literal } from "../behind.js";
import { plusMinus } from "../card.js";
import { heatmap, html, isUndefined, number, smallText } from "../draw.js";
import {
  comparison,
  differenceLooks,
  finding,
  rangeOf,
  sampled,
  strongest,
  summariesSql,
} from "../numbers.js";
import { isLive } from "../source.js";
import {
  MOST_Q,
  SUMMARY,
  allHeads,
  by,
  choose,
  chosen,
  conditions,
  defined,
  facts,
  label,
  labelAt,
  matrix,
  place,
  scope,
  sectionName,
  state,
  turns,
} from "../state.js";
import { offer } from "./sql.js";

// A heatmap of all heads in which a head can be chosen. Without names of axes it is a small one.
export function headMap(list, options) {
  return heatmap({
    rows: state.run.n_layers,
    cols: state.run.n_heads,
    values: matrix(list),
    chosen: chosen.head,
    onChoose: (row, col) => choose({ head: [row, col] }),
    ...options,
  });
}

export async function showHeatmap(turn) {
  const statistic = chosen.statistic;
  const about = await aboutHeads(scope(), statistic);
  if (turn !== turns.all || !about) return false;
  state.numbers = about.values;
  state.compared = await comparison(statistic);
  if (turn !== turns.all) return false;
  const own = state.numbers[statistic] ?? {
    mean: Array(state.run.n_layers * state.run.n_heads).fill(null),
    standard_error: [],
    count: [],
    undefined: [],
    documents: [],
    degrees_of_freedom: [],
  };
  const { meaning, unit, formula, source } = facts(statistic);
  by("meaning").replaceChildren(
    meaning,
    ...(formula ? [html("br"), html("code", {}, formula)] : []),
    ...(source ? [html("br"), `Source: ${source}`] : []),
  );
  const hadFocus = by("heatmap").contains(document.activeElement);
  const looks = rangeOf(statistic, [...own.mean, ...(state.compared?.theirs.mean ?? [])]);
  const room = by("heatmap").clientWidth;
  const options = {
    ...looks,
    width: state.compared && room > 620 ? (room - 50) / 3 : Math.min(room, 720),
    cell: 72,
    onHover: (row, col) => {
      by("readout").textContent = row === undefined ? "" : says([row, col]);
    },
  };
  const figure = headMap(own.mean, { ...options, title: `${statistic} by layer and head` });
  state.map = { figures: [figure], values: own.mean, shown: own.mean };
  if (state.compared) {
    const second = headMap(state.compared.theirs.mean, {
      ...options,
      title: `${statistic} in ${sectionName(chosen.other)}`,
    });
    const third = headMap(state.compared.mean, {
      ...options,
      ...differenceLooks(state.compared, own.mean),
      title: `Difference of ${statistic}`,
    });
    state.map.figures.push(second, third);
    const captions = [sectionName(chosen), sectionName(chosen.other), "second minus first"];
    by("heatmap").replaceChildren(
      ...state.map.figures.map((one, i) =>
        html("figure", {}, html("figcaption", {}, captions[i]), one),
      ),
    );
  } else by("heatmap").replaceChildren(figure);
  document.body.classList.toggle("comparing", Boolean(state.compared));
  performance.measure("heatmap");
  if (hadFocus) figure.querySelector("[tabindex='0']")?.focus();
  if (!chosen.head) chosen.head = strongest();
  state.map.figures.forEach((one) => one.choose(...(chosen.head ?? [])));
  by("finding").textContent = finding(statistic);
  const how = state.compared?.isPaired
    ? "Differences are means over the same sequences, with and without the intervention."
    : "The error of a difference takes the two for independent. Shared " +
      "documents make it too large: run_changes has that of pairs.";
  const notes = [
    unit && `Unit: ${unit}.`,
    isLive && about.source === "rollups"
      ? "Means of all rows, from roll-ups."
      : sampled(about.every),
    definedNote(own),
  ];
  if (state.compared)
    notes.push(
      how,
      `In a pale cell q is above ${MOST_Q}: of the heads in full colour, at ` +
        "most 5 % are expected not to differ.",
    );
  by("heat-note").textContent = notes.filter(Boolean).join(" ");
  return true;
}

function definedNote(own) {
  const most = Math.max(0, ...own.undefined);
  if (!most) return "";
  const least = Math.min(...defined(own.count).filter((count, i) => !isUndefined(own.mean[i])));
  return Number.isFinite(least)
    ? `Defined in ${number(least)} of ${number(least + most)} sequences.`
    : "Undefined in every sequence.";
}

function says(cell) {
  const i = place(cell);
  const own = state.numbers[chosen.statistic];
  if (state.map.shown !== state.map.values)
    return `${label(cell)}: ${chosen.statistic} ${number(state.map.shown[i])} under the brush`;
  const here = `${label(cell)}: ${plusMinus(state.map.shown[i], own?.standard_error[i])}`;
  if (!state.compared) return here;
  const [there, difference] = [state.compared.theirs, state.compared].map(
    ({ mean, standard_error }) => plusMinus(mean[i], standard_error[i]),
  );
  return `${here} → ${there}; difference ${difference}, q ${smallText(state.compared.q[i])}`;
}

// Other means in the same cells, which is faster than another drawing.
export function repaint(means) {
  state.map.shown = means;
  state.map.figures[0].paint(matrix(means));
}

function comparedSql() {
  const name = literal(chosen.statistic);
  if (chosen.other.run_id === chosen.run_id && chosen.intervention === "none") {
    return (
      "SELECT layer, head, untouched, intervened, change, standard_error, q, " +
      `documents, pairs\nFROM effects\nWHERE ${conditions(chosen.other)}\n` +
      `  AND statistic = ${name}`
    );
  }
  const of = (table, { run_id, intervention }) =>
    `${table}.run_id = ${literal(run_id)} AND ${table}.intervention = ${literal(intervention)}`;
  return `SELECT layer, head, a.mean, b.mean AS other_mean, b.mean - a.mean AS difference,
  sqrt(a.standard_error ** 2 + b.standard_error ** 2) AS standard_error
FROM head_summaries a JOIN head_summaries b USING (layer, head, statistic)
WHERE statistic = ${name}
  AND ${of("a", chosen)}
  AND ${of("b", chosen.other)}`;
}

export function beginHeatmap() {
  by("statistic").onchange = ({ target }) => choose({ statistic: target.value });
  by("own").onchange = ({ target }) => choose({ ownRange: target.checked });
  const other = ["other_mean", "difference", "difference_standard_error", "q"];
  const rows = () => {
    const numbers = state.numbers[chosen.statistic];
    const { compared } = state;
    const beside = (i) => [
      compared.theirs.mean[i],
      compared.mean[i],
      compared.standard_error[i],
      compared.q[i],
    ];
    return allHeads().map((i) => [
      labelAt(i),
      ...SUMMARY.map((name) => numbers[name][i]),
      ...(compared ? beside(i) : []),
    ]);
  };
  by("heat-card").append(
    behind({
      askSql: offer,
      plot: by("heatmap"),
      name: () => chosen.statistic,
      rows,
      columns: () => ["head", ...SUMMARY, ...(state.compared ? other : [])],
      sql: () =>
        state.compared ? comparedSql() : (sqlOfHeads(scope()) ?? summariesSql(chosen.statistic)),
    }),
  );
}
