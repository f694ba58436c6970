// The page of a report and of the explorer: what is chosen, what that asks, and where answers are shown.
import { behind, copy, literal, summaries } from "./behind.js";
import {
  attentionText, button, curveFigure, effectsOfHead, effectsTable, excerptList, fillPercentile, markedText, marksOf, plusMinus, sentence, statisticsTable, subsetBars, table,
  tableRow, tokenText,
} from "./card.js";
import { Cube } from "./cube.js";
import { breakable, colourOf, heatmap, html, isUndefined, lines, number, scatter } from "./draw.js";
import { BINS, histogram } from "./histogram.js";
import { adjustedP } from "./significance.js";
import { answerTo, isLive, isWaiting, takeToken } from "./source.js";

// Statistics that say what a head does: the first of them that were measured are shown first.
const LEADING = ["sink_mass", "induction_score", "previous_token_score", "duplicate_score", "self_attention", "entropy"];
// Views that rank heads by a statistic, and when a head passes their threshold.
const RANKINGS = {
  sink_mass: ["sink_heads", (mean) => (1 + (run.n_ctx - 1) * mean) / run.n_ctx > 0.3],
  induction_score: ["induction_heads", (mean) => mean >= 0.4],
};
const SUMMARY = ["mean", "standard_error", "documents", "count"];
const MOST_HISTOGRAMS = 12;
const MOST_SECTIONS = 24;
const SHOWN_HEADS = 10;
const SNIPPET_TOKENS = 48;
const LOOK_ALIKE = 0.95;
const MOST_Q = 0.05;
// Parts of a layer that add to the logits, by number.
const PARTS = ["embeddings", "heads", "rest of attention", "MLP", "biases"];
const LIVE_MILLISECONDS = 5_000;
const FINISHED_MILLISECONDS = 30_000;
// Above so many rows without roll-ups, the means of all statistics would keep the machine busy.
const MOST_ROWS = 1e7;

const by = (id) => document.getElementById(id);
const chosen = {}; // What `recall` reads from the address.
let overview = null;
let shownHash = "";
let absent = []; // What was asked for and is not here.
let run = null;
let numbers = {}; // Of the chosen statistics of all heads, by name: what is known so far.
let compared = null; // What the heatmap is compared with.
let map = null; // The drawn heatmaps, the means of the first, and those that are shown in it.
let picked = null; // The heads that the scatter picks, as places. Null is all.
let histograms = new Map();
let cube = null; // The cube of one brush: its key, its promise, and the cube once it is there.
const known = new Map(); // Answers about all heads: numbers by statistic, and where they are from.
const sql = { hist: "", extremes: "" };

// What belongs to an older choice is not drawn.
const turns = { all: 0, head: 0, brush: 0, extremes: 0 };

const scope = () => ({ run_id: chosen.run_id, intervention: chosen.intervention, subset: chosen.subset, layers: chosen.layers });
const otherScope = () => chosen.other && { ...scope(), ...chosen.other };
const head = () => chosen.head && { layer: chosen.head[0], head: chosen.head[1] };
const label = ([layer, index]) => `L${layer}H${index}`;
const cellAt = (i) => [Math.floor(i / run.n_heads), i % run.n_heads];
const labelAt = (i) => label(cellAt(i));
const place = ([layer, index]) => layer * run.n_heads + index;
const brushList = () => [...chosen.brushes].map(([statistic, [first, last]]) => ({ statistic, first, last }));
const facts = (name) => overview.statistics.find((statistic) => statistic.name === name) ?? { name, meaning: "" };
const sectionName = ({ run_id, intervention }) => (intervention === "none" ? run_id : `${run_id} · ${intervention}`);
const conditions = ({ run_id, intervention }) => `run_id = ${literal(run_id)} AND intervention = ${literal(intervention)}`;
const defined = (list) => [...list].filter((value) => !isUndefined(value));
const offer = isLive ? (query) => offerSql(query) : null;

function trouble(error) {
  if (error?.name === "AbortError") return;
  by("trouble").hidden = !error;
  by("trouble").textContent = error ? error.message : "";
}

// Ask, and show what goes wrong in one line. Undefined if there is no answer.
async function tryToAsk(query, signal) {
  try {
    const answer = await answerTo(query, signal);
    if (overview && answer.revision !== undefined && answer.revision !== overview.revision && query.kind !== "overview") lookAgain();
    trouble(null);
    return answer;
  } catch (error) {
    trouble(error);
    return undefined;
  }
}

// The answer about one statistic of all heads, or about all. Each is asked for once.
async function aboutHeads(ofScope, statistic, changes = false) {
  const key = JSON.stringify([ofScope, changes]);
  if (!known.has(key)) known.set(key, { values: {} });
  const about = known.get(key);
  if (about.isWhole || about.values[statistic]) return about;
  const answer = await tryToAsk({ kind: "heatmap", scope: ofScope, ...(statistic && { statistic }), ...(changes && { changes }) });
  if (!answer) return undefined;
  Object.assign(about, { ...answer, values: Object.assign(about.values, answer.values) });
  about.isWhole ||= !isLive || !statistic;
  return about;
}

const mayAskForAll = () => !isLive || run.has_rollups || run.rows <= MOST_ROWS;

// ---- Menus

function fill(select, options, value) {
  select.replaceChildren(...options.map(([key, name, isOff]) => html("option", { value: key, disabled: Boolean(isOff) }, name ?? key)));
  select.value = value ?? "";
}

// What was asked for. If it is not here, a line says what is shown instead.
function available(what, wanted, names, instead, words = instead) {
  if (wanted === null || names.includes(wanted)) return wanted ?? instead;
  absent.push(`${what} ${wanted} is not here, ${words} is shown`);
  return instead;
}

function fillMenus() {
  const families = [...new Set(overview.runs.map((one) => one.input_family))].sort();
  by("family-menu").hidden = families.length < 2;
  fill(by("family"), [["", "all"], ...families.map((name) => [name])], by("family").value);
  const family = by("family").value;
  const runs = overview.runs.filter((one) => !family || one.input_family === family);
  const first = runs.find((one) => one.sequences_done) ?? runs[0];
  chosen.run_id = available("run", chosen.run_id, runs.map((one) => one.run_id), first.run_id);
  run = overview.runs.find((one) => one.run_id === chosen.run_id);
  fill(by("run"), runs.map((one) => [one.run_id, `${one.run_id} · ${one.model} · ${one.input_family}`]), run.run_id);
  chosen.intervention = available("intervention", chosen.intervention, run.interventions, run.interventions[0]);
  fill(by("intervention"), run.interventions.map((name) => [name]), chosen.intervention);
  by("subset-menu").hidden = by("subsets-card").hidden = run.subsets.length === 0;
  by("curves-card").hidden = !run.has_curves;
  chosen.subset = available("subset", chosen.subset, run.subsets, null, "all of the input");
  fill(by("subset"), [["", "all"], ...run.subsets.map((name) => [name])], chosen.subset ?? "");
  const layers = [...Array(run.n_layers).keys()].map((layer) => [layer, String(layer)]);
  const [low, high] = chosen.layers ?? [0, run.n_layers - 1];
  if (!(low <= high && high < run.n_layers)) chosen.layers = available("layers", `${low} to ${high}`, [], null, "every layer");
  fill(by("first-layer"), layers, chosen.layers?.[0] ?? 0);
  fill(by("last-layer"), layers, chosen.layers?.[1] ?? run.n_layers - 1);
  const others = sections().filter((one) => one.run_id !== chosen.run_id || one.intervention !== chosen.intervention);
  const names = others.map((one) => `${one.run_id}/${one.intervention}`);
  const other = available("with", chosen.other && `${chosen.other.run_id}/${chosen.other.intervention}`, names, null, "no comparison");
  chosen.other = others[names.indexOf(other)] ?? null;
  by("compare-menu").hidden = !others.length;
  fill(by("compare"), [["", "nothing"], ...others.map((one, i) => [names[i], sectionName(one)])], other);
  const isHead = chosen.head && chosen.head[0] < run.n_layers && chosen.head[1] < run.n_heads;
  if (chosen.head && !isHead) chosen.head = available("head", label(chosen.head), [], null, "the head with the largest mean");
  fillStatistics();
  fillHeader();
  by("own").checked = chosen.ownRange;
  by("absent").hidden = !absent.length;
  by("absent").textContent = `${absent.join("; ")}.`;
}

