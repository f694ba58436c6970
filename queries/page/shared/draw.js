// Figures of our pages as SVG, drawn by hand: each function returns an element.
//
// Plain ES modules. The explorer serves these files as they are. `queries/report/html_page.py`
// joins them for a page that is one file: it takes the words `export` and the imports away, so
// names are unique over all files of a page. A text from data is only ever set as textContent.
import { diverging, inkOn, sequential, seriesColour } from "./colours.js";

const SVG = "http://www.w3.org/2000/svg";
const SMALLEST = 1e-12;

export const isUndefined = (value) => value === null || value === undefined || Number.isNaN(value);

// Sets attributes of an element, and appends children to it. `onclick` and the like are listeners.
export function set(node, attributes, ...children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (isUndefined(value) || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => !isUndefined(child)));
  return node;
}

// An element of SVG, and one of HTML.
export const svg = (name, attributes = {}, ...children) =>
  set(document.createElementNS(SVG, name), attributes, ...children);
export const html = (name, attributes = {}, ...children) =>
  set(document.createElement(name), attributes, ...children);

// A name that may go over lines behind its underscores, and nowhere within its words.
export const breakable = (name) =>
  name.split(/(?<=_)/).flatMap((part, i) => (i ? [html("wbr"), part] : [part]));

// A number for people: four digits, a dash if it is undefined.
export function number(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (Number.isInteger(x) || Math.abs(x) >= 1e4)
    return Math.round(x).toLocaleString("en").replace("-", "−");
  const short = Number(x.toPrecision(4));
  return (Math.abs(x) < 1e-5 ? Number(x.toPrecision(3)).toExponential() : String(short)).replaceAll(
    "-",
    "−",
  );
}

// A number below which none says more.
export const smallText = (x) =>
  !isUndefined(x) && x > 0 && x < SMALLEST ? `< ${SMALLEST}` : number(x);

// A number of an axis: short, because its neighbours say the rest.
function tickText(x) {
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  if (size >= 1e6 || (size > 0 && size < 1e-3))
    return Number(x.toPrecision(2)).toExponential().replace("e+", "e").replaceAll("-", "−");
  return String(Number(x.toPrecision(3))).replace("-", "−");
}

// About `most` round numbers between two ends.
export function roundTicks(low, high, most = 5, onlyWhole = false) {
  if (!(high > low)) return [low];
  // Between layers or positions there is nothing.
  const rough = Math.max((high - low) / most, onlyWhole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
    ticks.push(i * step);
  return ticks;
}

// Powers of ten, with 2 and 5 between them if there are few.
function decadeTicks(low, high) {
  const first = Math.floor(Math.log10(low));
  const powers = [...Array(Math.ceil(Math.log10(high)) - first + 1).keys()].map(
    (power) => first + power,
  );
  const digits = high / low > 1e3 ? [1] : [1, 2, 5];
  const ticks = powers.flatMap((power) => digits.map((digit) => Number(`${digit}e${power}`)));
  const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  return inside.length > 1 ? inside : roundTicks(low, high, 4);
}

export const MOST_WIDTH = 620; // Of a figure.

// Fills a place with elements, and then the plot of each with a figure as wide as it has become.
export function fillAndDraw(place, cards) {
  place.replaceChildren(...cards.map(({ element }) => element));
  for (const { plot, draw } of cards)
    plot?.append(draw(Math.min(plot.clientWidth, MOST_WIDTH)));
}

// The drawing area of a figure: its parts are placed in units of about a pixel.
function canvas(width, height, attributes = {}, ...children) {
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, width, height, class: "figure", ...attributes },
    ...children,
  );
}

const text = (x, y, content, attributes = {}) =>
  svg("text", { x, y, ...attributes }, String(content));
export const titled = (mark, content) => set(mark, {}, svg("title", {}, content));

