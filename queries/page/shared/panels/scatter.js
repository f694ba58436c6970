// The scatter of heads, and the heads that it picks.
import { remember } from "../address.js";
import { aboutHeads } from "../asking.js";
import { behind } from "../behind.js";
import { MOST_WIDTH, colourOf, isUndefined, number, scatter } from "../draw.js";
import { axisValue, rangeOf, ranked } from "../numbers.js";
import {
  allHeads,
  by,
  cellAt,
  choose,
  chosen,
  conditions,
  labelAt,
  place,
  scope,
  state,
  turns,
} from "../state.js";
import { showHeads } from "./heads.js";
import { offer } from "./sql.js";

const NAMED_HEADS = 5; // At the end of each axis.

export async function showScatter(turn) {
  const axes = ["x", "y", "colour"].map((axis) => chosen[axis]);
  for (const axis of axes) if (axis !== "layer" && axis !== "head") await aboutHeads(scope(), axis);
  if (turn !== turns.all) return;
  const [x, y, colour] = axes;
  const looks = ["layer", "head"].includes(colour)
    ? {
        range: [0, colour === "layer" ? state.run.n_layers - 1 : state.run.n_heads - 1],
        scale: "sequential",
      }
    : rangeOf(colour, state.numbers[colour]?.mean ?? []);
  const paint = colourOf(looks.range, looks.scale);
  const named = [x, y].map((axis) => (axis in state.numbers ? axis : chosen.statistic));
  const top = new Set(
    named.flatMap((name) => ranked(name).slice(0, NAMED_HEADS)).map(({ i }) => i),
  );
  if (chosen.head) top.add(place(chosen.head));
  const points = allHeads().map((i) => {
    const [right, up, hue] = axes.map((axis) => axisValue(axis, i));
    const isChosen = Boolean(chosen.head) && i === place(chosen.head);
    return {
      i,
      name: labelAt(i),
      x: right,
      y: up,
      on: isChosen,
      label: top.has(i),
      colour: isUndefined(hue) ? null : paint(hue),
      says: `${labelAt(i)}: ${x} ${number(right)}, ${y} ${number(up)}, ${colour} ${number(hue)}`,
    };
  });
  const figure = scatter({
    points,
    xName: x,
    yName: y,
    title: `Heads by ${x} and ${y}, coloured by ${colour}`,
    width: Math.min(by("scatter").clientWidth, MOST_WIDTH),
    height: 330,
    key: { ...looks, name: colour },
    onChoose: ({ i }) => choose({ head: cellAt(i) }),
    onPick: (range) => {
      chosen.pick = range;
      showPicked();
      remember();
    },
  });
  by("scatter").replaceChildren(figure);
  figure.pick(chosen.pick);
  showPicked();
}

// One brush: what the scatter picks is set off in every heatmap, and listed.
export function showPicked() {
  const range = chosen.pick;
  const isIn = (i) => {
    const [x, y] = [axisValue(chosen.x, i), axisValue(chosen.y, i)];
    return x >= range[0] && x <= range[1] && y >= range[2] && y <= range[3];
  };
  state.picked = range ? new Set(allHeads().filter(isIn)) : null;
  by("picked-heads").textContent = state.picked
    ? `${number(state.picked.size)} of ${number(allHeads().length)} heads picked`
    : "";
  for (const cell of document.querySelectorAll("#heatmap [data-cell], #maps [data-cell]")) {
    cell.classList.toggle(
      "unpicked",
      Boolean(state.picked) && !state.picked.has(place(cell.dataset.cell.split(".").map(Number))),
    );
  }
  showHeads();
}

export function beginScatter() {
  for (const axis of ["x", "y", "colour"]) {
    const pick = axis === "colour" ? {} : { pick: null };
    by(axis).onchange = ({ target }) => choose({ [axis]: target.value, hasAxes: true, ...pick });
  }
  const columns = () => ["head", chosen.x, chosen.y, chosen.colour];
  by("scatter-card").append(
    behind({
      askSql: offer,
      plot: by("scatter"),
      name: () => `${chosen.x}-${chosen.y}`,
      columns,
      rows: () =>
        allHeads().map((i) => [
          labelAt(i),
          ...columns()
            .slice(1)
            .map((axis) => axisValue(axis, i)),
        ]),
      sql: () => {
        const axes = [...new Set(columns())].filter((axis) => axis in state.numbers);
        const means = axes.map((axis) => `avg("${axis}") AS "${axis}"`);
        const selected = ["label", "layer", "head", ...means].join(", ");
        return `SELECT ${selected}\nFROM heads\nWHERE ${conditions(chosen)}\nGROUP BY ALL`;
      },
    }),
  );
}