// The run and the intervention that RUN/INTERVENTION names.
function sectionNamed(words) {
  const [, run_id, intervention] = /^(.*)\/([^/]*)$/.exec(words ?? "") ?? [];
  return run_id === undefined ? null : { run_id, intervention };
}

// The runs and interventions whose heads can be set beside those of the run.
function sections() {
  const isAlike = (one) => one.n_layers === run.n_layers && one.n_heads === run.n_heads && one.sequences_done > 0;
  return overview.runs.filter(isAlike).flatMap((one) => one.interventions.map((intervention) => ({ run_id: one.run_id, intervention })));
}

function fillStatistics() {
  const leading = [...LEADING.filter((name) => run.statistics.includes(name)), ...run.first_statistics, ...run.statistics];
  chosen.statistic = available("statistic", chosen.statistic, run.statistics, leading[0]);
  chosen.shown = chosen.shown.filter((name) => available("histogram", name, run.statistics, null, "another"));
  if (!chosen.shown.length) chosen.shown = [...run.first_statistics];
  for (const name of chosen.brushes.keys()) if (!available("brush", name, chosen.shown, null, "every value")) chosen.brushes.delete(name);
  // What another run measured and this one did not is said, not hidden.
  const names = overview.statistics.map(({ name }) => name);
  const isMeasured = (name) => run.statistics.includes(name);
  fill(by("statistic"), names.map((name) => [name, isMeasured(name) ? name : `${name} (not measured in this run)`, !isMeasured(name)]), chosen.statistic);
  const axes = ["layer", "head", ...names.filter(isMeasured)];
  const [up, right] = [...new Set(leading)];
  const defaults = { x: right ?? "layer", y: up ?? "head", colour: "layer" };
  for (const [axis, instead] of Object.entries(defaults)) {
    chosen[axis] = available(axis, chosen[axis], axes, instead);
    fill(by(axis), axes.map((name) => [name]), chosen[axis]);
  }
  by("shown-list").replaceChildren(...names.filter(isMeasured).map((name) => {
    const isShown = chosen.shown.includes(name);
    const box = html("input", { type: "checkbox", checked: isShown, onchange: () => showHistogram(name, box.checked) });
    return html("label", { title: facts(name).meaning ?? null }, box, ` ${name}`);
  }));
}

function fillHeader() {
  by("title").textContent = `What the attention heads of ${run.model} do`;
  const share = Math.floor((100 * run.sequences_done) / run.sequences);
  const words = run.complete
    ? [`${number(run.sequences_done)} sequences of ${number(run.n_ctx)} tokens`]
    : [`${number(run.sequences_done)} of ${number(run.sequences)} sequences are in (${share} %)`];
  if (run.rows) words.push(`${number(run.rows)} rows`);
  words.push(`input ${run.input_family}`);
  if (isLive && !run.complete) words.push(`looked at ${new Date().toLocaleTimeString()}`);
  by("progress").textContent = run.sequences_done ? words.join(" · ") : "No rows yet.";
  const measured = run.measured_heads === "all" ? "" : `; measured: ${run.measured_heads}`;
  const about = {
    run: run.run_id,
    "layers × heads": `${run.n_layers} × ${run.n_heads}${measured}`,
    input: `${run.input_family}${run.options ? ` (${run.options})` : ""}`,
    weights: run.weight_processing,
    engine: run.engines && `${run.engines[chosen.intervention]}, ${run.precision}`,
    shards: `${number(run.shards_done)} of ${number(run.shards)}`,
    started: run.created && String(run.created).replace("T", " ").replace(/(:\d\d)(\.\d+)?(Z|\+00:00)$/, " UTC"),
  };
  const shown = Object.entries(about).filter(([, value]) => value);
  by("facts").replaceChildren(...shown.flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]));
  const damaged = run.damaged?.length ? ` Damaged and left out: shard ${run.damaged.join(", ")}.` : "";
  const done = `${number(run.shards_done)} of ${number(run.shards)} shards are done, which are ${number(run.sequences_done)} of ${number(run.sequences)} sequences`;
  const warnings = [...overview.damage, ...(isLive || run.complete ? [] : [`Incomplete: ${done}.${damaged}`])];
  if (overview.is_short) warnings.push("One file holds the means of so many heads, but not their distributions. A report of one run, or headcount explore, has them.");
  by("warnings").replaceChildren(...warnings.map((words) => html("p", { class: "warning" }, words)));
}

// ---- The address

// What is shown stands in the address, so that a reload, a bookmark and Back keep it. A choice is a
// step that Back undoes; a brush is none.
function remember(isStep = false) {
  const words = new URLSearchParams({ run: chosen.run_id, intervention: chosen.intervention, statistic: chosen.statistic });
  if (chosen.head) words.set("head", label(chosen.head));
  if (chosen.other) words.set("with", `${chosen.other.run_id}/${chosen.other.intervention}`);
  if (chosen.subset !== null) words.set("subset", chosen.subset);
  if (chosen.layers) words.set("layers", chosen.layers.join("-"));
  for (const axis of ["x", "y", "colour"]) if (chosen.hasAxes) words.set(axis, chosen[axis]);
  if (chosen.pick) words.set("pick", chosen.pick.map((end) => Number(end.toPrecision(4))).join());
  if (chosen.ownRange) words.set("range", "own");
  if (chosen.shown.join() !== run.first_statistics.join()) words.set("shown", chosen.shown.join());
  for (const [name, range] of chosen.brushes) words.append("brush", `${name}:${range.join("-")}`);
  if (chosen.meaning !== "sequences") words.set("picks", chosen.meaning);
  if (chosen.lowest) words.set("end", "lowest");
  if (chosen.sequence !== null) words.set("sequence", chosen.sequence);
  shownHash = `#${words}`;
  if (location.hash !== shownHash) history[isStep ? "pushState" : "replaceState"](null, "", shownHash);
}

function recall() {
  shownHash = location.hash;
  const words = new URLSearchParams(shownHash.slice(1));
  absent = [];
  const readNumbers = (text, pattern) => {
    const found = pattern.exec(text);
    if (text !== null && !found) absent.push(`${text} cannot be read`);
    return found?.slice(1).map(Number) ?? null;
  };
  const brush = (text) => [text.replace(/:[^:]*$/, ""), readNumbers(text, /:(\d+)-(\d+)$/)?.map((bin) => Math.min(bin, BINS - 1)).sort((a, b) => a - b)];
  const end = "(-?[\\d.]+(?:e[-+]?\\d+)?)";
  Object.assign(chosen, {
    run_id: words.get("run"), intervention: words.get("intervention"), subset: words.get("subset"), statistic: words.get("statistic"),
    other: sectionNamed(words.get("with")),
    layers: readNumbers(words.get("layers"), /^(\d+)-(\d+)$/), head: readNumbers(words.get("head"), /^L(\d+)H(\d+)$/),
    x: words.get("x"), y: words.get("y"), colour: words.get("colour"), hasAxes: words.has("x"),
    pick: readNumbers(words.get("pick"), new RegExp(`^${end},${end},${end},${end}$`)), ownRange: words.get("range") === "own",
    shown: words.get("shown")?.split(",").slice(0, MOST_HISTOGRAMS) ?? [],
    brushes: new Map(isLive ? words.getAll("brush").map(brush).filter(([, range]) => range) : []),
    meaning: words.get("picks") === "rows" ? "rows" : "sequences", lowest: words.get("end") === "lowest",
    sequence: readNumbers(words.get("sequence"), /^(\d+)$/)?.[0] ?? null,
  });
  by("family").value = "";
  for (const input of document.getElementsByName("meaning")) input.checked = input.value === chosen.meaning;
  for (const input of document.getElementsByName("end")) input.checked = (input.value === "lowest") === chosen.lowest;
}

// A choice of the reader's, and how it is shown.
function choose(changes, show) {
  absent = [];
  Object.assign(chosen, changes);
  fillMenus();
  remember(true);
  return show();
}

// ---- The heatmap, and what it is compared with

// From 0 to 1 if that is the range, even around 0 if the sign has a meaning, else from the smallest to
// the largest value. A reader may ask for the values' own range.
function rangeOf(name, values) {
  const inside = defined(values);
  const [low, high] = inside.length ? [Math.min(...inside), Math.max(...inside)] : [0, 1];
  const { range_low: lowest, range_high: highest } = facts(name);
  if (lowest === 0 && highest === 1 && !chosen.ownRange) return { range: [0, 1], scale: "sequential" };
  if (low >= 0 || high <= 0) return { range: [low, high], scale: "sequential" };
  const largest = Math.max(-low, high);
  return { range: [-largest, largest], scale: "diverging" };
}

