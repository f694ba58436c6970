// Lines, bars and heat maps of a replication of the literature.
import { pageData } from "./data.js";
import { bars, heatmap, html, lines } from "./draw.js";

const figures = await pageData();

function line(figure, width) {
  const series = figure.series.map((one) => ({ name: one.name, x: one.labels, y: one.values }));
  return lines({ series, xName: figure.x, yName: figure.y, title: figure.title, width: Math.min(width, 620), height: 300 });
}

function bar(figure, width) {
  const names = [...new Set(figure.series.flatMap((one) => one.labels))];
  const series = figure.series.map((one) => ({
    name: one.name,
    values: names.map((name) => {
      const place = one.labels.indexOf(name);
      return place < 0 ? null : one.values[place];
    }),
  }));
  const shown = names.map((name) => (typeof name === "number" ? `${figure.x} ${name}` : name));
  return bars({ names: shown, series, unit: figure.y, title: figure.title, width: Math.min(width, 620) });
}

function heat(figure, width) {
  // A pattern has a row for each query and a column for each key: its cells are square.
  return heatmap({
    rows: figure.rows,
    cols: figure.columns,
    rowName: figure.y,
    colName: figure.x,
    title: figure.title,
    values: figure.z,
    range: [figure.low, figure.high],
    scale: figure.scale,
    square: figure.square,
    width: Math.min(width, 620),
    cellName: (row, col) => `${figure.x} ${figure.columns[col]}, ${figure.y} ${figure.rows[row]}`,
  });
}

const KINDS = { line, bar, heat };

for (const place of document.querySelectorAll("[data-figure]")) {
  const figure = figures[Number(place.dataset.figure)];
  place.append(html("div", {}, KINDS[figure.kind](figure, Math.max(260, place.clientWidth))));
}
