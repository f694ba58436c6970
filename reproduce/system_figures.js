// Lines, bars and heat maps of a system of the literature.
const label = (value) => (typeof value === "string" ? plain(value) : value);
const haveNames = (values) => values.some((value) => typeof value === "string");

// One colour for each of `count` series: hues around the circle if the theme has too few.
function seriesColours(count, theme) {
  if (count <= 2) return theme.series;
  const lightness = darkTheme.matches ? 68 : 40;
  const hue = (i) => Math.round((200 + (360 * i) / count) % 360);
  return Array.from({ length: count }, (_, i) => `hsl(${hue(i)} 55% ${lightness}%)`);
}

function labelAxis(theme, title, values, options) {
  const type = haveNames(values) ? "category" : "linear";
  return axis(theme, plain(title), { type, automargin: true, ...options });
}

function chartLayout(figure, width, height, theme) {
  const margin = { l: 58, r: 14, t: 8, b: 44 };
  const layout = baseLayout(theme, Math.min(width, 620), height, margin);
  layout.showlegend = figure.series.length > 1;
  layout.legend = { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 };
  return layout;
}

function line(figure, width, theme) {
  const colours = seriesColours(figure.series.length, theme);
  const traces = figure.series.map((series, i) => ({
    type: "scatter",
    mode: "lines+markers",
    name: plain(series.name),
    x: series.labels.map(label),
    y: series.values,
    line: { color: colours[i], width: 2 },
    marker: { size: 5 },
    cliponaxis: false,
    hovertemplate: "%{fullData.name} %{x}  %{y:.4~g}<extra></extra>",
  }));
  const layout = chartLayout(figure, width, 320, theme);
  const labels = figure.series.flatMap((series) => series.labels);
  layout.xaxis = labelAxis(theme, figure.x, labels, { showgrid: false });
  layout.yaxis = axis(theme, plain(figure.y), { rangemode: "tozero" });
  return [traces, layout];
}

function bar(figure, width, theme) {
  const labels = figure.series.flatMap((series) => series.labels);
  // Bars with names are horizontal, so that the names can be read.
  const isHorizontal = haveNames(labels);
  const colours = seriesColours(figure.series.length, theme);
  const traces = figure.series.map((series, i) => {
    const names = series.labels.map(label);
    return {
      type: "bar",
      orientation: isHorizontal ? "h" : "v",
      name: plain(series.name),
      marker: { color: colours[i] },
      x: isHorizontal ? series.values : names,
      y: isHorizontal ? names : series.values,
      hovertemplate: isHorizontal
        ? "%{fullData.name} %{y}  %{x:.4~g}<extra></extra>"
        : "%{fullData.name} %{x}  %{y:.4~g}<extra></extra>",
    };
  });
  const height = isHorizontal ? Math.max(160, 80 + 15 * labels.length) : 320;
  const layout = chartLayout(figure, width, height, theme);
  const valueAxis = axis(theme, plain(figure.y), {});
  // The first bar is at the top, and every bar has its name.
  const order = isHorizontal ? { autorange: "reversed", dtick: 1 } : {};
  const nameAxis = labelAxis(theme, figure.x, labels, { showgrid: false, ...order });
  layout.xaxis = isHorizontal ? valueAxis : nameAxis;
  layout.yaxis = isHorizontal ? nameAxis : valueAxis;
  return [traces, layout];
}

function heat(figure, width, theme) {
  const trace = {
    type: "heatmap",
    x: figure.columns.map(label),
    y: figure.rows.map(label),
    z: figure.z,
    zmin: figure.low,
    zmax: figure.high,
    colorscale: theme[figure.scale],
    hoverongaps: false,
    hovertemplate: "%{x}, %{y}  %{z:.4~g}<extra></extra>",
    colorbar: { thickness: 8, outlinewidth: 0, xpad: 8, tickfont: { size: 10 } },
  };
  // A pattern has a row for each query and a column for each key: its cells are square.
  const height = figure.square
    ? 60 + Math.min(width, 560)
    : 60 + Math.max(120, Math.min(460, 24 * figure.rows.length));
  const margin = { l: 58, r: 14, t: 8, b: 44 };
  const layout = baseLayout(theme, Math.min(width, 620), height, margin);
  layout.xaxis = labelAxis(theme, figure.x, figure.columns, { showgrid: false });
  const order = { showgrid: false, autorange: "reversed" };
  const shape = figure.square ? { scaleanchor: "x", constrain: "domain" } : {};
  layout.yaxis = labelAxis(theme, figure.y, figure.rows, { ...order, ...shape });
  if (figure.square) layout.xaxis.constrain = "domain";
  return [[trace], layout];
}

const KINDS = { line, bar, heat };
draw();