const matrix = (list) => [...Array(run.n_layers).keys()].map((layer) => list.slice(layer * run.n_heads, (layer + 1) * run.n_heads));

// A heatmap of all heads in which a head can be chosen. Without names of axes it is a small one.
function headMap(list, options) {
  return heatmap({ rows: run.n_layers, cols: run.n_heads, values: matrix(list), chosen: chosen.head, onChoose: (row, col) => chooseHead([row, col]), ...options });
}

// What a statistic is compared with, and the differences: of the same sequences, if the run measured
// both with and without the intervention, and else as if the sequences of the two were independent.
async function comparison(statistic) {
  if (!chosen.other) return null;
  const [own, other] = [scope(), otherScope()];
  const about = await aboutHeads(other, statistic);
  const theirs = about?.values[statistic];
  const ours = numbers[statistic];
  if (!theirs || !ours) return null;
  const isPaired = own.run_id === other.run_id && [own.intervention, other.intervention].includes("none");
  const isForward = own.intervention === "none";
  const changes = isPaired ? (await aboutHeads(isForward ? other : own, statistic, true))?.values[statistic] : null;
  const both = (column, combine) => Array.from(ours[column], (one, i) => (isUndefined(one) || isUndefined(theirs[column][i]) ? null : combine(one, theirs[column][i])));
  const difference = changes
    ? { ...changes, mean: changes.mean.map((change) => (isUndefined(change) || isForward ? change : -change)) }
    : { mean: both("mean", (one, two) => two - one), standard_error: both("standard_error", Math.hypot), degrees_of_freedom: both("degrees_of_freedom", Math.min) };
  const level = (i) => Math.max(Math.abs(ours.mean[i]), Math.abs(theirs.mean[i]));
  return { theirs, isPaired: Boolean(changes), ...difference, q: adjustedP(difference, level) };
}

// Pale: a head that is not surely different. Even around 0, where less than a millionth of the means is
// the rounding of sums.
function differenceLooks(difference, means) {
  const largestOf = (list) => Math.max(0, ...defined(list).map(Math.abs));
  const largest = Math.max(largestOf(difference.mean), 1e-6 * largestOf(means)) || 1;
  return { range: [-largest, largest], scale: "diverging", faint: (...cell) => difference.q[place(cell)] > MOST_Q };
}

async function showHeatmap(turn) {
  const statistic = chosen.statistic;
  const about = await aboutHeads(scope(), statistic);
  if (turn !== turns.all || !about) return false;
  numbers = about.values;
  compared = await comparison(statistic);
  if (turn !== turns.all) return false;
  const own = numbers[statistic] ?? { mean: Array(run.n_layers * run.n_heads).fill(null), standard_error: [], count: [], undefined: [], documents: [], degrees_of_freedom: [] };
  const { meaning, unit, formula, source } = facts(statistic);
  by("meaning").replaceChildren(
    [meaning, unit && `Unit: ${unit}.`].filter(Boolean).join(" "),
    ...(formula ? [html("br"), html("code", {}, formula)] : []), ...(source ? [html("br"), `Source: ${source}`] : []),
  );
  const hadFocus = by("heatmap").contains(document.activeElement);
  const looks = rangeOf(statistic, [...own.mean, ...(compared?.theirs.mean ?? [])]);
  const room = by("heatmap").clientWidth;
  const options = {
    ...looks, width: compared && room > 620 ? (room - 50) / 3 : Math.min(room, 560), cell: 48,
    onHover: (row, col) => { by("readout").textContent = row === undefined ? "" : says([row, col]); },
  };
  const figure = headMap(own.mean, { ...options, title: `${statistic} by layer and head` });
  map = { figures: [figure], values: own.mean, shown: own.mean };
  if (compared) {
    const second = headMap(compared.theirs.mean, { ...options, title: `${statistic} in ${sectionName(chosen.other)}` });
    const third = headMap(compared.mean, { ...options, ...differenceLooks(compared, own.mean), title: `Difference of ${statistic}` });
    map.figures.push(second, third);
    const captions = [sectionName(chosen), sectionName(chosen.other), "second minus first"];
    by("heatmap").replaceChildren(...map.figures.map((one, i) => html("figure", {}, html("figcaption", {}, captions[i]), one)));
  } else by("heatmap").replaceChildren(figure);
  document.body.classList.toggle("comparing", Boolean(compared));
  performance.measure("heatmap");
  if (hadFocus) figure.querySelector("[tabindex='0']")?.focus();
  if (!chosen.head) chosen.head = strongest(own.mean);
  map.figures.forEach((one) => one.choose(...(chosen.head ?? [])));
  by("finding").textContent = finding(statistic);
  const how = compared?.isPaired
    ? "Differences are means over the same sequences, with and without the intervention."
    : "The error of a difference takes the two for independent. Shared documents make it too large: run_changes has that of pairs.";
  const notes = [isLive && about.source === "rollups" ? "Means of all rows, from roll-ups." : sampled(about.every), definedNote(own)];
  if (compared) notes.push(how, `In a pale cell q is above ${MOST_Q}: of the heads in full colour, at most 5 % are expected not to differ.`);
  by("heat-note").textContent = notes.filter(Boolean).join(" ");
  return true;
}

const sampled = (every) => (every > 1 ? `A large run: 1 of ${every} sequences is read.` : "");

function definedNote(own) {
  const most = Math.max(0, ...own.undefined);
  if (!most) return "";
  const least = Math.min(...defined(own.count).filter((count, i) => !isUndefined(own.mean[i])));
  return Number.isFinite(least) ? `Defined in ${number(least)} of ${number(least + most)} sequences.` : "Undefined in every sequence.";
}

// q of means less the uniform baseline, as if that were known; or less 0. Null without a baseline.
function againstBaseline(own, baseline = own.uniform_baseline) {
  const above = { ...own, mean: Array.from(own.mean, (mean) => (isUndefined(mean) || isUndefined(baseline) ? null : mean - baseline)) };
  return adjustedP(above, () => baseline);
}

function ranked(name) {
  const own = numbers[name];
  const q = own && againstBaseline(own);
  const entries = Array.from(own?.mean ?? [], (mean, i) => ({ i, mean, error: own.standard_error[i], q: q[i] }));
  return entries.filter(({ mean }) => !isUndefined(mean)).sort((one, other) => other.mean - one.mean);
}

// The page begins with a head, so that no panel is empty.
function strongest() {
  const [first] = ranked(chosen.statistic);
  return first ? cellAt(first.i) : null;
}

// Which head leads, and how many are high.
function finding(name) {
  const [first] = ranked(name);
  if (!first) return "";
  const baseline = numbers[name].uniform_baseline;
  let words = `${labelAt(first.i)} leads in ${name} with ${plusMinus(first.mean, first.error)}`;
  if (baseline) words += `, ${number(Number((first.mean / baseline).toPrecision(2)))} times the uniform baseline`;
  const [view, passes] = RANKINGS[name] ?? [];
  const isAbove = ({ mean, q }) => isUndefined(baseline) || (mean > baseline && !isUndefined(q) && q <= MOST_Q);
  const passing = view && ranked(name).filter((one) => passes(one.mean) && isAbove(one)).length;
  if (view) words += `. ${number(passing)} of ${number(ranked(name).length)} heads pass the threshold of ${view}, q <= ${MOST_Q}`;
  return `${words}.`;
}

function says(cell) {
  const i = place(cell);
  const own = numbers[chosen.statistic];
  if (map.shown !== map.values) return `${label(cell)}: ${chosen.statistic} ${number(map.shown[i])} under the brush`;
  const here = `${label(cell)}: ${plusMinus(map.shown[i], own?.standard_error[i])}`;
  if (!compared) return here;
  const [there, difference] = [compared.theirs, compared].map(({ mean, standard_error }) => plusMinus(mean[i], standard_error[i]));
  return `${here} → ${there}; difference ${difference}, q ${number(compared.q[i])}`;
}

// Other means in the same cells, which is faster than another drawing.
function repaint(means) {
  map.shown = means;
  map.figures[0].paint(matrix(means));
}

// ---- The scatter of heads, and the heads that it picks

const axisValue = (axis, i) => (axis === "layer" ? Math.floor(i / run.n_heads) : axis === "head" ? i % run.n_heads : numbers[axis]?.mean[i]);
const allHeads = () => [...Array(run.n_layers * run.n_heads).keys()];

