// What is shown: the one state of the page, and the reader's choices in it.
import { literal } from "./behind.js";
import { isUndefined } from "./draw.js";

export const SUMMARY = ["mean", "standard_error", "documents", "count"];
export const MOST_Q = 0.05;

export const state = {
  chosen: {}, // What the reader chose, as the address has it: `recall` names all of it.
  show: null, // Shows what follows from changes of what is chosen.
  lookAgain: null, // Asks for the overview, and shows everything if it is another one.
  overview: null, // The runs that are here, and every statistic.
  run: null, // The chosen one.
  shownHash: "",
  absent: [], // What was asked for and is not here.
  known: new Map(), // Answers about all heads: numbers by statistic, and where they are from.
  numbers: {}, // Of the chosen statistics of all heads, by name: what is known so far.
  compared: null, // What the heatmap is compared with.
  map: null, // The drawn heatmaps, the means of the first, and those that are shown in it.
  picked: null, // The heads that the scatter picks, as places. Null is all.
  histograms: new Map(), // Those that are drawn, by statistic.
  cube: null, // The cube of one brush: its key, its promise, and the cube once it is there.
  card: [], // The rows of the chosen head.
  details: {}, // How the chosen run was measured, and its predictions.
  checkpoints: [], // Of the same training, those whose means are shown.
  effects: [], // What estimates changes of the loss, and how far it can be trusted.
  sql: { histograms: "", extremes: "" }, // What was asked last.
  // Counted up by each choice: what belongs to an older one is not drawn.
  turns: { all: 0, head: 0, brush: 0, extremes: 0 },
};
export const { chosen, turns } = state;

export const by = (id) => document.getElementById(id);

export const scope = () => ({
  run_id: chosen.run_id,
  intervention: chosen.intervention,
  subset: chosen.subset,
  layers: chosen.layers,
});

export const otherScope = () => chosen.other && { ...scope(), ...chosen.other };

export const head = () => chosen.head && { layer: chosen.head[0], head: chosen.head[1] };

export const label = ([layer, index]) => `L${layer}H${index}`;

export const cellAt = (i) => [Math.floor(i / state.run.n_heads), i % state.run.n_heads];

export const labelAt = (i) => label(cellAt(i));

export const place = ([layer, index]) => layer * state.run.n_heads + index;

export const brushList = () =>
  [...chosen.brushes].map(([statistic, [first, last]]) => ({ statistic, first, last }));

export const facts = (name) =>
  state.overview.statistics.find((statistic) => statistic.name === name) ?? { name, meaning: "" };

export const runOf = (one) => state.overview.runs.find(({ run_id }) => run_id === one.run_id);

// The step of a checkpoint says more than the name of its run.
export function sectionName({ run_id, intervention }) {
  const { step } = runOf({ run_id }) ?? {};
  const name = isUndefined(step) ? run_id : `step ${step} · ${run_id}`;
  return intervention === "none" ? name : `${name} · ${intervention}`;
}

export const conditions = ({ run_id, intervention }) =>
  `run_id = ${literal(run_id)} AND intervention = ${literal(intervention)}`;

export const defined = (list) => [...list].filter((value) => !isUndefined(value));

// The run and the intervention that RUN/INTERVENTION names.
export function sectionNamed(words) {
  const [, run_id, intervention] = /^(.*)\/([^/]*)$/.exec(words ?? "") ?? [];
  return run_id === undefined ? null : { run_id, intervention };
}

// The runs and interventions whose heads can be set beside those of the run.
export function sections() {
  const isAlike = (one) =>
    one.n_layers === state.run.n_layers &&
    one.n_heads === state.run.n_heads &&
    one.sequences_done > 0;
  return state.overview.runs
    .filter(isAlike)
    .flatMap((one) =>
      one.interventions.map((intervention) => ({ run_id: one.run_id, intervention })),
    );
}

export const matrix = (list) =>
  [...Array(state.run.n_layers).keys()].map((layer) =>
    list.slice(layer * state.run.n_heads, (layer + 1) * state.run.n_heads),
  );

export const allHeads = () => [...Array(state.run.n_layers * state.run.n_heads).keys()];

// A choice of the reader's. `page.js` knows which panels show it.
export function choose(changes) {
  state.absent = [];
  Object.assign(chosen, changes);
  state.show(changes);
}
