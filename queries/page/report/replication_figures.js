// Lines, bars, heat maps and points of a replication of the literature.
import { pageData } from "./data.js";
import { bars, heatmap, html, lines, scatter } from "./draw.js";

const figures = await pageData();

// A published line has the colour of the measured one before it, and dashes.
function line({ series, x, y, title }, width) {
  const paired =
    series.length > 1 &&
    series.every(({ name }, i) => i % 2 === 0 || name === `${series[i - 1].name}, published`);
  return lines({
    series: series.map((one) => ({ name: one.name, x: one.labels, y: one.values })),
    xName: x,
    yName: y,
    title,
    width,
    height: 300,
    paired,
  });
}

function points({ series, x, y, title }, width) {
  const heads = series.flatMap(({ name, labels, values }) =>
    labels.map((at, i) => ({ name, x: at, y: values[i], label: true })),
  );
  return scatter({ points: heads, xName: x, yName: y, title, width });
}

function bar(figure, width) {
  const names = [...new Set(figure.series.flatMap((one) => one.labels))];
  const series = figure.series.map(({ name, labels, values }) => ({
    name,
    values: names.map((other) => values[labels.indexOf(other)]),
  }));
  const shown = names.map((name) => (typeof name === "number" ? `${figure.x} ${name}` : name));
  return bars({ names: shown, series, unit: figure.y, title: figure.title, width });
}

// A pattern has a row for each query and a column for each key: its cells are square.
function heat({ rows, columns, x, y, z, low, high, scale, square, title }, width) {
  const cellName = (row, col) => `${x} ${columns[col]}, ${y} ${rows[row]}`;
  return heatmap({
    rows,
    cols: columns,
    rowName: y,
    colName: x,
    title,
    values: z,
    range: [low, high],
    scale,
    square,
    width,
    cellName,
  });
}

const KINDS = { line, bar, heat, points };

for (const place of document.querySelectorAll("[data-figure]")) {
  const figure = figures[Number(place.dataset.figure)];
  place.append(
    html("div", {}, KINDS[figure.kind](figure, Math.min(620, Math.max(260, place.clientWidth)))),
  );
}