async function showScatter(turn) {
  const axes = ["x", "y", "colour"].map((axis) => chosen[axis]);
  for (const axis of axes) if (axis !== "layer" && axis !== "head") await aboutHeads(scope(), axis);
  if (turn !== turns.all) return;
  const [x, y, colour] = axes;
  const looks = ["layer", "head"].includes(colour)
    ? { range: [0, colour === "layer" ? run.n_layers - 1 : run.n_heads - 1], scale: "sequential" }
    : rangeOf(colour, numbers[colour]?.mean ?? []);
  const paint = colourOf(looks.range, looks.scale);
  const top = new Set(ranked(y in numbers ? y : chosen.statistic).slice(0, 5).map(({ i }) => i));
  if (chosen.head) top.add(place(chosen.head));
  const points = allHeads().map((i) => {
    const [right, up, hue] = axes.map((axis) => axisValue(axis, i));
    const isChosen = Boolean(chosen.head) && i === place(chosen.head);
    return {
      i, name: labelAt(i), x: right, y: up, on: isChosen, label: top.has(i), colour: isUndefined(hue) ? null : paint(hue),
      says: `${labelAt(i)}: ${x} ${number(right)}, ${y} ${number(up)}, ${colour} ${number(hue)}`,
    };
  });
  const wide = by("scatter").clientWidth;
  const figure = scatter({
    points, xName: x, yName: y, title: `Heads by ${x} and ${y}, coloured by ${colour}`, width: Math.min(wide, 620), height: 330,
    onChoose: ({ i }) => chooseHead(cellAt(i)),
    onPick: (range) => { chosen.pick = range; showPicked(); remember(); },
  });
  by("scatter").replaceChildren(figure);
  figure.pick(chosen.pick);
  showPicked();
}

// One brush: what the scatter picks is set off in every heatmap, and listed.
function showPicked() {
  const range = chosen.pick;
  const isIn = (i) => {
    const [x, y] = [axisValue(chosen.x, i), axisValue(chosen.y, i)];
    return x >= range[0] && x <= range[1] && y >= range[2] && y <= range[3];
  };
  picked = range ? new Set(allHeads().filter(isIn)) : null;
  by("picked-heads").textContent = picked ? `${number(picked.size)} of ${number(allHeads().length)} heads picked` : "";
  for (const cell of document.querySelectorAll("#heatmap [data-cell], #maps [data-cell]")) {
    cell.classList.toggle("unpicked", Boolean(picked) && !picked.has(place(cell.dataset.cell.split(".").map(Number))));
  }
  const name = chosen.statistic;
  const rows = ranked(name).filter(({ i }) => !picked || picked.has(i));
  const axes = [chosen.x, chosen.y].filter((axis) => axis !== name && axis in numbers);
  const cells = ({ i, mean, error, q }) => [plusMinus(mean, error), number(q), ...axes.map((axis) => number(axisValue(axis, i)))];
  const isChosen = (i) => Boolean(chosen.head) && i === place(chosen.head);
  const row = (entry) => tableRow([button(labelAt(entry.i), () => chooseHead(cellAt(entry.i))), ...cells(entry)], { "aria-selected": String(isChosen(entry.i)) });
  by("heads-name").textContent = picked ? `Picked heads by ${name}` : `Heads with the largest ${name}`;
  const listed = rows.slice(0, picked ? rows.length : SHOWN_HEADS);
  by("heads-rows").replaceChildren(table(["head", `${name} ±`, { name: "q", title: "Of the mean against the uniform baseline" }, ...axes], listed.map(row), "Heads by the chosen statistic"));
}

// ---- Histograms and brushes

function makeHistograms() {
  histograms = new Map(chosen.shown.map((name) => [name, histogram(name, facts(name).meaning ?? "", isLive && {
    enter: () => warm(name),
    move: (range) => brushed(name, range),
    end: rested,
  })]));
  by("histograms").replaceChildren(...histograms.values());
}

function showHistogram(name, isShown) {
  const others = chosen.shown.filter((one) => one !== name);
  const shown = isShown || !others.length ? [...others, name] : others;
  choose({ shown: shown.slice(-MOST_HISTOGRAMS) }, () => { makeHistograms(); showHead(); showBackgrounds(); });
}

async function showBackgrounds() {
  if (!isLive) return;
  // One after the other: the head's own histograms come between them.
  for (const [name, figure] of [...histograms]) {
    const answer = await tryToAsk({ kind: "histograms", scope: scope(), statistics: [name] });
    if (!answer || histograms.get(name) !== figure) return;
    figure.drawAll(answer.histograms[name].counts);
  }
}

// The cube of a brush is asked for when a pointer or the focus comes near: moves then ask nothing.
function warm(name) {
  if (!chosen.head) return null;
  const others = brushList().filter((brush) => brush.statistic !== name);
  const statistics = chosen.shown.filter((one) => one !== name);
  if (!statistics.length) statistics.push(name);
  const query = {
    kind: "cube", scope: scope(), head: head(), active: name, statistic: chosen.statistic, statistics, brushes: others, meaning: chosen.meaning,
  };
  const key = JSON.stringify([query, overview.revision]);
  if (cube?.key !== key) {
    cube?.abort.abort();
    const asked = { key, abort: new AbortController(), whole: null };
    asked.done = tryToAsk(query, asked.abort.signal).then((answer) => {
      if (answer) asked.whole = new Cube(answer, statistics, run.n_layers * run.n_heads);
      else if (cube === asked) cube = null;
      return asked.whole;
    });
    cube = asked;
  }
  return cube;
}

async function brushed(name, range) {
  chosen.brushes.delete(name);
  // The last one is the one that the cube is of.
  if (range) chosen.brushes.set(name, range);
  const turn = ++turns.brush;
  // A cube has no rows in which the active statistic is undefined: these count again now.
  if (!range) return takeBrushAway();
  const asked = warm(name);
  const whole = asked?.whole ?? (await asked?.done);
  if (!whole || turn !== turns.brush) return;
  sayPicked(whole.picked(range), whole.rows);
  const began = performance.now();
  for (const [other, figure] of histograms) if (other !== name) figure.drawOwn(whole.histogram(other, range));
  repaint(whole.means(range));
  performance.measure("brush", { start: began });
}

// How much the brushes pick, and of how much.
function sayPicked(count, total) {
  const hasBrush = chosen.brushes.size > 0;
  document.body.classList.toggle("brushed", hasBrush);
  by("clear").disabled = !hasBrush;
  const things = chosen.meaning === "rows" ? "rows of all heads" : "sequences";
  by("picked").textContent = hasBrush && total !== undefined ? `${number(count)} of ${number(total)} ${things} picked` : "";
}

function takeBrushAway() {
  sayPicked();
  if (chosen.brushes.size) return showHead();
  for (const figure of histograms.values()) figure.drawUnbrushed();
  repaint(map.values);
}

function rested() {
  remember();
  showExtremes();
}

function clearBrushes() {
  cube?.abort.abort();
  cube = null;
  for (const figure of histograms.values()) figure.setRange(null);
  choose({ brushes: new Map() }, () => { takeBrushAway(); rested(); });
}

// Brushes stay when something else is chosen: the heatmap under them is asked for again.
async function applyBrushes() {
  for (const [name, range] of chosen.brushes) histograms.get(name).setRange(range);
  const last = [...chosen.brushes].at(-1);
  if (!last) return sayPicked();
  await brushed(...last);
}

// ---- The head

function chooseHead(cell) {
  choose({ head: cell }, () => {
    map?.figures.forEach((figure) => figure.choose(...cell));
    by("said").textContent = `${label(cell)} is chosen; its numbers are shown.`;
    showScatter(turns.all);
    showHead();
  });
}

async function showHead() {
  if (!chosen.head) return;
  const turn = ++turns.head;
  const began = performance.now();
  by("head-name").textContent = `Head ${label(chosen.head)}`;
  const query = { kind: "histograms", scope: scope(), head: head(), statistics: chosen.shown };
  const answer = await tryToAsk(query);
  if (!answer || turn !== turns.head) return;
  sql.hist = answer.sql?.join("\n") ?? histogramsSql();
  by("brush-note").textContent = `Drag over a histogram, or move its two handles with the arrow keys. ${sampled(answer.every)}`;
  for (const [name, figure] of histograms) {
    const own = answer.histograms[name];
    figure.hidden = !own?.counts.length;
    if (figure.hidden) continue;
    figure.setAxis(own.edges);
    figure.drawBefore(own.counts);
  }
  performance.measure("head", { start: began });
  const under = chosen.brushes.size ? tryToAsk({ ...query, brushes: brushList() }) : null;
  showExtremes();
  showAttention();
  showCard(turn);
  if (run.subsets.length) showSubsets(turn);
  if (run.has_curves) showCurves(turn);
  const brushedAnswer = await under;
  if (!brushedAnswer || turn !== turns.head) return;
  for (const name of chosen.shown) histograms.get(name).drawOwn(brushedAnswer.histograms[name].counts);
  await applyBrushes();
}

