// Small multiples: the same statistic in other runs, and all statistics of this one.
import { aboutHeads, mayAskForAll } from "../asking.js";
import { behind, literal, summaries } from "../behind.js";
import { button } from "../card.js";
import { breakable, fillAndDraw, html, isUndefined, lines, number } from "../draw.js";
import { comparison, differenceLooks, groups, kindOf, rangeOf, ranked } from "../numbers.js";
import {
  by,
  choose,
  chosen,
  defined,
  facts,
  label,
  labelAt,
  place,
  runOf,
  scope,
  sectionName,
  sections,
  state,
  turns,
} from "../state.js";
import { headMap } from "./heatmap.js";
import { showPicked } from "./scatter.js";
import { offer } from "./sql.js";

const MOST_SECTIONS = 24;

const smallMap = (list, options) => headMap(list, { cell: 72, isSmall: true, ...options });

export async function showSections(turn) {
  const statistic = chosen.statistic;
  const measured = sections().filter((one) => runOf(one).statistics.includes(statistic));
  const shown = measured.slice(0, MOST_SECTIONS);
  by("sections-card").hidden = shown.length < 2 || !mayAskForAll();
  if (by("sections-card").hidden) return;
  const means = [];
  for (const one of shown) {
    const whole = { ...scope(), subset: null, layers: null, ...one };
    const about = await aboutHeads(whole, statistic);
    means.push(about?.values[statistic]?.mean);
    if (turn !== turns.all) return;
  }
  const looks = rangeOf(
    statistic,
    means.flatMap((list) => [...(list ?? [])]),
  );
  const ofAll = measured.length > shown.length ? ` of ${number(measured.length)}` : "";
  by("sections-name").textContent =
    `${statistic} in ${number(shown.length)}${ofAll} runs and interventions`;
  const small = (one, i) => {
    const show = () => choose({ run_id: one.run_id, intervention: one.intervention, other: null });
    const isChosen = one.run_id === chosen.run_id && one.intervention === chosen.intervention;
    const name = button(breakable(sectionName(one)), show, {
      title: runOf(one).model,
      "aria-pressed": String(isChosen),
    });
    const draw = (width) =>
      smallMap(means[i], {
        ...looks,
        width,
        chosen: null,
        title: `${statistic} in ${sectionName(one)}`,
      });
    const plot = html("div");
    const attributes = { "data-section": sectionName(one) };
    const element = html("figure", attributes, html("figcaption", {}, name), plot);
    return means[i] && { element, plot, draw };
  };
  fillAndDraw(by("sections"), shown.map(small).filter(Boolean));
  state.checkpoints = shown
    .map((one, i) => ({ ...one, step: runOf(one).step, name: runOf(one).name, means: means[i] }))
    .filter(
      ({ step, name, intervention }) =>
        !isUndefined(step) && name === state.run.name && intervention === chosen.intervention,
    );
  showTraining();
}

// The chosen statistic over the steps of a training.
export function showTraining() {
  const { checkpoints } = state;
  by("training").hidden = checkpoints.length < 2;
  if (by("training").hidden || !chosen.head) return;
  const meanOf = (list) => list.reduce((sum, one) => sum + one, 0) / list.length;
  const [own, all] = [
    checkpoints.map(({ means }) => means?.[place(chosen.head)]),
    checkpoints.map(({ means }) => meanOf(defined(means ?? []))),
  ];
  const figure = lines({
    x: checkpoints.map(({ step }) => step),
    series: [
      { name: label(chosen.head), y: own },
      { name: "mean of all heads", y: all },
    ],
    xName: "step",
    yName: facts(chosen.statistic).unit ?? "",
    title: `${chosen.statistic} over the steps of training`,
    width: Math.min(by("sections-card").clientWidth - 34, 760),
  });
  by("training").replaceChildren(figure);
}

export async function showMaps() {
  if (!by("maps-card").open || !mayAskForAll()) return;
  const turn = turns.all;
  const cards = groups(
    state.run.statistics.filter(
      (name) => state.numbers[name] && kindOf(state.numbers[name]) === "heads",
    ),
  );
  const choice = (name) =>
    button(breakable(name), () => choose({ statistic: name }), { title: facts(name).meaning });
  const drawn = [];
  for (const [name, ...alike] of cards) {
    const difference = chosen.other && (await comparison(name));
    if (turn !== turns.all) return;
    const looks = difference
      ? differenceLooks(difference, state.numbers[name].mean)
      : rangeOf(name, state.numbers[name].mean);
    const [first] = ranked(name);
    const draw = (width) => {
      const figure = smallMap((difference ?? state.numbers[name]).mean, {
        ...looks,
        width,
        title: `${difference ? "Difference of " : ""}${name}`,
      });
      state.map?.figures.push(figure);
      return figure;
    };
    const plot = html("div");
    drawn.push({
      plot,
      draw,
      element: html(
        "figure",
        { "data-map": name },
        html("figcaption", {}, choice(name)),
        plot,
        html(
          "p",
          { class: "note" },
          first ? `most: ${labelAt(first.i)}, ${number(first.mean)}` : "",
        ),
        html(
          "details",
          {},
          html("summary", {}, "Definition"),
          html("p", {}, facts(name).meaning),
          facts(name).formula ? html("code", {}, facts(name).formula) : "",
        ),
        ...(alike.length
          ? [
              html(
                "details",
                { class: "alike" },
                html("summary", {}, `${alike.length} alike`),
                ...alike.map((one) => html("div", {}, choice(one))),
              ),
            ]
          : []),
      ),
    });
  }
  fillAndDraw(by("maps"), drawn);
  showPicked();
}

export function beginSections() {
  by("maps-card").ontoggle = showMaps;
  const columns = ["run_id", "intervention", "layer", "head", "mean"];
  by("sections-card").append(
    behind({
      askSql: offer,
      plot: by("sections-plots"),
      name: () => `${chosen.statistic}-runs`,
      sql: () => summaries(columns, `statistic = ${literal(chosen.statistic)}`),
    }),
  );
}