// How wide a text is, in Latin letters: a Chinese, Japanese or Korean character is as wide as two.
const WIDE = /[\p{sc=Han}\p{sc=Hangul}\p{sc=Hiragana}\p{sc=Katakana}\uff00-\uff60]/u;
const lettersOf = (name) =>
  [...String(name)].reduce((sum, letter) => sum + (WIDE.test(letter) ? 2 : 1), 0);

// A name that ends at x. It has at most so many letters, and all as its title.
function shortText(x, y, name, limit, attributes = {}) {
  const whole = String(name);
  let beginning = "";
  for (const letter of whole) {
    if (lettersOf(beginning + letter) > limit) break;
    beginning += letter;
  }
  const short = lettersOf(whole) > limit + 1 ? `${beginning}…` : whole;
  return titled(text(x, y, short, { "text-anchor": "end", ...attributes }), whole);
}

const indices = (names) => (typeof names === "number" ? [...Array(names).keys()] : names);

function everyOther(count, most) {
  const step = Math.max(1, Math.ceil(count / Math.max(1, most)));
  // 1, 2, 5, 10, … are easier to count in.
  const round = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((size) => size >= step) ?? step;
  return (index) => index % round === 0;
}

const STRIPES = 32; // Of a legend.
const KEY_WIDTH = 120;

// A colour for each value of a range: a function.
export function colourOf([low, high], scale) {
  const colours = scale === "diverging" ? diverging : sequential;
  return (value) => colours(high > low ? (value - low) / (high - low) : 0.5);
}

function legend(x, y, width, [low, high], scale) {
  const colour = colourOf([low, high], scale);
  const fill = (i) => colour(low + ((i + 0.5) / STRIPES) * (high - low));
  const stripe = (_, i) =>
    svg("rect", {
      x: x + (i * width) / STRIPES,
      y,
      width: width / STRIPES + 0.4,
      height: 6,
      fill: fill(i),
    });
  const middle =
    scale === "diverging"
      ? text(x + width / 2, y + 18, tickText((low + high) / 2), { "text-anchor": "middle" })
      : null;
  const end = text(x + width, y + 18, tickText(high), { "text-anchor": "end" });
  return svg(
    "g",
    { class: "legend", "aria-hidden": "true" },
    Array.from({ length: STRIPES }, stripe),
    text(x, y + 18, tickText(low)),
    end,
    middle,
  );
}