const whereHead = () => `${conditions(chosen)} AND label = ${literal(label(chosen.head))}`;
const histogramsSql = () => `SELECT statistic, low, high, sum(count) AS count
FROM distributions
WHERE ${whereHead()}
  AND statistic IN (${chosen.shown.map(literal).join(", ")})
GROUP BY ALL
ORDER BY ALL`;

let card = []; // The rows of the chosen head.
let effects = []; // What estimates changes of the loss, and how far it can be trusted.

async function showCard(turn) {
  const own = await tryToAsk({ kind: "card", scope: scope(), head: head() });
  const other = chosen.other && (await tryToAsk({ kind: "card", scope: otherScope(), head: head() }));
  if (!own || turn !== turns.head) return;
  card = own.rows;
  for (const [name, figure] of histograms) figure.mark(marksOf(card.find((row) => row.statistic === name)));
  const titles = Object.fromEntries(overview.statistics.map(({ name, meaning }) => [name, meaning]));
  const options = { label: label(chosen.head), statistic: chosen.statistic, onStatistic: (name) => choose({ statistic: name }, showAll), percentile, titles, compared: other?.rows };
  const scrolled = by("card-rows").scrollTop;
  by("card-rows").replaceChildren(statisticsTable(card, options));
  by("card-rows").scrollTop = scrolled;
  showHeadEffects();
  saySentence();
}

function showHeadEffects() {
  const rows = effects.map((one) => effectOf(one, place(chosen.head), qOfEffect(one))).filter(({ effect }) => !isUndefined(effect));
  by("head-effects").replaceChildren(...effectsOfHead(rows, label(chosen.head)));
}

function saySentence() {
  const row = card.find((one) => one.statistic === chosen.statistic);
  by("sentence").textContent = chosen.head ? sentence(label(chosen.head), row, percentile(chosen.statistic), ranked(chosen.statistic).length) : "";
}

// The share of the other heads with a smaller mean, in percent. Undefined until the numbers of all
// heads are there.
const percentile = (statistic) => numbers[statistic]?.percentile[place(chosen.head)];

async function showSubsets(turn) {
  const statistic = chosen.statistic;
  const answer = await tryToAsk({ kind: "subsets", scope: scope(), head: head(), statistic });
  if (!answer || turn !== turns.head) return;
  by("subsets-note").textContent = `Mean ${statistic} of ${label(chosen.head)}, ± standard error over documents. The number of sequences is in brackets.`;
  const columns = ["subset", ...SUMMARY];
  by("subsets").replaceChildren(
    subsetBars(answer.rows, statistic, numbers[statistic]?.uniform_baseline),
    behind({
      plot: by("subsets"), askSql: offer, columns, name: `${label(chosen.head)}-${statistic}-subsets`,
      rows: () => answer.rows.map((row) => columns.map((column) => row[column])),
      sql: `SELECT pile_set_name, mean, standard_error, documents, count\nFROM subset_summaries\nWHERE ${whereHead()}\n  AND statistic = ${literal(statistic)}`,
    }),
  );
}

async function showCurves(turn) {
  const answer = await tryToAsk({ kind: "curves", scope: scope(), head: head() });
  if (!answer || turn !== turns.head) return;
  const figures = answer.rows.map((curve) => html("div", {}, ...curveFigure(curve, label(chosen.head), whereHead(), offer)));
  by("curves").replaceChildren(...(figures.length ? figures : [html("p", { class: "note" }, "This head has no profiles.")]));
}

async function showExtremes() {
  if (!chosen.head) return;
  const turn = ++turns.extremes;
  const { statistic, lowest } = chosen;
  const others = chosen.shown.filter((name) => name !== statistic).slice(0, 3);
  const query = { kind: "extremes", scope: scope(), head: head(), statistic, statistics: [statistic, ...others], brushes: brushList(), lowest };
  const answer = await tryToAsk(query);
  if (!answer || turn !== turns.extremes) return;
  sql.extremes = answer.sql?.join("\n") ?? `SELECT sequence, "${statistic}", pile_set_name, tokens
FROM heads
JOIN sequences USING (run_id, intervention, sequence)
WHERE heads.${whereHead()}
ORDER BY "${statistic}" ${lowest ? "" : "DESC"}
LIMIT 3`;
  by("extremes-card").hidden = !isLive && !answer.rows.length;
  by("extremes-name").textContent = `Where ${label(chosen.head)} has the ${lowest ? "lowest" : "highest"} ${statistic}${chosen.brushes.size ? ", within the brushes" : ""}`;
  by("text-note").textContent = [markedText(answer.rows), answer.note].filter(Boolean).join(" ");
  const onSequence = isLive && ((sequence) => choose({ sequence }, showAttention));
  const list = excerptList(answer.rows, { statistic, others: isLive ? others : [], onSequence });
  by("extremes").replaceChildren(answer.rows.length ? list : html("p", { class: "note" }, "No sequence."));
  if (!isLive || !answer.rows.length) return;
  const texts = await tryToAsk({ kind: "texts", scope: scope(), sequences: answer.rows.map((row) => row.sequence), statistic, first: SNIPPET_TOKENS });
  if (!texts || turn !== turns.extremes) return;
  by("text-note").textContent = [markedText(texts.rows), texts.note].filter(Boolean).join(" ");
  for (const row of texts.rows) by("extremes").querySelector(`[data-text="${row.sequence}"]`)?.replaceChildren(...tokenText({ ...row, length: row.n_tokens }));
}

// A stored sequence, token by token: where each looks in the chosen head.
async function showAttention(start) {
  const { sequence, statistic } = chosen;
  by("sequence").value = sequence ?? "";
  by("attention").hidden = sequence === null || !isLive;
  const query = { kind: "attention", scope: scope(), head: head(), sequence, statistic, ...(start !== undefined && { start }) };
  const key = JSON.stringify(query);
  // The same tokens stay, and with them the one that is chosen.
  if (by("attention").hidden || by("attention").dataset.shown === key) return;
  by("attention").dataset.shown = key;
  const title = html("h4", {}, `Where the tokens of sequence ${number(sequence)} look in ${label(chosen.head)}`);
  by("attention").replaceChildren(title, html("p", { class: "note" }, "The model of the run reads it …"));
  const answer = await tryToAsk(query);
  if (by("attention").dataset.shown !== key) return;
  if (!answer) {
    // A model that loads longer than a query may take is there the next time.
    by("attention").removeAttribute("data-shown");
    return void by("attention").lastChild.replaceChildren(`${by("trouble").textContent} `, button("Ask again", () => showAttention(start)));
  }
  const hint = "Point at a token, or walk with the arrow keys: grounds show where it looks. A click or Enter holds it.";
  const note = html("p", { class: "note" }, [answer.why ?? hint, answer.note].filter(Boolean).join(" "));
  by("attention").replaceChildren(title, note, ...attentionText(answer, showAttention));
}

// ---- Effects on the loss

// What one of `effects` says of a head, by its place.
function effectOf({ statistic, measured_by: intervention, trust }, i, q) {
  const [own, part] = [numbers[statistic], numbers[`direct_${statistic}`]];
  const [layer, index] = cellAt(i);
  const [effect, direct] = [own?.mean[i], part?.mean[i]];
  return {
    i, effect, direct, q: q?.[i], standard_error: own?.standard_error[i], direct_error: part?.standard_error[i],
    indirect: isUndefined(effect) || isUndefined(direct) ? null : effect - direct,
    intervention: intervention.replace("{layer}", layer).replace("{head}", index), trust: trust[1 + layer],
  };
}

const qOfEffect = ({ statistic }) => numbers[statistic] && againstBaseline(numbers[statistic], 0);

