// Draws the figures that are shown, in the colours of the reader's theme.
// The page's own script defines KINDS: the function that draws each kind of figure.
const figures = JSON.parse(document.getElementById("figures").textContent);
const darkTheme = matchMedia("(prefers-color-scheme: dark)");
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

// Plotly reads tags in labels, but names are data.
const plain = (name) => name.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

// Plotly does not read CSS variables, so their values are taken from the page.
function currentTheme() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const lowest = colour("--cell-low");
  return {
    text: colour("--muted"),
    line: colour("--line"),
    series: ["--series-1", "--series-2", "--series-3", "--series-4"].map(colour),
    // Large values stand out from the ground: they are light on dark, and dark on light.
    sequential: darkTheme.matches
      ? [[0, lowest], [0.5, "#2f7f9e"], [1, "#d8f3ef"]]
      : [[0, lowest], [0.5, "#5aa2c4"], [1, "#0b2f5b"]],
    diverging: [[0, "#2b6cb0"], [0.5, lowest], [1, "#c2543c"]],
  };
}

function baseLayout(theme, width, height, margin) {
  return {
    width: Math.floor(width),
    height: Math.ceil(height),
    margin,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: FONT, size: 11, color: theme.text },
    hoverlabel: { font: { family: FONT, size: 13 } },
    showlegend: false,
  };
}

function axis(theme, title, options) {
  return {
    title: { text: title, standoff: 6 },
    zeroline: false,
    gridcolor: theme.line,
    fixedrange: true,
    ...options,
  };
}

function draw() {
  const theme = currentTheme();
  for (const place of document.querySelectorAll("[data-figure]")) {
    // A hidden section has no width to draw in. It is drawn when it is shown.
    if (place.offsetParent === null) continue;
    const figure = figures[Number(place.dataset.figure)];
    const [traces, layout] = KINDS[figure.kind](figure, place.clientWidth, theme);
    Plotly.react(place, traces, layout, { displayModeBar: false, responsive: false });
  }
}

// While a window is resized, there are many events: draw after the last one.
let timer;
addEventListener("resize", () => {
  clearTimeout(timer);
  timer = setTimeout(draw, 150);
});
darkTheme.addEventListener("change", draw);