// Values by row and column, as colours.
//
// `rows` and `cols` are names, or how many there are. Arrow keys move between cells, Enter chooses.
// `faint(row, col)` says which cells are pale. `square` keeps cells square however many there are.
// `isSmall` leaves out the names of rows and columns.
// `onChoose(row, col)` and `onHover(row, col)` are optional. `cellName(row, col)` names a cell.
// The element has methods `choose(row, col)`, which moves the mark, and `paint(values)`.
export function heatmap(options) {
  const {
    range,
    scale = "sequential",
    title = "",
    onChoose,
    onHover,
    chosen,
    faint,
    isSmall,
  } = options;
  const rows = indices(options.rows);
  const cols = indices(options.cols);
  const { rowName = "layer", colName = "head", width = 340 } = options;
  const cellName = options.cellName ?? ((row, col) => `L${rows[row]}H${cols[col]}`);
  const longest = Math.max(...rows.map(lettersOf));
  // Numbers leave room for the name of their axis. Names say themselves what they are.
  const haveNumbers = rows.every((name) => typeof name === "number");
  const left = isSmall ? 2 : haveNumbers ? 22 + 6 * longest : Math.min(150, 12 + 6 * longest);
  const top = 4;
  const widest = (width - left - 2) / cols.length;
  const across = options.square
    ? Math.min(26, widest, 420 / rows.length)
    : Math.min(options.cell ?? 26, widest);
  const down = options.square
    ? across
    : Math.max(haveNumbers ? 5 : 12, Math.min(across, 340 / rows.length));
  const gap = Math.min(across, down) > 9 ? 1 : 0;
  const bottom = top + down * rows.length;
  const right = left + across * cols.length;
  // Names of columns that have no room side by side stand upright.
  const longestCol = 6.4 * Math.max(...cols.map(lettersOf));
  const isUpright = longestCol + 4 > across && cols.some((name) => typeof name === "string");
  const colsHeight = isUpright ? longestCol + 6 : 12;
  const legendTop = bottom + (isSmall ? 6 : 20 + colsHeight);
  const colour = colourOf(range, scale);
  const marks = rows.map((_, row) =>
    cols.map((_, col) =>
      svg(
        "rect",
        {
          x: (left + col * across).toFixed(2),
          y: (top + row * down).toFixed(2),
          width: (across - gap).toFixed(2),
          height: (down - gap).toFixed(2),
          "data-cell": `${row}.${col}`,
          role: "gridcell",
          tabindex: -1,
          "fill-opacity": faint?.(row, col) ? 0.3 : null,
          // Outlines of small cells would run together into a grey ground.
          class: gap ? "cell" : "cell small",
        },
        svg("title"),
      ),
    ),
  );
  const figure = canvas(Math.max(right + 2, left + 130), legendTop + 22, {
    role: "grid",
    "aria-label": title,
  });
  figure.append(
    svg(
      "g",
      { role: "rowgroup" },
      marks.map((line) => svg("g", { role: "row" }, line)),
    ),
  );
  figure.paint = (values) =>
    marks.forEach((line, row) =>
      line.forEach((cell, col) => {
        const value = values[row][col];
        const says =
          `${cellName(row, col)} ` +
          ` ${isUndefined(value) ? "undefined or not measured" : number(value)}`;
        cell.firstChild.textContent = says;
        set(cell, { "aria-label": says, fill: isUndefined(value) ? "" : colour(value) });
        cell.classList.toggle("empty", isUndefined(value));
      }),
    );
  figure.paint(options.values);

  const shownRow = everyOther(rows.length, (down * rows.length) / 13);
  const colRoom = isUpright ? 12 : cols.length > 100 ? 26 : 20;
  const shownCol = everyOther(cols.length, (across * cols.length) / colRoom);
  const axes = svg("g", { "aria-hidden": "true" });
  rows.forEach((name, row) => {
    if (haveNumbers && !shownRow(row)) return;
    const y = top + row * down + (down - gap) / 2 + 3.6;
    axes.append(shortText(left - 5, y, name, Math.floor((left - 14) / 6)));
  });
  cols.forEach((name, col) => {
    if (!shownCol(col)) return;
    const x = left + col * across + (across - gap) / 2;
    const upright = { "text-anchor": "end", transform: `rotate(-90 ${x + 3.6} ${bottom + 4})` };
    axes.append(
      isUpright
        ? text(x + 3.6, bottom + 4, name, upright)
        : text(x, bottom + 12, name, { "text-anchor": "middle" }),
    );
  });
  const middle = top + (bottom - top) / 2;
  if (haveNumbers && rowName && bottom - top >= Math.max(44, 6 * rowName.length))
    axes.append(
      text(9, middle, rowName, { "text-anchor": "middle", transform: `rotate(-90 9 ${middle})` }),
    );
  axes.append(
    text((left + right) / 2, bottom + 13 + colsHeight, colName, { "text-anchor": "middle" }),
  );
  figure.append(
    isSmall ? "" : axes,
    legend(left, legendTop, Math.max(90, Math.min(right - left, 180)), range, scale),
  );

  const ring = svg("rect", {
    class: "chosen",
    width: across - gap + 3,
    height: down - gap + 3,
    rx: 2,
  });
  figure.append(ring);
  const enter = reachable(figure, marks, { onChoose, onHover });
  figure.choose = (row, col) => {
    const exists = marks[row]?.[col];
    ring.style.display = exists ? "" : "none";
    for (const cell of figure.querySelectorAll("[aria-selected]"))
      cell.removeAttribute("aria-selected");
    if (!exists) return;
    set(enter(row, col), { "aria-selected": "true" });
    set(ring, { x: left + col * across - 1.5, y: top + row * down - 1.5 });
  };
  figure.choose(chosen?.[0], chosen?.[1]);
  return figure;
}