function effectFigure(one) {
  const { statistic, meaning, pairs } = one;
  const q = qOfEffect(one);
  const rows = allHeads().map((i) => effectOf(one, i, q)).filter(({ effect }) => !isUndefined(effect));
  if (!rows.length) return [];
  rows.sort((a, b) => Math.abs(b.effect) - Math.abs(a.effect));
  const [all, ...layers] = new Set(one.trust);
  const points = pairs.map(({ label: name, estimate: x, measured: y, measured_error: error }) => ({
    name, x, y, label: true, says: `${name}: estimate ${number(x)}, measured ${plusMinus(y, error)}`,
  }));
  const plot = html("div", { class: "plot" }, points.length ? scatter({
    points, xName: "estimate, nats per token", yName: "measured", title: `${statistic}: estimated and measured`, width: 400, height: 230,
  }) : null);
  const listed = rows.slice(0, SHOWN_HEADS).map((row) => ({ ...row, trust: null }));
  const nameOf = ({ i }) => button(labelAt(i), () => chooseHead(cellAt(i)));
  const columns = ["effect", "standard_error", "q", "direct", "indirect"];
  return [html("figure", { "data-effect": statistic },
    html("h4", {}, button(breakable(statistic), () => choose({ statistic }, showAll))), html("p", { class: "note" }, meaning), html("p", { class: "finding" }, all),
    layers.length ? html("details", {}, html("summary", {}, "By layer"), ...layers.map((words) => html("p", {}, words))) : null,
    effectsTable(listed, "head", nameOf, `Heads by ${statistic}`), plot,
    behind({
      plot: points.length ? plot : null, askSql: offer, name: statistic, columns: ["head", ...columns],
      rows: () => rows.map((row) => [labelAt(row.i), ...columns.map((column) => row[column])]),
      sql: `FROM head_effects\nWHERE ${conditions(chosen)}\n  AND statistic = ${literal(statistic)}\nORDER BY rank`,
    }),
  )];
}

// What each part of each layer adds straight to the logit of the next token.
function partsFigure(parts) {
  const sum = (list) => list.reduce((total, { mean }) => total + mean, 0);
  const rowOf = (layer) => {
    const own = parts.filter((part) => part.layer === layer);
    // Only the first layer has embeddings, only the last one biases.
    return own.length ? [tableRow([String(layer), ...own.map(({ mean, standard_error }) => (mean ? plusMinus(mean, standard_error) : "")), number(sum(own))])] : [];
  };
  const all = tableRow(["all", ...PARTS.map((_, i) => number(sum(parts.filter(({ part }) => part === i)))), number(sum(parts))]);
  const rows = [...Array(run.n_layers).keys()].flatMap(rowOf);
  const note = "What each part adds straight to the logit of the next token, less the mean over the vocabulary. The parts add up to the whole logit.";
  return [html("figure", { "data-parts": "" }, html("h4", {}, "Direct logit of parts"), html("p", { class: "note" }, note),
    html("div", { class: "scroll" }, table(["layer", ...PARTS, "sum"], [...rows, all], "Direct logit of parts"))),
  ];
}

async function showEffects(turn) {
  by("effects-card").hidden = !run.has_effects || !mayAskForAll();
  const answer = by("effects-card").hidden ? { effects: [], parts: [] } : await tryToAsk({ kind: "effects", scope: scope() });
  if (!answer || turn !== turns.all) return;
  effects = answer.effects;
  by("effects").replaceChildren(...effects.flatMap(effectFigure), ...(answer.parts.length ? partsFigure(answer.parts) : []));
  if (chosen.head) showHeadEffects();
}

// ---- Small multiples: the same statistic elsewhere, and all statistics here

async function showSections(turn) {
  const statistic = chosen.statistic;
  const measured = sections().filter((one) => overview.runs.find(({ run_id }) => run_id === one.run_id).statistics.includes(statistic));
  const shown = measured.slice(0, MOST_SECTIONS);
  by("sections-card").hidden = shown.length < 2 || !mayAskForAll();
  if (by("sections-card").hidden) return;
  const means = [];
  for (const one of shown) {
    means.push((await aboutHeads({ ...scope(), subset: null, layers: null, ...one }, statistic))?.values[statistic]?.mean);
    if (turn !== turns.all) return;
  }
  const looks = rangeOf(statistic, means.flatMap((list) => [...(list ?? [])]));
  by("sections-name").textContent = `${statistic} in ${number(shown.length)}${measured.length > shown.length ? ` of ${number(measured.length)}` : ""} runs and interventions`;
  const small = (one, i) => {
    const show = () => choose({ run_id: one.run_id, intervention: one.intervention, other: null }, showEverything);
    const isChosen = one.run_id === chosen.run_id && one.intervention === chosen.intervention;
    const { model } = overview.runs.find(({ run_id }) => run_id === one.run_id);
    const name = button(breakable(sectionName(one)), show, { title: model, "aria-pressed": String(isChosen) });
    const options = { ...looks, width: 190, isSmall: true, chosen: null, title: `${statistic} in ${sectionName(one)}` };
    return means[i] && html("figure", { "data-section": sectionName(one) }, html("figcaption", {}, name), headMap(means[i], options));
  };
  by("sections").replaceChildren(...shown.map(small).filter(Boolean));
}

// heads: a statistic differs between heads. layers: the heads of a layer share it. model: all do, or
// it is undefined everywhere.
function kindOf({ mean, count, undefined: missing }) {
  const inside = defined(mean);
  if (!inside.length) return "model";
  // Means of equal numbers may differ in the order in which they were added up.
  const tolerance = 1e-9 + 1e-6 * Math.max(...inside.map(Math.abs));
  const spread = (list) => (list.length ? Math.max(...list) - Math.min(...list) : 0);
  const layers = matrix(mean).map(defined);
  const measured = matrix(Array.from(count, (one, i) => one + missing[i] > 0)).map((row) => row.filter(Boolean).length);
  // One head of a layer cannot show whether all its heads have the same value.
  const isVaried = layers.some((row, i) => row.length && (spread(row) > tolerance || row.length < measured[i]));
  if (isVaried || measured.every((heads) => heads < 2)) return "heads";
  return spread(inside) <= tolerance ? "model" : "layers";
}

// The correlation of two statistics over the heads in which both are defined.
function correlation(one, other) {
  const pairs = Array.from(one, (value, i) => [value, other[i]]).filter(([x, y]) => !isUndefined(x) && !isUndefined(y));
  const mean = (i) => pairs.reduce((sum, pair) => sum + pair[i], 0) / pairs.length;
  const [x, y] = [mean(0), mean(1)];
  const product = (f) => pairs.reduce((sum, pair) => sum + f(pair[0] - x, pair[1] - y), 0);
  const size = Math.sqrt(product((a) => a * a) * product((_, b) => b * b));
  return size > 0 ? product((a, b) => a * b) / size : 0;
}

// Statistics whose maps look alike, each group behind its first.
function groups(names) {
  const found = [];
  for (const name of names) {
    const alike = found.find(([first]) => Math.abs(correlation(numbers[first].mean, numbers[name].mean)) > LOOK_ALIKE);
    if (alike) alike.push(name);
    else found.push([name]);
  }
  return found;
}

async function showMaps() {
  if (!by("maps-card").open || !mayAskForAll()) return;
  const turn = turns.all;
  const cards = groups(run.statistics.filter((name) => numbers[name] && kindOf(numbers[name]) === "heads"));
  const choice = (name) => button(breakable(name), () => choose({ statistic: name }, showAll), { title: facts(name).meaning });
  const drawn = [];
  for (const [name, ...alike] of cards) {
    const difference = chosen.other && (await comparison(name));
    if (turn !== turns.all) return;
    const looks = difference ? differenceLooks(difference, numbers[name].mean) : rangeOf(name, numbers[name].mean);
    const [first] = ranked(name);
    const figure = headMap((difference ?? numbers[name]).mean, { ...looks, width: 190, isSmall: true, title: `${difference ? "Difference of " : ""}${name}` });
    map?.figures.push(figure);
    drawn.push(html("figure", { "data-map": name }, html("figcaption", {}, choice(name)), figure,
      html("p", { class: "note" }, first ? `most: ${labelAt(first.i)}, ${number(first.mean)}` : ""),
      html("details", {}, html("summary", {}, "Definition"), html("p", {}, facts(name).meaning), facts(name).formula ? html("code", {}, facts(name).formula) : ""),
      ...(alike.length ? [html("details", { class: "alike" }, html("summary", {}, `${alike.length} alike`), ...alike.map((one) => html("div", {}, choice(one))))] : []),
    ));
  }
  by("maps").replaceChildren(...drawn);
  showPicked();
}

// ---- What else a section has: lines by layer, predictions, subsets, what all heads share

