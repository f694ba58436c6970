// The table of heads: those with the largest numbers, those that the scatter picks, or, beside
// another run or intervention, those that differ most.
import { button, plusMinus, table, tableRow } from "../card.js";
import { number, smallText } from "../draw.js";
import { axisValue, byDifference, ranked } from "../numbers.js";
import { by, cellAt, choose, chosen, labelAt, place, sectionName, state } from "../state.js";

export const SHOWN_HEADS = 10;

export function showHeads() {
  const { picked, compared } = state;
  const [heads, columns, cellsOf] = compared ? differences() : means();
  const isChosen = (i) => Boolean(chosen.head) && i === place(chosen.head);
  const row = (head) =>
    tableRow([button(labelAt(head.i), () => choose({ head: cellAt(head.i) })), ...cellsOf(head)], {
      "aria-selected": String(isChosen(head.i)),
    });
  const what = compared ? `changes of ${chosen.statistic}` : chosen.statistic;
  by("heads-name").textContent = picked
    ? `Picked heads by ${what}`
    : `Heads with the largest ${what}`;
  const shown = picked ? heads.filter(({ i }) => picked.has(i)) : heads.slice(0, SHOWN_HEADS);
  by("heads-rows").replaceChildren(table(columns, shown.map(row), "Heads by the chosen statistic"));
}

function means() {
  const name = chosen.statistic;
  const axes = [...new Set([chosen.x, chosen.y])].filter(
    (axis) => axis !== name && axis in state.numbers,
  );
  const q = {
    name: "q",
    title: "Of the mean against the uniform baseline, of an estimate against 0",
  };
  const cellsOf = ({ i, mean, error, q }) => [
    plusMinus(mean, error),
    smallText(q),
    ...axes.map((axis) => number(axisValue(axis, i))),
  ];
  return [ranked(name), ["head", `${name} ±`, q, ...axes], cellsOf];
}

function differences() {
  const [first, second] = [chosen, chosen.other].map(sectionName);
  const columns = [
    "head",
    { name: "first", title: first },
    { name: "second", title: second },
    { name: "second minus first ±", title: "One standard error, over documents" },
    { name: "q", title: "Of the difference, over all heads" },
  ];
  const cellsOf = ({ mean, other, difference, error, q }) => [
    number(mean),
    number(other),
    plusMinus(difference, error),
    smallText(q),
  ];
  return [byDifference(), columns, cellsOf];
}