// Makes rows of marks reachable: one of them by Tab, the others from it by arrow keys, Home and
// End. `onHover(row, col)` hears what the pointer or the focus is on, without arguments that it has
// left; `onChoose(row, col)` hears clicks, Enter and Space. Returns enter(row, col): which one Tab
// reaches.
function reachable(place, marks, { onChoose, onHover }) {
  const at = new Map(marks.flatMap((line, row) => line.map((mark, col) => [mark, [row, col]])));
  let current = marks[0][0];
  const enter = (row, col) => {
    current.setAttribute("tabindex", -1);
    current = marks[row][col];
    current.setAttribute("tabindex", 0);
    return current;
  };
  enter(0, 0);
  const listen = (event, hear) =>
    place.addEventListener(event, ({ target }) => hear?.(...(at.get(target) ?? [])));
  listen("click", (...cell) => cell.length && onChoose?.(...cell));
  for (const event of ["pointerover", "focusin"]) listen(event, onHover);
  for (const event of ["pointerleave", "focusout"])
    place.addEventListener(event, () => onHover?.());
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  place.addEventListener("keydown", (event) => {
    const [row, col] = at.get(event.target) ?? [];
    if (row === undefined) return;
    const [down, right] = moves[event.key] ?? [];
    if (event.key === "Enter" || event.key === " ") onChoose?.(row, col);
    else if (event.key === "Home") enter(row, 0).focus();
    else if (event.key === "End") enter(row, marks[row].length - 1).focus();
    else if (!moves[event.key]) return;
    else if (marks[row + down]?.[col + right]) enter(row + down, col + right).focus();
    event.preventDefault();
  });
  return enter;
}

// Where the names of series stand above a figure, in as many lines as they need, and how high these
// are.
function keyPlaces(keys, left, width) {
  const placed = [];
  let [keyX, row] = [left, 0];
  for (const key of keys) {
    const wide = 26 + 6 * lettersOf(key);
    if (keyX + wide > width - 6 && keyX > left) [keyX, row] = [left, row + 1];
    placed.push({ key, at: keyX, level: 9 + 15 * row });
    keyX += wide;
  }
  return [placed, keys.length ? 15 * (row + 1) : 0];
}

// The frame of a figure with two axes: ticks, grid and names.
function frame(options) {
  const {
    width,
    height,
    xRange,
    yRange,
    xName,
    yName,
    log,
    names,
    left = 46,
    keys = [],
    colour,
  } = options;
  const [placed, keysHeight] = keyPlaces(keys, left, width);
  const top = 8 + keysHeight;
  const bottom = height - 36;
  const right = width - 10;
  const scaled = log ? Math.log10 : (value) => value;
  const [lowX, highX] = xRange;
  const [lowY, highY] = yRange.map(scaled);
  const x = (value) => left + ((value - lowX) / (highX - lowX || 1)) * (right - left);
  const y = (value) => bottom - ((scaled(value) - lowY) / (highY - lowY || 1)) * (bottom - top);
  const group = svg("g", { "aria-hidden": "true" });
  for (const tick of log ? decadeTicks(...yRange) : roundTicks(...yRange, 4)) {
    group.append(
      svg("line", { x1: left, x2: right, y1: y(tick), y2: y(tick), class: "grid-line" }),
    );
    group.append(text(left - 5, y(tick) + 3.6, tickText(tick), { "text-anchor": "end" }));
  }
  const widest = Math.max(24, 6.4 * Math.max(...(names ?? []).map(lettersOf)));
  const shown = names && everyOther(names.length, (right - left) / widest);
  const xTicks = names
    ? names.map((name, i) => [i, name]).filter(([i]) => shown(i))
    : roundTicks(lowX, highX, 6, options.wholeX).map((tick) => [tick, tickText(tick)]);
  for (const [place, name] of xTicks) {
    group.append(text(x(place), bottom + 13, name, { "text-anchor": "middle" }));
  }
  group.append(svg("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis" }));
  group.append(text((left + right) / 2, height - 8, xName, { "text-anchor": "middle" }));
  const middle = (top + bottom) / 2;
  group.append(
    text(9, middle, yName, { "text-anchor": "middle", transform: `rotate(-90 9 ${middle})` }),
  );
  placed.forEach(({ key, at, level }, i) => {
    const line = { x1: at, x2: at + 14, y1: level, y2: level, class: "key" };
    group.append(svg("line", { ...line, stroke: colour(i), "stroke-dasharray": dashes(i) }));
    group.append(text(at + 18, level + 4, key));
  });
  return { group, x, y, left, right, top, bottom };
}

