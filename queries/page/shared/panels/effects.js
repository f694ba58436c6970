// Estimated effects on the loss, and what parts of layers add to the logits.
import { mayAskForAll, tryToAsk } from "../asking.js";
import { behind, literal } from "../behind.js";
import { button, effectsOfHead, effectsTable, plusMinus, table, tableRow } from "../card.js";
import { breakable, html, isUndefined, number, scatter } from "../draw.js";
import { againstBaseline } from "../numbers.js";
import {
  allHeads,
  by,
  cellAt,
  choose,
  chosen,
  conditions,
  label,
  labelAt,
  place,
  scope,
  state,
  turns,
} from "../state.js";
import { SHOWN_HEADS } from "./heads.js";
import { offer } from "./sql.js";

// Parts of a layer that add to the logits, by number.
const PARTS = ["embeddings", "heads", "rest of attention", "MLP", "biases"];

// What one of `effects` says of a head, by its place.
function effectOf({ statistic, measured_by: intervention, trust }, i, q) {
  const [own, part] = [state.numbers[statistic], state.numbers[`direct_${statistic}`]];
  const [layer, index] = cellAt(i);
  const [effect, direct] = [own?.mean[i], part?.mean[i]];
  return {
    i,
    effect,
    direct,
    q: q?.[i],
    standard_error: own?.standard_error[i],
    direct_error: part?.standard_error[i],
    indirect: isUndefined(effect) || isUndefined(direct) ? null : effect - direct,
    intervention: intervention.replace("{layer}", layer).replace("{head}", index),
    trust: trust[1 + layer],
  };
}

const qOfEffect = ({ statistic }) =>
  state.numbers[statistic] && againstBaseline(state.numbers[statistic], 0);

function effectFigure(one) {
  const { statistic, meaning, pairs } = one;
  const q = qOfEffect(one);
  const rows = allHeads()
    .map((i) => effectOf(one, i, q))
    .filter(({ effect }) => !isUndefined(effect));
  if (!rows.length) return [];
  rows.sort((a, b) => Math.abs(b.effect) - Math.abs(a.effect));
  const [all, ...layers] = new Set(one.trust);
  const points = pairs.map(({ label: name, estimate: x, measured: y, measured_error: error }) => ({
    name,
    x,
    y,
    label: true,
    says: `${name}: estimate ${number(x)}, measured ${plusMinus(y, error)}`,
  }));
  const plot = html(
    "div",
    { class: "plot" },
    points.length
      ? scatter({
          points,
          xName: "estimate, nats per token",
          yName: "measured",
          title: `${statistic}: estimated and measured`,
          width: 400,
          height: 230,
        })
      : null,
  );
  const listed = rows.slice(0, SHOWN_HEADS).map((row) => ({ ...row, trust: null }));
  const nameOf = ({ i }) => button(labelAt(i), () => choose({ head: cellAt(i) }));
  const columns = ["effect", "standard_error", "q", "direct", "indirect"];
  return [
    html(
      "figure",
      { "data-effect": statistic },
      html(
        "h4",
        {},
        button(breakable(statistic), () => choose({ statistic })),
      ),
      html("p", { class: "note" }, meaning),
      html("p", { class: "finding" }, all),
      layers.length
        ? html(
            "details",
            {},
            html("summary", {}, "By layer"),
            ...layers.map((words) => html("p", {}, words)),
          )
        : null,
      effectsTable(listed, "head", nameOf, `Heads by ${statistic}`),
      plot,
      behind({
        plot: points.length ? plot : null,
        askSql: offer,
        name: statistic,
        columns: ["head", ...columns],
        rows: () => rows.map((row) => [labelAt(row.i), ...columns.map((column) => row[column])]),
        sql:
          `FROM head_effects\nWHERE ${conditions(chosen)}\n  AND statistic = ` +
          `${literal(statistic)}\nORDER BY rank`,
      }),
    ),
  ];
}

// What each part of each layer adds straight to the logit of the next token.
function partsFigure(parts) {
  const sum = (list) => list.reduce((total, { mean }) => total + mean, 0);
  const rowOf = (layer) => {
    const own = parts.filter((part) => part.layer === layer);
    // Only the first layer has embeddings, only the last one biases.
    return own.length
      ? [
          tableRow([
            String(layer),
            ...own.map(({ mean, standard_error }) => (mean ? plusMinus(mean, standard_error) : "")),
            number(sum(own)),
          ]),
        ]
      : [];
  };
  const all = tableRow([
    "all",
    ...PARTS.map((_, i) => number(sum(parts.filter(({ part }) => part === i)))),
    number(sum(parts)),
  ]);
  const rows = [...Array(state.run.n_layers).keys()].flatMap(rowOf);
  const note =
    "What each part adds straight to the logit of the next token, less the " +
    "mean over the vocabulary. The parts add up to the whole logit.";
  return [
    html(
      "figure",
      { "data-parts": "" },
      html("h4", {}, "Direct logit of parts"),
      html("p", { class: "note" }, note),
      html(
        "div",
        { class: "scroll" },
        table(["layer", ...PARTS, "sum"], [...rows, all], "Direct logit of parts"),
      ),
    ),
  ];
}

export async function showEffects(turn) {
  by("effects-card").hidden = !state.run.has_effects || !mayAskForAll();
  const answer = by("effects-card").hidden
    ? { effects: [], parts: [] }
    : await tryToAsk({ kind: "effects", scope: scope() });
  if (!answer || turn !== turns.all) return;
  state.effects = answer.effects;
  by("effects").replaceChildren(
    ...state.effects.flatMap(effectFigure),
    ...(answer.parts.length ? partsFigure(answer.parts) : []),
  );
  if (chosen.head) showHeadEffects();
}

export function showHeadEffects() {
  const rows = state.effects
    .map((one) => effectOf(one, place(chosen.head), qOfEffect(one)))
    .filter(({ effect }) => !isUndefined(effect));
  by("head-effects").replaceChildren(...effectsOfHead(rows, label(chosen.head)));
}
