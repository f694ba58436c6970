// Lines, bars and heat maps of a system; bars with names lie, so that the names can be read.
const label = (value) => (typeof value === "string" ? plain(value) : value);
const named = (values) => values.some((value) => typeof value === "string");

function colours(count, t) {
  if (count <= 2) return t.series;
  const light = dark.matches ? 68 : 40;
  return Array.from({ length: count }, (_, i) => `hsl(${Math.round((200 + (360 * i) / count) % 360)} 55% ${light}%)`);
}

function labelAxis(t, title, values, more) {
  return axis(t, plain(title), { type: named(values) ? "category" : "linear", automargin: true, ...more });
}

function chart(f, width, height, t) {
  const layout = base(t, Math.min(width, 620), height, { l: 58, r: 14, t: 8, b: 44 });
  layout.showlegend = f.series.length > 1;
  layout.legend = { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 };
  return layout;
}

function line(f, width, t) {
  const shades = colours(f.series.length, t);
  const traces = f.series.map((s, i) => ({
    type: "scatter", mode: "lines+markers", name: plain(s.name), x: s.labels.map(label), y: s.values,
    line: { color: shades[i], width: 2 }, marker: { size: 5 }, cliponaxis: false,
    hovertemplate: "%{fullData.name} %{x}  %{y:.4~g}<extra></extra>",
  }));
  const layout = chart(f, width, 320, t);
  layout.xaxis = labelAxis(t, f.x, f.series.flatMap((s) => s.labels), { showgrid: false });
  layout.yaxis = axis(t, plain(f.y), { rangemode: "tozero" });
  return [traces, layout];
}

function bar(f, width, t) {
  const labels = f.series.flatMap((s) => s.labels), lying = named(labels);
  const shades = colours(f.series.length, t);
  const traces = f.series.map((s, i) => {
    const names = s.labels.map(label);
    return {
      type: "bar", orientation: lying ? "h" : "v", name: plain(s.name), marker: { color: shades[i] },
      x: lying ? s.values : names, y: lying ? names : s.values,
      hovertemplate: `%{fullData.name} %{${lying ? "y" : "x"}}  %{${lying ? "x" : "y"}:.4~g}<extra></extra>`,
    };
  });
  const layout = chart(f, width, lying ? Math.max(160, 80 + 15 * labels.length) : 320, t);
  const values = axis(t, plain(f.y), {});
  const names = labelAxis(t, f.x, labels, { showgrid: false, ...(lying && { autorange: "reversed", dtick: 1 }) });
  [layout.xaxis, layout.yaxis] = lying ? [values, names] : [names, values];
  return [traces, layout];
}

function heat(f, width, t) {
  const trace = {
    type: "heatmap", x: f.columns.map(label), y: f.rows.map(label), z: f.z, zmin: f.low, zmax: f.high,
    colorscale: t[f.scale], hoverongaps: false, hovertemplate: "%{x}, %{y}  %{z:.4~g}<extra></extra>",
    colorbar: { thickness: 8, outlinewidth: 0, xpad: 8, tickfont: { size: 10 } },
  };
  const height = 60 + Math.max(120, Math.min(460, 24 * f.rows.length));
  const layout = base(t, Math.min(width, 620), height, { l: 58, r: 14, t: 8, b: 44 });
  layout.xaxis = labelAxis(t, f.x, f.columns, { showgrid: false });
  layout.yaxis = labelAxis(t, f.y, f.rows, { showgrid: false, autorange: "reversed" });
  return [[trace], layout];
}

const KINDS = { line, bar, heat };
draw();
