// Draws the figures that are shown, in the colours of the reader's theme. KINDS, what draws each kind, is the page's own.
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

// Plotly reads tags in labels; names are data.
const plain = (name) => name.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

function theme() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const low = colour("--cell-low");
  return {
    text: colour("--muted"), line: colour("--line"), ground: colour("--ground"),
    series: ["--series-1", "--series-2", "--series-3", "--series-4"].map(colour),
    sequential: dark.matches
      ? [[0, low], [0.5, "#2f7f9e"], [1, "#d8f3ef"]]
      : [[0, low], [0.5, "#5aa2c4"], [1, "#0b2f5b"]],
    diverging: [[0, "#2b6cb0"], [0.5, low], [1, "#c2543c"]],
  };
}

function base(t, width, height, margin) {
  return {
    width: Math.floor(width), height: Math.ceil(height), margin,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: FONT, size: 11, color: t.text },
    hoverlabel: { font: { family: FONT, size: 13 } },
    showlegend: false,
  };
}

function axis(t, title, more) {
  return { title: { text: title, standoff: 6 }, zeroline: false, gridcolor: t.line, fixedrange: true, ...more };
}

function draw() {
  const t = theme();
  for (const place of document.querySelectorAll("[data-figure]")) {
    if (place.offsetParent === null) continue;
    const figure = figures[Number(place.dataset.figure)];
    const [traces, layout] = KINDS[figure.kind](figure, place.clientWidth, t);
    Plotly.react(place, traces, layout, { displayModeBar: false, responsive: false });
  }
}

let timer;
addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(draw, 150); });
dark.addEventListener("change", draw);
