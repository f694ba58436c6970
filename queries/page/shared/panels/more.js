// What else a run has: lines by layer, predictions, subsets, and what all heads share.
import { tryToAsk } from "../asking.js";
import { behind, literal } from "../behind.js";
import { plusMinus, table, tableRow } from "../card.js";
import { fillAndDraw, heatmap, html, isUndefined, lines, number, scatter } from "../draw.js";
import { kindOf, rangeOf, summariesSql } from "../numbers.js";
import {
  SUMMARY,
  allHeads,
  by,
  cellAt,
  choose,
  chosen,
  conditions,
  defined,
  facts,
  labelAt,
  matrix,
  place,
  scope,
  state,
  turns,
} from "../state.js";
import { offer } from "./sql.js";

function linesCard(title, meaning, unit, series, query, log = false) {
  const layers = [...Array(state.run.n_layers).keys()];
  const draw = (width) =>
    lines({
      x: layers,
      series,
      xName: "layer",
      yName: unit ?? "",
      log,
      title,
      width,
      height: 220,
    });
  const plot = html("div", { class: "plot" });
  const rows = () => layers.map((layer) => [layer, ...series.map((line) => line.y[layer])]);
  const element = html(
    "figure",
    { class: "card", "data-lines": title },
    html("h3", {}, title),
    html("p", { class: "meaning" }, meaning),
    plot,
    behind({
      plot,
      sql: query,
      askSql: offer,
      name: title,
      columns: ["layer", ...series.map((line) => line.name)],
      rows,
    }),
  );
  return { element, plot, draw };
}

function subsetsCard(rows) {
  const names = [...new Set(rows.map(({ subset }) => subset))].filter(Boolean).sort();
  if (!names.length) return [];
  const means = new Map(
    names.map((name) => [name, allHeads().map(() => ({ mean: null, count: 0 }))]),
  );
  for (const row of rows) if (row.subset) means.get(row.subset)[place([row.layer, row.head])] = row;
  const spread = (i) => {
    const ofHead = defined(names.map((name) => means.get(name)[i].mean));
    return ofHead.length > 1 ? Math.max(...ofHead) - Math.min(...ofHead) : -1;
  };
  const heads = allHeads()
    .filter((i) => spread(i) >= 0)
    .sort((one, other) => spread(other) - spread(one))
    .slice(0, 14);
  const values = names.map((name) => heads.map((i) => means.get(name)[i].mean));
  const counts = names.map((name) => Math.max(...means.get(name).map(({ count }) => count)));
  const draw = (width) =>
    heatmap({
      rows: names.map((name, i) => `${name} (${counts[i]})`),
      cols: heads.map(labelAt),
      rowName: "",
      colName: "head",
      width,
      cell: 72,
      values,
      ...rangeOf(chosen.statistic, values.flat()),
      title: `${chosen.statistic} by subset`,
      cellName: (row, col) => `${names[row]}, ${labelAt(heads[col])}`,
      onChoose: (_, col) => choose({ head: cellAt(heads[col]) }),
    });
  const tableRows = () =>
    names.flatMap((subset) =>
      means
        .get(subset)
        .map((row, i) => [labelAt(i), subset, ...SUMMARY.map((column) => row[column])]),
    );
  const query =
    `SELECT label, pile_set_name, ${SUMMARY.join(", ")}\nFROM ` +
    `subset_summaries\nWHERE ${conditions(chosen)}\n  AND statistic = ` +
    `${literal(chosen.statistic)}`;
  const note =
    `The ${heads.length} heads whose mean ${chosen.statistic} differs most ` +
    "between subsets. The number of sequences is in brackets: with few, a " +
    "mean says little.";
  const plot = html("div", { class: "plot" });
  const element = html(
    "figure",
    { class: "card", "data-subsets": "" },
    html("h3", {}, "By subset"),
    html("p", { class: "note" }, note),
    plot,
    behind({
      plot,
      sql: query,
      askSql: offer,
      rows: tableRows,
      name: `${chosen.statistic}-subsets`,
      columns: ["head", "pile_set_name", ...SUMMARY],
    }),
  );
  return [{ element, plot, draw }];
}

function predictionsCard({ rows: predictions = [] }) {
  if (!predictions.length) return [];
  const hasChange = predictions.some((row) => row.change !== null);
  const names = [
    "prediction",
    "unit",
    "mean",
    ...(hasChange ? ["change from the untouched model"] : []),
  ];
  const row = (one) => {
    const change = hasChange ? [plusMinus(one.change, one.change_error)] : [];
    return tableRow([
      html("td", { title: one.meaning }, one.name),
      one.unit,
      plusMinus(one.mean, one.standard_error),
      ...change,
    ]);
  };
  const content = html(
    "div",
    { class: "scroll" },
    table(names, predictions.map(row), "Predictions"),
  );
  const element = html(
    "section",
    { class: "card", "data-predictions": "" },
    html("h3", {}, "Predictions"),
    content,
  );
  return [{ element }];
}

