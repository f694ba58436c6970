// Heatmaps, lines and points of the report, and which section is shown.
const LARGEST_CELL = 34;

function layerTicks(count, mostTicks) {
  const step = Math.max(1, Math.ceil(count / mostTicks));
  return { tickmode: "linear", tick0: 0, dtick: step, showgrid: false };
}

function heatmap(figure, width, theme) {
  const rowCount = figure.z.length;
  const columnCount = figure.z[0].length;
  // Rows are layers, or have names: the parts of the Pile.
  const rowNames = figure.rows?.map(plain);
  const longestName = figure.rows ? Math.max(...figure.rows.map((name) => name.length)) : 0;
  const nameWidth = figure.rows ? Math.min(220, 14 + 6.2 * longestName) : 46;
  const margin = { l: nameWidth, r: 62, t: 6, b: 40 };
  const room = Math.floor(width - margin.l - margin.r);
  const cell = Math.max(4, Math.min(LARGEST_CELL, room / columnCount));
  const across = cell * columnCount;
  const down = cell * rowCount;
  const gap = cell > 12 ? 1 : 0;
  const trace = {
    type: "heatmap",
    z: figure.z,
    zmin: figure.low,
    zmax: figure.high,
    colorscale: theme[figure.scale],
    hoverongaps: false,
    xgap: gap,
    ygap: gap,
    hovertemplate: figure.rows
      ? "%{y}, layer %{x}  %{z:.3~g}<extra></extra>"
      : "L%{y}H%{x}  %{z:.3~g}<extra></extra>",
    colorbar: {
      thickness: 8, outlinewidth: 0, xpad: 8, nticks: 4, tickfont: { size: 10 },
      lenmode: "pixels", len: Math.max(60, down), yanchor: "top", y: 1, ypad: 0,
    },
  };
  if (rowNames) trace.y = rowNames;
  const plotHeight = Math.max(down, 60);
  const layout = baseLayout(
    theme, margin.l + across + margin.r, margin.t + plotHeight + margin.b, margin,
  );
  // The colour bar needs room, also in a model of one or two layers: then the cells stay square,
  // at the top.
  const domain = [1 - down / plotHeight, 1];
  layout.xaxis = axis(theme, figure.x, {
    ...layerTicks(columnCount, across / 22),
    range: [-0.5, columnCount - 0.5],
    anchor: "y",
  });
  const rowTicks = rowNames
    ? { showgrid: false, tickmode: "array", tickvals: rowNames }
    : layerTicks(rowCount, Math.max(1, down / 16));
  // "layer (0 at top)" is too long for a low heatmap.
  const rowTitle = down < 110 ? figure.y.slice(0, 5) : figure.y;
  // The range runs down: layer 0 is at the top.
  layout.yaxis = axis(theme, rowTitle, { ...rowTicks, range: [rowCount - 0.5, -0.5], domain });
  return [[trace], layout];
}

function lines(figure, width, theme) {
  const hasSeveral = figure.series.length > 1;
  const traces = figure.series.map((series, i) => {
    // A percent sign would begin a field of the template.
    const name = hasSeveral ? `${series.name.replaceAll("%", "")}, ` : "";
    return {
      type: "scatter",
      mode: "lines+markers",
      name: series.name,
      x: series.y.map((_, layer) => layer),
      y: series.y,
      line: { color: theme.series[i], width: 2, dash: i >= 2 ? "dot" : "solid" },
      marker: { size: 5 },
      hovertemplate: `${name}layer %{x}  %{y:.4~g}<extra></extra>`,
    };
  });
  const positive = figure.series.flatMap((series) => series.y).filter((y) => y > 0);
  const scale = figure.log
    ? { type: "log", ...decadeTicks(Math.min(...positive), Math.max(...positive)) }
    : { rangemode: "tozero" };
  const margin = { l: 58, r: 14, t: 8, b: hasSeveral ? 84 : 44 };
  const layout = baseLayout(theme, Math.min(width, 620), 300, margin);
  layout.showlegend = hasSeveral;
  layout.legend = { orientation: "h", y: -0.2, yanchor: "top", x: 0 };
  const layerCount = figure.series[0].y.length;
  layout.xaxis = axis(theme, "layer", { ...layerTicks(layerCount, 16), showgrid: false });
  layout.yaxis = axis(theme, figure.y, scale);
  return [traces, layout];
}

// Ticks of a logarithmic axis. Within about a decade Plotly labels every digit. Over more it would
// write 2 and 5 for 20 and 50.
function decadeTicks(low, high) {
  const decades = Math.log10(high / low);
  // Also if there are no values, and the number of decades is NaN.
  if (!(decades > 0.7)) return {};
  const digits = decades > 3 ? [1] : [1, 2, 5];
  const tickvals = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const digit of digits) tickvals.push(Number(`${digit}e${power}`));
  }
  return { tickvals, ticktext: tickvals.map(String) };
}

function points(figure, width, theme) {
  const trace = {
    type: "scatter",
    mode: "markers+text",
    x: figure.points.map((point) => point.x),
    y: figure.points.map((point) => point.y),
    text: figure.points.map((point) => (point.label ? point.name : "")),
    hovertext: figure.points.map((point) => point.name),
    textposition: "top center",
    marker: {
      size: 9,
      color: figure.points.map((point) => (point.on ? theme.series[1] : theme.series[0])),
      opacity: 0.8,
    },
    hovertemplate: "%{hovertext}  induction %{x:.3~g}, sink %{y:.3~g}<extra></extra>",
  };
  const layout = baseLayout(theme, Math.min(width, 520), 380, { l: 58, r: 14, t: 8, b: 48 });
  layout.xaxis = axis(theme, figure.x, { range: [-0.02, 1.05] });
  layout.yaxis = axis(theme, figure.y, { range: [-0.02, 1.08] });
  return [[trace], layout];
}

const KINDS = { heatmap, lines, points };

const sections = document.querySelectorAll("section.run");
const buttons = document.querySelectorAll("nav button");

function show(shown) {
  sections.forEach((section, i) => (section.hidden = i !== shown));
  buttons.forEach((button, i) => button.setAttribute("aria-pressed", i === shown));
  draw();
}

buttons.forEach((button, i) => button.addEventListener("click", () => show(i)));
show(0);
