// The panels beside the heatmap: a head's statistics, its subsets of the Pile, sequences, and SQL.
import { bars, html, number, tokens } from "./draw.js";

function table(columns, rows, caption) {
  const heads = columns.map((column) => html("th", { scope: "col", title: column.title ?? null, class: column.words ? "words" : null }, column.name));
  return html("table", {},
    html("caption", { class: "visually-hidden" }, caption),
    html("thead", {}, html("tr", {}, ...heads)),
    html("tbody", {}, ...rows));
}

// Every statistic of a head. `percentile(name)` is null until it is known; `choose(name)` shows one.
export function cardTable(rows, chosen, percentile, choose) {
  const columns = [
    { name: "statistic" }, { name: "mean" }, { name: "± s.e.", title: "Standard error of the mean, over documents" },
    { name: "uniform baseline", title: "What uniform attention would score" },
    { name: "percentile", title: "Share of the run's heads with a smaller mean" },
    { name: "smallest" }, { name: "largest" }, { name: "undefined", title: "Sequences on which it is undefined" },
  ];
  const most = Math.max(...rows.map((row) => row.count), 0);
  return table(columns, rows.map((row) => {
    const rank = percentile(row.statistic);
    const name = html("button", { type: "button", class: "plain", onclick: () => choose(row.statistic) }, row.statistic);
    const cells = [
      number(row.mean), number(row.standard_error), row.uniform_baseline === null ? "" : number(row.uniform_baseline),
      rank === null ? "" : `${Math.round(rank * 100)} %`, number(row.minimum), number(row.maximum),
      row.count === most ? "" : number(most - row.count),
    ];
    return html("tr", { "aria-selected": String(row.statistic === chosen), "data-statistic": row.statistic },
      html("td", {}, name), ...cells.map((cell) => html("td", {}, cell)));
  }), "Every statistic of the chosen head");
}

// The mean of a statistic in each subset.
export function subsetBars(rows, statistic) {
  return bars({
    names: rows.map((row) => row.subset ?? "no subset"),
    values: rows.map((row) => row.mean),
    errors: rows.map((row) => row.standard_error),
    title: `${statistic} by subset of the Pile`,
  });
}

// Sequences with the values of some statistics. `showText(sequence)` shows all of one.
export function extremesTable(rows, statistics, subsets, showText) {
  const columns = [{ name: "sequence" }, ...(subsets ? [{ name: "subset", words: true }] : []), ...statistics.map((name) => ({ name }))];
  return table(columns, rows.flatMap((row) => {
    const button = html("button", { type: "button", class: "plain", title: place(row), onclick: () => showText(row.sequence) }, number(row.sequence));
    const values = statistics.map((name) => html("td", {}, number(row[name])));
    const subset = subsets ? [html("td", { class: "words" }, row.subset ?? "–")] : [];
    return [
      html("tr", { "data-sequence": row.sequence }, html("td", {}, button), ...subset, ...values),
      html("tr", { class: "text" }, html("td", { colspan: columns.length, class: "words", "data-text": row.sequence })),
    ];
  }), "Sequences in which the statistic is most extreme");
}

function place(row) {
  return row.file === null ? "The whole sequence" : `The whole sequence, from ${row.file}, row ${row.row}`;
}

// Token strings; those that the statistic is about are marked. A dash stands for tokens that were left out.
export function text(row, isWhole) {
  const shown = tokens(row.tokens, { names: row.tokens.map((_, position) => position), marked: row.marked });
  if (!isWhole && row.tokens.length < row.n_tokens) shown.append(` … ${number(row.n_tokens - row.tokens.length)} more tokens`);
  return shown;
}

// The rows of an answer in SQL.
export function sqlTable(answer) {
  const rows = answer.rows.map((row) => html("tr", {}, ...row.map((value) =>
    html("td", { class: typeof value === "string" ? "words" : null }, typeof value === "number" || value === null ? number(value) : String(value)))));
  const isText = (column) => answer.rows.some((row) => typeof row[column] === "string");
  return table(answer.columns.map((name, column) => ({ name, words: isText(column) })), rows, "The answer");
}