function dormantCards({ rows, least_induction: induction, least_sink: sink }) {
  return rows.map((block) => {
    const draw = (width) =>
      scatter({
        points: block.points.map((point) => ({ ...point, colour: null })),
        xName: "induction score where the input repeats",
        yName: "sink mass where nothing repeats",
        xRange: [0, 1.04],
        yRange: [0, 1.04],
        title: "Copying against resting",
        width,
      });
    const plot = html("div", { class: "plot" });
    const runs = [block.repeated_run, block.unrepeated_run, block.text_run]
      .filter(Boolean)
      .join(", ");
    const note =
      `${number(block.passing)} heads pass both thresholds (induction score ` +
      `${induction}, sink mass ${sink}), from ${runs}. To the right are ` +
      "heads that copy where something repeats, at the top heads that rest on " +
      "the first token where nothing does.";
    const points = () => block.points.map((point) => [point.name, point.x, point.y]);
    const element = html(
      "section",
      { class: "card", "data-dormant": "" },
      html(
        "h3",
        {},
        "Dormant induction heads of " +
          `${block.model}${block.intervention === "none" ? "" : `, ${block.intervention}`}`,
      ),
      html("p", { class: "note" }, note),
      plot,
      behind({
        plot,
        sql: "FROM dormant_induction_heads",
        askSql: offer,
        name: "dormant",
        columns: ["head", "induction_repeated", "sink_unrepeated"],
        rows: points,
      }),
    );
    return { element, plot, draw };
  });
}

export async function showMore(turn) {
  const { statistic } = chosen;
  const subsets = state.run.subsets.length
    ? await tryToAsk({ kind: "subsets", scope: scope(), statistic })
    : { rows: [] };
  const dormant = await tryToAsk({ kind: "dormant", scope: scope() });
  if (turn !== turns.all) return;
  const ofKind = (kind) => Object.entries(state.numbers).filter(([, one]) => kindOf(one) === kind);
  const byLayer = (name) =>
    state.numbers[name] &&
    matrix(state.numbers[name].mean).map((row) => row.find((value) => !isUndefined(value)) ?? null);
  const charts = [];
  const inCharts = [
    "resid_pre_norm",
    "sink_resid_pre_norm",
    "resid_post_norm",
    "sink_resid_post_norm",
  ];
  const [pre, preFirst, post, postFirst] = inCharts.map(byLayer);
  if (pre && preFirst && post && postFirst) {
    // The stored mean includes position 0.
    const others = (all, first) =>
      all.map((mean, layer) => (state.run.n_ctx * mean - first[layer]) / (state.run.n_ctx - 1));
    const ratio = (first, rest) =>
      first.map((length, layer) => (rest[layer] ? length / rest[layer] : null));
    const [preOthers, postOthers] = [others(pre, preFirst), others(post, postFirst)];
    const norms = [
      ["before the layer, position 0", preFirst],
      ["before the layer, others", preOthers],
      ["after the layer, position 0", postFirst],
      ["after the layer, others", postOthers],
    ];
    const ratios = [
      ["before the layer", ratio(preFirst, preOthers)],
      ["after the layer", ratio(postFirst, postOthers)],
    ];
    const series = (list) => list.map(([name, y]) => ({ name, y }));
    const sqlOf = (what) => `SELECT layer, ${what}\nFROM layer_norms\nWHERE ${conditions(chosen)}`;
    charts.push(
      linesCard(
        "Residual stream",
        "Mean length at position 0 and at the other positions.",
        "euclidean norm",
        series(norms),
        sqlOf("COLUMNS('resid_.*_(first|others)')"),
        true,
      ),
      linesCard(
        "Residual peak",
        "Length at position 0 over the mean of the others.",
        "ratio",
        series(ratios),
        sqlOf("resid_pre_ratio, resid_post_ratio"),
        true,
      ),
    );
  }
  for (const [name] of ofKind("layers")) {
    if (charts.length && inCharts.includes(name)) continue;
    charts.push(
      linesCard(
        name,
        facts(name).meaning,
        facts(name).unit,
        [{ name, y: byLayer(name) }],
        summariesSql(name),
      ),
    );
  }
  const shared = ofKind("model").map(([name, { mean }]) => {
    const [value] = defined(mean);
    return html(
      "div",
      {},
      html("dt", { title: facts(name).meaning }, name),
      html("dd", {}, value === undefined ? "undefined here" : number(value)),
    );
  });
  const grid = html("div", { class: "grid" });
  by("more").replaceChildren(
    grid,
    ...(shared.length
      ? [
          html(
            "section",
            { class: "card" },
            html("h3", {}, "The same for every head"),
            html("dl", { class: "facts", id: "shared" }, ...shared),
          ),
        ]
      : []),
  );
  fillAndDraw(grid, [
    ...predictionsCard(state.details),
    ...subsetsCard(subsets?.rows ?? []),
    ...charts,
    ...(dormant ? dormantCards(dormant) : []),
  ]);
}
