// A histogram, with a brush if it listens: a range that a pointer, a finger or the arrow keys move.
import { html, isUndefined, number, roundTicks, set, svg, titled } from "./draw.js";

// Bins of an axis. The server has the same number: a brush is two bins of it.
export const BINS = 128;
const WIDTH = 360;
const HEIGHT = 126;
const LEFT = 8;
const RIGHT = WIDTH - 8;
const TOP = 6;
const BOTTOM = HEIGHT - 20;
const GRIP = 7;
const TICK_SIZE = 10; // In pixels of the screen, however wide the figure is.
const TICK_PIXELS = 42; // Between two ticks.

// The bins of a range between two places in 0..1. The only place where a brush is snapped.
export function snap(from, to) {
  const inside = (bin) => Math.min(BINS - 1, Math.max(0, bin));
  const first = inside(Math.floor(Math.min(from, to) * BINS));
  const last = inside(Math.max(first, Math.ceil(Math.max(from, to) * BINS) - 1));
  return [first, last];
}

// A range in words. The bins at the ends have no outer end.
export function inWords([first, last], [low, high]) {
  const edge = (bin) => number(Number((low + (bin / BINS) * (high - low)).toPrecision(4)));
  if (first === 0 && last === BINS - 1) return "any value";
  if (first === 0) return `below ${edge(last + 1)}`;
  if (last === BINS - 1) return `${edge(first)} and above`;
  return `${edge(first)} to ${edge(last + 1)}`;
}

const xOf = (share) => LEFT + share * (RIGHT - LEFT);
const sum = (counts) => counts.reduce((total, count) => total + count, 0);

function steps(counts, most) {
  let path = `M${LEFT} ${BOTTOM}`;
  counts.forEach((count, i) => {
    const y = BOTTOM - (most ? count / most : 0) * (BOTTOM - TOP);
    path += `V${y.toFixed(1)}H${xOf((i + 1) / counts.length).toFixed(1)}`;
  });
  return `${path}V${BOTTOM}`;
}

// Where a value stands between the ends of an axis, in 0..1.
const axisOf = ([low, high]) => ({ ends: [low, high], place: (x) => (x - low) / (high - low) });