function linesCard(title, meaning, unit, series, query, log = false) {
  const layers = [...Array(run.n_layers).keys()];
  const figure = lines({ x: layers, series, xName: "layer", yName: unit ?? "", log, title, width: 480, height: 220 });
  const plot = html("div", { class: "plot" }, figure);
  const rows = () => layers.map((layer) => [layer, ...series.map((line) => line.y[layer])]);
  return html("figure", { class: "card", "data-lines": title }, html("h3", {}, title), html("p", { class: "meaning" }, meaning), plot,
    behind({ plot, sql: query, askSql: offer, name: title, columns: ["layer", ...series.map((line) => line.name)], rows }));
}

const summariesSql = (name) => summaries(["layer", "head", ...SUMMARY], `${conditions(chosen)}\n  AND statistic = ${literal(name)}`);

function subsetsCard() {
  const subsets = Object.entries(numbers[chosen.statistic]?.subsets ?? {});
  if (!subsets.length) return [];
  const spread = (i) => {
    const means = defined(subsets.map(([, { mean }]) => mean[i]));
    return means.length > 1 ? Math.max(...means) - Math.min(...means) : -1;
  };
  const heads = allHeads().filter((i) => spread(i) >= 0).sort((one, other) => spread(other) - spread(one)).slice(0, 14);
  const values = subsets.map(([, { mean }]) => heads.map((i) => mean[i]));
  const figure = heatmap({
    rows: subsets.map(([name, { count }]) => `${name} (${Math.max(...count)})`), cols: heads.map(labelAt), rowName: "", colName: "head", width: 640,
    values, ...rangeOf(chosen.statistic, values.flat()), title: `${chosen.statistic} by subset of the Pile`,
    cellName: (row, col) => `${subsets[row][0]}, ${labelAt(heads[col])}`,
    onChoose: (_, col) => chooseHead(cellAt(heads[col])),
  });
  const rows = () => subsets.flatMap(([subset, means]) => allHeads().map((i) => [labelAt(i), subset, ...SUMMARY.map((column) => means[column][i])]));
  const query = `SELECT label, pile_set_name, ${SUMMARY.join(", ")}\nFROM subset_summaries\nWHERE ${conditions(chosen)}\n  AND statistic = ${literal(chosen.statistic)}`;
  const note = `The ${heads.length} heads whose mean ${chosen.statistic} differs most between subsets. The number of sequences is in brackets: with few, a mean says little.`;
  const plot = html("div", { class: "plot" }, figure);
  return [html("figure", { class: "card", "data-subsets": "" }, html("h3", {}, "By subset of the Pile"), html("p", { class: "note" }, note), plot,
    behind({ plot, sql: query, rows, name: `${chosen.statistic}-subsets`, columns: ["head", "pile_set_name", ...SUMMARY] }))];
}

function predictionsCard() {
  const predictions = run.predictions?.[chosen.intervention];
  if (!predictions) return [];
  const hasChange = predictions.some((row) => row.change !== null);
  const names = ["prediction", "unit", "mean", ...(hasChange ? ["change from the untouched model"] : [])];
  const row = (one) => {
    const change = hasChange ? [plusMinus(one.change, one.change_error)] : [];
    return tableRow([html("td", { title: one.meaning }, one.name), one.unit, plusMinus(one.mean, one.standard_error), ...change]);
  };
  const content = html("div", { class: "scroll" }, table(names, predictions.map(row), "Predictions"));
  return [html("section", { class: "card", "data-predictions": "" }, html("h3", {}, "Predictions"), content)];
}

function dormantCards() {
  return (overview.dormant ?? []).map((block) => {
    const points = block.points.map((point) => ({ ...point, colour: null }));
    const figure = scatter({
      points, xName: "induction score where the input repeats", yName: "sink mass where nothing repeats", xRange: [0, 1.04], yRange: [0, 1.04],
      title: "Copying against resting", width: 440,
    });
    const plot = html("div", { class: "plot" }, figure);
    const runs = [block.repeated_run, block.unrepeated_run, block.text_run].filter(Boolean).join(", ");
    const note =
      `${number(block.passing)} heads pass both thresholds (induction score 0.4, sink mass 0.3), from ${runs}. To the right are ` +
      "heads that copy where something repeats, at the top heads that rest on the first token where nothing does.";
    const rows = () => block.points.map((point) => [point.name, point.x, point.y]);
    return html("section", { class: "card", "data-dormant": "" },
      html("h3", {}, `Dormant induction heads of ${block.model}${block.intervention === "none" ? "" : `, ${block.intervention}`}`),
      html("p", { class: "note" }, note), plot,
      behind({ plot, sql: "FROM dormant_induction_heads", name: "dormant", columns: ["head", "induction_repeated", "sink_unrepeated"], rows }));
  });
}

function showMore() {
  const ofKind = (kind) => Object.entries(numbers).filter(([, one]) => kindOf(one) === kind);
  const byLayer = (name) => numbers[name] && matrix(numbers[name].mean).map((row) => row.find((value) => !isUndefined(value)) ?? null);
  const charts = [];
  const inCharts = ["resid_pre_norm", "sink_resid_pre_norm", "resid_post_norm", "sink_resid_post_norm"];
  const [pre, preFirst, post, postFirst] = inCharts.map(byLayer);
  if (pre && preFirst && post && postFirst) {
    // The stored mean includes position 0.
    const others = (all, first) => all.map((mean, layer) => (run.n_ctx * mean - first[layer]) / (run.n_ctx - 1));
    const ratio = (first, rest) => first.map((length, layer) => (rest[layer] ? length / rest[layer] : null));
    const [preOthers, postOthers] = [others(pre, preFirst), others(post, postFirst)];
    const norms = [
      ["before the layer, position 0", preFirst], ["before the layer, others", preOthers],
      ["after the layer, position 0", postFirst], ["after the layer, others", postOthers],
    ];
    const ratios = [["before the layer", ratio(preFirst, preOthers)], ["after the layer", ratio(postFirst, postOthers)]];
    const series = (list) => list.map(([name, y]) => ({ name, y }));
    const sqlOf = (what) => `SELECT layer, ${what}\nFROM layer_norms\nWHERE ${conditions(chosen)}`;
    charts.push(
      linesCard("Residual stream", "Mean length at position 0 and at the other positions.", "euclidean norm", series(norms), sqlOf("COLUMNS('resid_.*_(first|others)')"), true),
      linesCard("Residual peak", "Length at position 0 over the mean of the others.", "ratio", series(ratios), sqlOf("resid_pre_ratio, resid_post_ratio"), true),
    );
  }
  for (const [name] of ofKind("layers")) {
    if (charts.length && inCharts.includes(name)) continue;
    charts.push(linesCard(name, facts(name).meaning, facts(name).unit, [{ name, y: byLayer(name) }], summariesSql(name)));
  }
  const shared = ofKind("model").flatMap(([name, { mean }]) => {
    const [value] = defined(mean);
    return [html("dt", { title: facts(name).meaning }, name), html("dd", {}, value === undefined ? "undefined here" : number(value))];
  });
  by("more").replaceChildren(
    html("div", { class: "grid" }, ...predictionsCard(), ...subsetsCard(), ...charts, ...dormantCards()),
    ...(shared.length ? [html("h3", {}, "The same for every head"), html("dl", { class: "facts", id: "shared" }, ...shared)] : []),
  );
}

// ---- SQL

async function askSql() {
  by("sql-note").textContent = "…";
  by("run-sql").disabled = true;
  try {
    const answer = await answerTo({ kind: "sql", text: by("sql").value });
    const cell = (value) => html("td", { class: typeof value === "string" ? "words" : null }, typeof value === "number" || value === null ? number(value) : String(value));
    const isText = (column) => answer.rows.some((row) => typeof row[column] === "string");
    const columns = answer.columns.map((name, column) => ({ name, words: isText(column) }));
    by("sql-rows").replaceChildren(table(columns, answer.rows.map((row) => tableRow(row.map(cell))), "The answer"));
    const more = answer.has_more ? `the first ${number(answer.rows.length)} rows` : `${number(answer.rows.length)} ${answer.rows.length === 1 ? "row" : "rows"}`;
    by("sql-note").textContent = `${more}, ${number(answer.seconds)} s`;
  } catch (error) {
    by("sql-note").textContent = error.message;
  } finally {
    by("run-sql").disabled = false;
  }
}

function offerSql(query) {
  by("sql").value = query;
  by("sql").focus();
  by("sql-card").scrollIntoView({ block: "nearest" });
}

// ---- Everything