// Beside its colour every second series has dashes.
const dashes = (number) => (number % 2 ? "5 3" : null);

// Lines over numbers or names. An undefined value breaks its line. `paired`: two neighbours share a
// colour.
export function lines(options) {
  const {
    series,
    xName = "",
    yName = "",
    log = false,
    title = yName,
    width = 360,
    height = 220,
  } = options;
  const ownX = (one) => one.x ?? options.x;
  const allX = series.flatMap((one) => ownX(one));
  const names = allX.some((value) => typeof value === "string")
    ? [...new Set(allX.map(String))]
    : null;
  const placeOf = (value) => (names ? names.indexOf(String(value)) : value);
  const places = allX.map(placeOf);
  const isDrawn = (value) => !isUndefined(value) && (!log || value > 0);
  const allY = series.flatMap((one) => one.y).filter(isDrawn);
  const low = Math.min(...allY);
  const high = Math.max(...allY);
  const yRange =
    options.yRange ??
    (log ? [low / 1.15, high * 1.15] : [Math.min(0, low), Math.max(0, high) || 1]);
  const keys = series.length > 1 ? series.map((one) => String(one.name)) : [];
  const xRange = [Math.min(...places), Math.max(...places)];
  const wholeX = places.every(Number.isInteger);
  const colour = (i) => seriesColour(options.paired ? Math.floor(i / 2) : i);
  const box = frame({
    width,
    height,
    xRange,
    yRange,
    xName,
    yName,
    log,
    names,
    keys,
    wholeX,
    colour,
  });
  const figure = canvas(width, height, { role: "img", "aria-label": title }, box.group);
  series.forEach((one, i) => {
    const line = svg("path", { class: "line", stroke: colour(i), "stroke-dasharray": dashes(i) });
    const group = svg("g", { class: "series", "data-series": one.name }, line);
    const radius = one.y.length > 40 ? 1.6 : 2.6;
    let path = "";
    one.y.forEach((value, j) => {
      if (!isDrawn(value)) return;
      const at = ownX(one)[j];
      const [x, y] = [box.x(placeOf(at)), box.y(value)];
      path += `${j && isDrawn(one.y[j - 1]) ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      const dot = svg("circle", { cx: x, cy: y, r: radius, fill: colour(i) });
      const name = series.length > 1 ? `${one.name}, ` : "";
      const error = one.errors && !isUndefined(one.errors[j]) ? ` ± ${number(one.errors[j])}` : "";
      group.append(titled(dot, `${name}${xName} ${at}: ${number(value)}${error}`));
    });
    line.setAttribute("d", path);
    figure.append(group);
  });
  return figure;
}

// Horizontal bars with names, from zero. `errors` are standard errors. Several `series` share the
// names: `{name, values, errors}`. `reference` is a value with a name, drawn as a line.
export function bars(options) {
  const { names, title = "", unit = "", reference, width = 360 } = options;
  const series = options.series ?? [{ name: "", values: options.values, errors: options.errors }];
  const several = series.length > 1;
  const longest = Math.max(...names.map(lettersOf), 1);
  const left = Math.min(width * 0.42, 12 + 6.1 * longest);
  const right = width - 64;
  const thick = several ? 11 : 13;
  const room = thick * series.length + 6;
  const [placed, keysHeight] = keyPlaces(
    several ? series.map((one) => String(one.name)) : [],
    left,
    width,
  );
  const top = several ? 5 + keysHeight : reference && !isUndefined(reference.x) ? 16 : 4;
  const ends = (one) => (value, i) =>
    [-1, 1].map((side) => (value ?? 0) + side * (one.errors?.[i] ?? 0));
  const all = series.flatMap((one) => one.values.flatMap(ends(one)));
  // A whisker may reach below zero where no bar does.
  const lowest = Math.min(0, ...all, reference?.x ?? 0);
  const low = series.some((one) => one.values.some((value) => value < 0)) ? lowest : 0;
  const high = Math.max(0, ...all, reference?.x ?? 0);
  const x = (value) => left + ((value - low) / (high - low || 1)) * (right - left);
  const bottom = top + room * names.length;
  const figure = canvas(width, bottom + (unit ? 20 : 4), { role: "img", "aria-label": title });
  const limit = Math.floor((left - 14) / 6.2);
  names.forEach((name, i) => {
    const full = String(name);
    figure.append(
      shortText(left - 6, top + i * room + (thick * series.length) / 2 + 3.8, name, limit, {
        class: "name",
      }),
    );
    series.forEach((one, j) => {
      const value = one.values[i];
      const y = top + i * room + j * thick;
      const error = one.errors?.[i];
      const says =
        `${several ? `${one.name}, ` : ""}${full}: ` +
        `${number(value)}${isUndefined(error) ? "" : ` ± ${number(error)}`}`;
      const [from, to] = [x(Math.min(0, value ?? 0)), x(Math.max(0, value ?? 0))];
      // A rule of the page's style would win over the colour of a series.
      const looks = several ? { fill: seriesColour(j) } : { class: "bar" };
      const bar = svg("rect", {
        x: from,
        y: y + 1,
        width: Math.max(isUndefined(value) ? 0 : 1, to - from),
        height: thick - 2,
        ...looks,
      });
      const group = titled(svg("g", { "data-bar": full }, bar), says);
      const middle = y + thick / 2;
      const hasError = !isUndefined(value) && !isUndefined(error);
      const end = hasError ? Math.max(to, x(value + error)) : to;
      if (hasError)
        group.append(
          svg("line", {
            x1: x(Math.max(low, value - error)),
            x2: x(value + error),
            y1: middle,
            y2: middle,
            class: "whisker",
          }),
        );
      figure.append(set(group, {}, text(end + 5, middle + 3.8, number(value), { class: "value" })));
    });
  });
  placed.forEach(({ key, at, level }, j) => {
    figure.append(
      svg("rect", { x: at, y: level - 6, width: 10, height: 9, fill: seriesColour(j) }),
      text(at + 14, level + 2, key),
    );
  });
  if (low < 0)
    figure.append(svg("line", { x1: x(0), x2: x(0), y1: top, y2: bottom, class: "axis" }));
  if (reference && !isUndefined(reference.x)) {
    const at = x(reference.x);
    const line = svg("line", { x1: at, x2: at, y1: top - 3, y2: bottom, class: "mark baseline" });
    const name = text(at, top - 5, reference.name, {
      "text-anchor": at > width / 2 ? "end" : "start",
      class: "mark-name",
    });
    figure.append(titled(line, `${reference.name}: ${number(reference.x)}`), name);
  }
  if (unit) figure.append(text((left + right) / 2, bottom + 14, unit, { "text-anchor": "middle" }));
  return figure;
}

// Points with names: `{x, y, name, says, colour, on, label}`. `label` writes the name, `on` sets a
// point off. A click chooses the nearest. With `onPick(range)`, a drag picks a range
// [x, x, y, y]; arrow keys move it, with Shift they change its end, Escape takes it away. The
// element has a method `pick(range)`, which shows one.
export function scatter(options) {
  const {
    xName = "",
    yName = "",
    title = "",
    onChoose,
    onPick,
    width = 420,
    height = 320,
    key,
  } = options;
  const shown = options.points.filter((point) => !isUndefined(point.x) && !isUndefined(point.y));
  const endsOf = (values) => {
    const [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
    const room = 0.06 * (high - low || Math.abs(high) || 1);
    // An axis begins at zero where that is near, a little before it: no point covers a tick.
    return [low >= 0 && low < high - low ? -0.03 * high : low - room, high + room];
  };
  const xRange = options.xRange ?? endsOf(shown.map((point) => point.x));
  const yRange = options.yRange ?? endsOf(shown.map((point) => point.y));
  // The key of the colours lies below the names of the axis.
  const below = key ? 40 : 0;
  const box = frame({ width, height, xRange, yRange, xName, yName });
  const figure = canvas(
    width,
    height + below,
    { role: "group", "aria-label": title, tabindex: onPick ? 0 : null },
    box.group,
  );
  if (key) {
    figure.append(
      legend(box.right - KEY_WIDTH, height + 8, KEY_WIDTH, key.range, key.scale),
      text(box.right - KEY_WIDTH - 8, height + 15, key.name, { "text-anchor": "end" }),
    );
  }
  for (const point of shown) {
    const place = { cx: box.x(point.x), cy: box.y(point.y), r: point.on ? 5 : 4 };
    const looks = {
      class: point.on ? "point on" : "point",
      fill: point.colour,
      "data-point": point.name,
    };
    figure.append(
      titled(
        svg("circle", { ...place, ...looks }),
        point.says ?? `${point.name}: ${number(point.x)}, ${number(point.y)}`,
      ),
    );
  }
  // Names come last, so that no point covers one. A name that would lie on another is left out: the
  // point still has it as its title.
  const taken = [];
  for (const point of shown.filter((point) => point.label)) {
    const wide = 6.5 * point.name.length;
    const free = [-5, 13]
      .flatMap((down) =>
        [6, -6 - wide].map((right) => [box.x(point.x) + right, box.y(point.y) + down]),
      )
      .find(
        ([x, y]) =>
          x >= box.left &&
          x + wide <= width &&
          y <= box.bottom &&
          taken.every((other) => Math.abs(other.y - y) > 11 || x > other.end || x + wide < other.x),
      );
    if (!free) continue;
    const [x, y] = free;
    taken.push({ x, y, end: x + wide });
    figure.append(text(x, y, point.name, { class: "point-name" }));
  }
  const inside = (value, low, high) => Math.min(high, Math.max(low, value));
  const band = svg("rect", { class: "picked-range" });
  figure.append(band);
  let range = null;
  figure.pick = (picked) => {
    range = picked;
    band.style.display = range ? "" : "none";
    if (!range) return;
    const [left, right] = [range[0], range[1]].map((value) =>
      inside(box.x(value), box.left, box.right),
    );
    const [bottom, top] = [range[2], range[3]].map((value) =>
      inside(box.y(value), box.top, box.bottom),
    );
    set(band, { x: left, y: top, width: right - left, height: bottom - top });
  };
  figure.pick(null);

  const share = (event) => {
    const frameBox = figure.getBoundingClientRect();
    const scale = width / frameBox.width;
    const [x, y] = [
      (event.clientX - frameBox.left) * scale,
      (event.clientY - frameBox.top) * scale,
    ];
    return [
      x,
      y,
      inside((x - box.left) / (box.right - box.left), 0, 1),
      inside((box.bottom - y) / (box.bottom - box.top), 0, 1),
    ];
  };
  const valueAt = ([low, high], part) => low + part * (high - low);
  const move = (next) => {
    figure.pick(next);
    onPick(next);
  };
  let start = null;
  figure.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    start = share(event);
    if (onPick) figure.setPointerCapture(event.pointerId);
  });
  figure.addEventListener("pointermove", (event) => {
    if (!start || !onPick) return;
    const at = share(event);
    if (!start.hasMoved && Math.hypot(at[0] - start[0], at[1] - start[1]) < 4) return;
    start.hasMoved = true;
    const [left, right] = [start[2], at[2]].sort((a, b) => a - b);
    const [low, high] = [start[3], at[3]].sort((a, b) => a - b);
    move([
      valueAt(xRange, left),
      valueAt(xRange, right),
      valueAt(yRange, low),
      valueAt(yRange, high),
    ]);
  });
  figure.addEventListener("pointerup", (event) => {
    const hasMoved = start?.hasMoved;
    start = null;
    if (hasMoved) return;
    const [x, y] = share(event);
    const far = (point) => Math.hypot(box.x(point.x) - x, box.y(point.y) - y);
    const nearest = shown.toSorted((one, other) => far(one) - far(other))[0];
    if (nearest && far(nearest) < 12) onChoose?.(nearest);
    else if (range) move(null);
  });
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowDown: [0, -1], ArrowUp: [0, 1] };
  figure.addEventListener("keydown", (event) => {
    if (!onPick) return;
    if (event.key === "Escape" && range) move(null);
    else if (moves[event.key]) {
      const middle = [0.4, 0.6]
        .map((part) => valueAt(xRange, part))
        .concat([0.4, 0.6].map((part) => valueAt(yRange, part)));
      const [right, up] = moves[event.key];
      const steps = [0.05 * right * (xRange[1] - xRange[0]), 0.05 * up * (yRange[1] - yRange[0])];
      const [left, end, low, high] = range ?? middle;
      const first = event.shiftKey ? [0, 0] : steps;
      move([
        left + first[0],
        Math.max(end + steps[0], left + first[0]),
        low + first[1],
        Math.max(high + steps[1], low + first[1]),
      ]);
    } else return;
    event.preventDefault();
  });
  return figure;
}

// A text, token by token. `marked` are indices of tokens that are set off. `weights`, in 0..1, give
// each token a ground of its own. With `look`, a token that is pointed at, walked to or chosen
// shows `look.row(i)` instead, the weights that it gives; `look.says(i)` hears which one, null for
// none.
export function tokens(strings, { marked = [], weights = null, names, look = null }) {
  const inMarked = new Set(marked);
  const pieces = strings.map((string, i) => {
    const piece = html(inMarked.has(i) ? "mark" : "span", {
      class: "token",
      role: look && "option",
      tabindex: look && -1,
    });
    // A line break or a tab would not be seen.
    piece.textContent = string.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
    return piece;
  });
  const place = html(
    "span",
    { class: "tokens", role: look && "listbox", "aria-label": look && "Tokens" },
    ...pieces,
  );
  const show = (query) => {
    const shown = query === null ? weights : look.row(query);
    pieces.forEach((piece, i) => {
      const weight = query === null || i <= query ? shown?.[i] : null;
      // By the root, because many weights are small beside that of a sink.
      const strength = isUndefined(weight) ? null : Math.sqrt(weight);
      piece.style.backgroundColor = strength === null ? "" : sequential(strength);
      piece.style.color = strength === null ? "" : inkOn(strength);
      piece.classList.toggle("later", query !== null && i > query);
      piece.title = isUndefined(weight) ? names[i] : `${names[i]}: ${number(weight)}`;
    });
    look?.says(query);
  };
  let chosen = null;
  if (look) {
    reachable(place, [pieces], {
      onHover: (_, i) => show(i ?? chosen),
      onChoose: (_, i) => {
        chosen = chosen === i ? null : i;
        pieces.forEach((piece, j) => piece.setAttribute("aria-selected", String(j === chosen)));
        show(chosen);
      },
    });
  }
  show(null);
  return place;
}