// `listeners`: enter() when a brush may begin, move(range) while it moves, end() when it rests.
// A range is [first, last], or null if nothing is picked. Without listeners there is no brush.
export function histogram(name, meaning, listeners) {
  const title = html("h3", { title: meaning }, name);
  const says = html("span", { class: "range" });
  const all = svg("path", { class: "all" });
  const ghost = svg("path", { class: "ghost" });
  const own = svg("path", { class: "own" });
  const band = svg("rect", { class: "band", y: TOP - 4, height: BOTTOM - TOP + 4 });
  const ticks = svg("g", { "aria-hidden": "true" });
  const marks = svg("g");
  const handles = (listeners ? ["from", "to"] : []).map((end) =>
    svg(
      "g",
      { class: "handle", role: "slider", tabindex: 0, "aria-label": `${name}, ${end}` },
      svg("rect", { class: "grip", x: -4, y: TOP + 24, width: 8, height: 34, rx: 3 }),
    ),
  );
  const looks = listeners
    ? { class: "figure brushed", role: "group" }
    : { class: "figure histogram-figure", role: "img" };
  const figure = svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      "data-hist": name,
      "aria-label": `Distribution of ${name}`,
      ...looks,
    },
    svg("title"),
    all,
    ghost,
    own,
    svg("line", { x1: LEFT, x2: RIGHT, y1: BOTTOM, y2: BOTTOM, class: "axis" }),
    ticks,
    marks,
    listeners ? [band, handles].flat() : [],
  );
  const element = html(
    "div",
    { class: "histogram" },
    html("div", { class: "name" }, title, says),
    figure,
  );
  let axis = axisOf([0, 1]);
  // Letters keep their size, however wide the figure is drawn.
  new ResizeObserver(showTicks).observe(element);
  function showTicks() {
    const scale = WIDTH / (element.clientWidth || WIDTH);
    const most = Math.max(2, Math.floor(element.clientWidth / TICK_PIXELS));
    const size = TICK_SIZE * scale;
    ticks.replaceChildren(
      ...roundTicks(...axis.ends, most).map((value) => {
        const x = xOf(axis.place(value));
        const anchor = x < LEFT + size ? "start" : x > RIGHT - size ? "end" : "middle";
        return svg(
          "text",
          { x, y: BOTTOM + 2 + size, "text-anchor": anchor, "font-size": size },
          number(Number(value.toPrecision(3))),
        );
      }),
    );
  }
  let range = null;
  let frame = 0;
  let endTimer = 0;
  let drag = null;

  const ends = () => range ?? [0, BINS - 1];
  function show() {
    const [first, last] = ends();
    const [from, to] = [xOf(first / BINS), xOf((last + 1) / BINS)];
    set(band, { x: from, width: to - from });
    element.classList.toggle("picked", range !== null);
    says.textContent = range ? inWords(range, axis.ends) : "";
    const value = {
      "aria-valuemin": 0,
      "aria-valuemax": BINS,
      "aria-valuetext": inWords(ends(), axis.ends),
    };
    handles.forEach((handle, i) =>
      set(handle, {
        ...value,
        transform: `translate(${i ? to : from} 0)`,
        "aria-valuenow": i ? last + 1 : first,
      }),
    );
  }
  function pick(bins) {
    range = bins && (bins[0] > 0 || bins[1] < BINS - 1) ? bins : null;
    // Several events of one frame are drawn once.
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      show();
      listeners.move(range);
    });
  }
  function rest(milliseconds) {
    clearTimeout(endTimer);
    endTimer = setTimeout(listeners.end, milliseconds);
  }

  if (listeners) listen();
  function listen() {
    const place = (event) => {
      const box = figure.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * WIDTH;
      return Math.min(1, Math.max(0, (x - LEFT) / (RIGHT - LEFT)));
    };
    figure.addEventListener("pointerenter", (event) => {
      if (!event.buttons) listeners.enter();
    });
    figure.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      event.preventDefault();
      listeners.enter();
      figure.setPointerCapture(event.pointerId);
      const at = place(event);
      const [first, last] = ends();
      const near = (edge) => range && Math.abs(xOf(at) - xOf(edge)) < GRIP;
      if (near(first / BINS)) drag = { fixed: (last + 1) / BINS };
      else if (near((last + 1) / BINS)) drag = { fixed: first / BINS };
      else if (range && at > first / BINS && at < (last + 1) / BINS)
        drag = { held: at, first, last };
      else drag = { fixed: at, isNew: true };
    });
    figure.addEventListener("pointermove", (event) => {
      if (!drag) return;
      const at = place(event);
      if (drag.held === undefined) {
        drag.hasMoved = true;
        return pick(snap(drag.fixed, at));
      }
      const moved = Math.round((at - drag.held) * BINS);
      const shift = Math.min(BINS - 1 - drag.last, Math.max(-drag.first, moved));
      drag.hasMoved ||= shift !== 0;
      pick([drag.first + shift, drag.last + shift]);
    });
    const release = () => {
      if (!drag) return;
      // A click beside the brush takes it away.
      if (drag.isNew && !drag.hasMoved && range) pick(null);
      drag = null;
      rest(0);
    };
    figure.addEventListener("pointerup", release);
    figure.addEventListener("pointercancel", release);
    figure.addEventListener("focusin", () => listeners.enter());
    handles.forEach((handle, i) => {
      handle.addEventListener("keydown", (event) => {
        const step = event.shiftKey ? 8 : 1;
        const [first, last] = ends();
        const edges = [first, last + 1];
        const moves = {
          ArrowLeft: -step,
          ArrowDown: -step,
          ArrowRight: step,
          ArrowUp: step,
          PageDown: -8,
          PageUp: 8,
          Home: -BINS,
          End: BINS,
        };
        if (event.key === "Escape") pick(null);
        else if (event.key in moves) {
          const limits = i ? [first + 1, BINS] : [0, last];
          edges[i] = Math.min(limits[1], Math.max(limits[0], edges[i] + moves[event.key]));
          pick([edges[0], edges[1] - 1]);
        } else return;
        event.preventDefault();
        rest(250);
      });
    });
  }

  let before = null;
  Object.assign(element, {
    isDragging: () => drag !== null,
    setAxis(ends) {
      axis = axisOf(ends);
      showTicks();
      marks.replaceChildren();
      show();
    },
    // Values with a name: `{x, name}`.
    mark(shown) {
      const inside = shown.filter(
        ({ x }) => !isUndefined(x) && axis.place(x) >= 0 && axis.place(x) <= 1,
      );
      marks.replaceChildren(
        ...inside.map(({ x, name: mark, kind }) => {
          const at = xOf(axis.place(x));
          return titled(
            svg("line", { x1: at, x2: at, y1: TOP, y2: BOTTOM, class: `mark ${kind ?? ""}` }),
            `${mark}: ${number(x)}`,
          );
        }),
      );
    },
    setRange(bins) {
      range = bins;
      show();
    },
    drawAll(counts) {
      all.setAttribute("d", steps(counts, Math.max(...counts)));
    },
    // The head without any brush. What it shows stays behind what brushes leave.
    drawBefore(counts) {
      before = counts;
      ghost.setAttribute("d", steps(counts, Math.max(...counts)));
      element.drawOwn(counts);
    },
    drawUnbrushed() {
      if (before) element.drawOwn(before);
    },
    drawOwn(counts) {
      own.setAttribute("d", steps(counts, Math.max(...(before ?? counts))));
      const all = sum(before ?? counts);
      figure.firstChild.textContent = `${name}: ${number(sum(counts))} of ${number(all)} values`;
      figure.dataset.count = sum(counts);
    },
  });
  show();
  return element;
}