async function showAll() {
  const turn = ++turns.all;
  // The heatmap is what a reader waits for: the rest is asked for after it.
  if (!(await showHeatmap(turn))) return;
  remember();
  await showHead();
  if (chosen.brushes.size) await applyBrushes();
  await showScatter(turn);
  if (mayAskForAll()) {
    // From rows one statistic at a time, while the page waits for nothing else.
    for (const name of !isLive || run.has_rollups ? [null] : run.statistics) {
      while (isWaiting() || isDragging() || document.hidden) {
        await new Promise((done) => setTimeout(done, 50));
        if (turn !== turns.all) return;
      }
      if (!(await aboutHeads(scope(), name)) || turn !== turns.all) return;
    }
    for (const row of by("card-rows").querySelectorAll("tbody tr")) fillPercentile(row.querySelector(".percentile"), percentile(row.dataset.statistic));
    saySentence();
    showMore();
    await showMaps();
  }
  await showEffects(turn);
  if (turn === turns.all) await showSections(turn);
}

async function showEverything() {
  makeHistograms();
  sayPicked();
  await showAll();
  await showBackgrounds();
}

const isDragging = () => [...histograms.values()].some((figure) => figure.isDragging());

async function lookAgain() {
  const answer = await tryToAsk({ kind: "overview" });
  if (!answer) return;
  const isNew = !overview || answer.revision !== overview.revision;
  overview = answer;
  if (!overview.runs.length) return void (by("progress").textContent = "There is no run here.");
  fillMenus();
  if (isNew) {
    known.clear();
    await showEverything();
  }
}

function pollLater() {
  const pause = run && !run.complete ? LIVE_MILLISECONDS : FINISHED_MILLISECONDS;
  setTimeout(async () => {
    if (!document.hidden && !isDragging() && !isWaiting()) await lookAgain();
    pollLater();
  }, pause);
}

function search() {
  const found = /^\s*[Ll](\d+)[Hh](\d+)\s*$/.exec(by("search").value);
  const [layer, index] = found ? [Number(found[1]), Number(found[2])] : [-1, -1];
  const exists = found && layer < run.n_layers && index < run.n_heads;
  by("search").setCustomValidity(exists || !by("search").value ? "" : `expected L0H0 to ${label([run.n_layers - 1, run.n_heads - 1])}`);
  if (exists) chooseHead([layer, index]);
  return exists;
}

// What is behind the figures that are always there.
function addBehind() {
  const numbersOf = () => [["head", "mean", "standard_error", "documents", "count"], ...(compared ? [["other_mean", "difference", "difference_standard_error", "q"]] : [])].flat();
  const rows = () => {
    const own = numbers[chosen.statistic];
    const other = (i) => (compared ? [compared.theirs.mean[i], compared.mean[i], compared.standard_error[i], compared.q[i]] : []);
    return allHeads().map((i) => [labelAt(i), own.mean[i], own.standard_error[i], own.documents[i], own.count[i], ...other(i)]);
  };
  const heatSql = () => (compared ? comparedSql() : (known.get(JSON.stringify([scope(), false]))?.sql?.join("\n") ?? summariesSql(chosen.statistic)));
  const scatterSql = () => {
    const means = [...new Set(axes())].filter((axis) => axis in numbers).map((axis) => `avg("${axis}") AS "${axis}"`);
    return `SELECT ${["label", "layer", "head", ...means].join(", ")}\nFROM heads\nWHERE ${conditions(chosen)}\nGROUP BY ALL`;
  };
  const axes = () => ["head", chosen.x, chosen.y, chosen.colour];
  const points = () => allHeads().map((i) => [labelAt(i), ...axes().slice(1).map((axis) => axisValue(axis, i))]);
  const ofHead = (what) => () => `${label(chosen.head)}-${what}`;
  const cardColumns = ["statistic", "mean", "standard_error", "documents", "minimum", "maximum", "count", "undefined", "uniform_baseline"];
  const listCard = () => card.map((row) => cardColumns.map((column) => row[column]));
  const add = (id, options) => by(id).append(behind({ askSql: offer, ...options }));
  add("heat-card", { plot: by("heatmap"), sql: heatSql, name: () => chosen.statistic, columns: numbersOf, rows });
  add("scatter-card", { plot: by("scatter"), sql: scatterSql, name: () => `${chosen.x}-${chosen.y}`, columns: axes, rows: points });
  add("hist-card", { plot: by("histograms"), sql: () => sql.hist, name: ofHead("histograms") });
  add("card", { sql: () => summaries(cardColumns.slice(0, -1), whereHead()), name: ofHead("statistics"), columns: cardColumns, rows: listCard });
  add("extremes-card", { sql: () => sql.extremes, name: ofHead("sequences") });
  const sectionsSql = () => summaries(["run_id", "intervention", "layer", "head", "mean"], `statistic = ${literal(chosen.statistic)}`);
  add("sections-card", { plot: by("sections"), sql: sectionsSql, name: () => `${chosen.statistic}-runs` });
}

function comparedSql() {
  const name = literal(chosen.statistic);
  if (chosen.other.run_id === chosen.run_id && chosen.intervention === "none") {
    return `SELECT layer, head, untouched, intervened, change, standard_error, q, documents, pairs\nFROM effects\nWHERE ${conditions(chosen.other)}\n  AND statistic = ${name}`;
  }
  const of = (table, { run_id, intervention }) => `${table}.run_id = ${literal(run_id)} AND ${table}.intervention = ${literal(intervention)}`;
  return `SELECT layer, head, a.mean, b.mean AS other_mean, b.mean - a.mean AS difference,
  sqrt(a.standard_error ** 2 + b.standard_error ** 2) AS standard_error
FROM head_summaries a JOIN head_summaries b USING (layer, head, statistic)
WHERE statistic = ${name}
  AND ${of("a", chosen)}
  AND ${of("b", chosen.other)}`;
}

function listen() {
  const elsewhere = { layers: null, brushes: new Map(), other: null, pick: null, sequence: null };
  const chooseAll = (id, changes, show = showEverything) => { by(id).onchange = ({ target }) => choose(changes(target.value), show); };
  chooseAll("family", (name) => ([run.input_family, ""].includes(name) ? {} : { run_id: null, ...elsewhere }));
  chooseAll("run", (run_id) => ({ run_id, ...elsewhere }));
  chooseAll("intervention", (intervention) => ({ intervention, other: null }));
  chooseAll("subset", (subset) => ({ subset: subset || null }));
  chooseAll("compare", (words) => ({ other: sectionNamed(words) }), showAll);
  chooseAll("statistic", (statistic) => ({ statistic }), showAll);
  chooseAll("sequence", (words) => ({ sequence: words === "" ? null : Math.max(0, Math.floor(words)) }), showAttention);
  by("own").onchange = (event) => choose({ ownRange: event.target.checked }, showAll);
  for (const axis of ["x", "y", "colour"]) {
    const pick = axis === "colour" ? {} : { pick: null };
    by(axis).onchange = (event) => choose({ [axis]: event.target.value, hasAxes: true, ...pick }, () => showScatter(turns.all));
  }
  const layers = () => {
    const ends = [Number(by("first-layer").value), Number(by("last-layer").value)].sort((a, b) => a - b);
    choose({ layers: ends[0] === 0 && ends[1] === run.n_layers - 1 ? null : ends }, showEverything);
  };
  by("first-layer").onchange = layers;
  by("last-layer").onchange = layers;
  by("choices").onsubmit = (event) => event.preventDefault();
  by("search").oninput = () => by("search").setCustomValidity("");
  by("search").onkeydown = (event) => { if (event.key === "Enter" && !search()) by("search").reportValidity(); };
  by("search").onchange = search;
  by("clear").onclick = clearBrushes;
  by("refresh").onclick = lookAgain;
  by("copy-link").onclick = (event) => copy(event.target, location.href);
  by("maps-card").ontoggle = showMaps;
  for (const input of document.getElementsByName("meaning")) input.onchange = () => choose({ meaning: input.value }, applyBrushes);
  for (const input of document.getElementsByName("end")) input.onchange = () => choose({ lowest: input.value === "lowest" }, showExtremes);
  by("run-sql").onclick = askSql;
  by("sql").onkeydown = (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) askSql(); };
  // Back, another address, or the token of a server that was started again.
  // Not "hashchange", which comes later: a step back could be overwritten before it.
  addEventListener("popstate", () => {
    const isToken = takeToken(shownHash);
    if (!isToken) recall();
    if (isToken || !overview) return lookAgain();
    fillMenus();
    return showEverything();
  });
}

takeToken();
recall();
listen();
addBehind();
await lookAgain();
document.body.dataset.ready = "yes";
if (isLive) pollLater();
