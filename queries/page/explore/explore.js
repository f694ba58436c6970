// The explorer: what is chosen, which queries that asks, and where the answers are shown.
import { ask, isWaiting, takeToken } from "./ask.js";
import { BINS, brushHistogram } from "./brush.js";
import { Cube } from "./cube.js";
import { colourOf, headCurve, heatmap, html, number } from "./draw.js";
import { pictureButtons } from "./picture.js";
import { cardTable, extremesTable, sqlTable, subsetBars, text } from "./panels.js";

const MOST_HISTOGRAMS = 12;
const SNIPPET_TOKENS = 48;
const LIVE_MILLISECONDS = 5_000;
const FINISHED_MILLISECONDS = 30_000;
// Above so many rows, percentiles of all statistics would keep the machine busy.
const PERCENTILE_ROWS = 5e7;

const by = (id) => document.getElementById(id);
const chosen = {}; // What `recall` reads from the address.
let overview = null;
let shownHash = "";
let absent = []; // What was asked for and is not here.
let run = null;
let map = null; // The drawn heatmap, its means and its colours.
let histograms = new Map();
let cube = null; // The cube of one brush: its key, its promise, and the cube once it is there.
let card = null;
let isCoarse = false; // Whether histograms come from roll-ups, until a sample is in memory.
const means = new Map(); // Means of all heads by scope and statistic, for percentiles.
const sql = { heat: "", hist: "", extremes: "", curves: "" };

// What belongs to an older choice is not drawn.
const turns = { heat: 0, head: 0, brush: 0, extremes: 0 };

const scope = () => ({ run_id: chosen.run_id, intervention: chosen.intervention, subset: chosen.subset, layers: chosen.layers });
const head = () => chosen.head && { layer: chosen.head[0], head: chosen.head[1] };
const label = ([layer, index]) => `L${layer}H${index}`;
const brushList = () => [...chosen.brushes].map(([statistic, [first, last]]) => ({ statistic, first, last }));
const facts = (name) => overview.statistics.find((statistic) => statistic.name === name) ?? { name };

function trouble(error) {
  if (error?.name === "AbortError") return;
  by("trouble").hidden = !error;
  by("trouble").textContent = error ? error.message : "";
}

// Ask, and show what goes wrong in one line. Undefined if there is no answer.
async function tryToAsk(query, signal) {
  try {
    const answer = await ask(query, signal);
    if (overview && answer.revision !== overview.revision && query.kind !== "overview") lookAgain();
    trouble(null);
    return answer;
  } catch (error) {
    trouble(error);
    return undefined;
  }
}

// Menus

function fill(select, options, value) {
  select.replaceChildren(...options.map(([key, name, isOff]) => html("option", { value: key, disabled: Boolean(isOff) }, name)));
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
  fill(by("family"), [["", "all"], ...families.map((name) => [name, name])], by("family").value);
  const family = by("family").value;
  const runs = overview.runs.filter((one) => !family || one.input_family === family);
  chosen.run_id = available("run", chosen.run_id, runs.map((one) => one.run_id), runs[0].run_id);
  run = overview.runs.find((one) => one.run_id === chosen.run_id);
  fill(by("run"), runs.map((one) => [one.run_id, `${one.run_id} · ${one.model} · ${one.input_family}`]), run.run_id);
  chosen.intervention = available("intervention", chosen.intervention, run.interventions, run.interventions[0]);
  fill(by("intervention"), run.interventions.map((name) => [name, name]), chosen.intervention);
  by("subset-menu").hidden = by("subsets-card").hidden = run.subsets.length === 0;
  by("curves-card").hidden = !run.has_curves;
  // Without subsets and profiles, the table has the room below the heatmap.
  const isRoomy = by("subsets-card").hidden && by("curves-card").hidden;
  const column = by(isRoomy ? "heat-card" : "hist-card").parentElement;
  if (by("card").parentElement !== column) column.append(by("card"));
  chosen.subset = available("subset", chosen.subset, run.subsets, null, "all of the input");
  fill(by("subset"), [["", "all"], ...run.subsets.map((name) => [name, name])], chosen.subset ?? "");
  const numbers = [...Array(run.n_layers).keys()];
  const [first, last] = chosen.layers ?? [0, run.n_layers - 1];
  if (!(first <= last && last < run.n_layers)) chosen.layers = available("layers", `${first} to ${last}`, [], null, "every layer");
  fill(by("first-layer"), numbers.map((layer) => [layer, String(layer)]), chosen.layers?.[0] ?? 0);
  fill(by("last-layer"), numbers.map((layer) => [layer, String(layer)]), chosen.layers?.[1] ?? run.n_layers - 1);
  const isHead = chosen.head && chosen.head[0] < run.n_layers && chosen.head[1] < run.n_heads;
  if (chosen.head && !isHead) chosen.head = available("head", label(chosen.head), [], null, "the head with the largest mean");
  fillStatistics();
  fillProgress();
  by("absent").hidden = !absent.length;
  by("absent").textContent = `${absent.join("; ")}.`;
}

function fillStatistics() {
  const measured = new Set(run.statistics);
  chosen.statistic = available("statistic", chosen.statistic, run.statistics, run.first_statistics[0]);
  chosen.shown = chosen.shown.filter((name) => available("histogram", name, run.statistics, null, "another"));
  if (!chosen.shown.length) chosen.shown = [...run.first_statistics];
  for (const name of chosen.brushes.keys()) if (!available("brush", name, chosen.shown, null, "every value")) chosen.brushes.delete(name);
  // What another run measured and this one did not is said, not hidden.
  const names = overview.statistics.map(({ name }) => name);
  fill(by("statistic"), names.map((name) => [name, measured.has(name) ? name : `${name} (not measured in this run)`, !measured.has(name)]), chosen.statistic);
  by("shown-list").replaceChildren(...names.filter((name) => measured.has(name)).map((name) => {
    const isShown = chosen.shown.includes(name);
    const box = html("input", { type: "checkbox", checked: isShown, onchange: () => showHistogram(name, box.checked) });
    return html("label", { title: facts(name).meaning ?? null }, box, ` ${name}`);
  }));
}

function fillProgress() {
  const words = run.complete
    ? [`${number(run.sequences_done)} sequences, ${number(run.rows)} rows`]
    : [`${number(run.sequences_done)} of ${number(run.sequences)} sequences are in (${Math.floor((100 * run.sequences_done) / run.sequences)} %)`];
  if (!run.complete) words.push(`looked at ${new Date().toLocaleTimeString()}`);
  by("progress").textContent = words.join(" · ");
  by("damage").replaceChildren(...overview.damage.map((line) => html("p", { class: "warning" }, line)));
}

// What is shown stands in the address, so that a reload, a bookmark and Back keep it. A choice is a
// step that Back undoes; a brush is none.
function remember(isStep = false) {
  const words = new URLSearchParams({ run: chosen.run_id, intervention: chosen.intervention, statistic: chosen.statistic });
  if (chosen.head) words.set("head", label(chosen.head));
  if (chosen.subset !== null) words.set("subset", chosen.subset);
  if (chosen.layers) words.set("layers", chosen.layers.join("-"));
  if (chosen.shown.join() !== run.first_statistics.join()) words.set("shown", chosen.shown.join());
  for (const [name, range] of chosen.brushes) words.append("brush", `${name}:${range.join("-")}`);
  if (chosen.meaning !== "sequences") words.set("picks", chosen.meaning);
  if (chosen.lowest) words.set("end", "lowest");
  shownHash = `#${words}`;
  if (location.hash !== shownHash) history[isStep ? "pushState" : "replaceState"](null, "", shownHash);
}

function recall() {
  shownHash = location.hash;
  const words = new URLSearchParams(shownHash.slice(1));
  absent = [];
  const numbers = (text, pattern) => {
    const found = pattern.exec(text);
    if (text !== null && !found) absent.push(`${text} cannot be read`);
    return found?.slice(1).map(Number) ?? null;
  };
  const brush = (text) => [text.replace(/:[^:]*$/, ""), numbers(text, /:(\d+)-(\d+)$/)?.map((bin) => Math.min(bin, BINS - 1)).sort((a, b) => a - b)];
  Object.assign(chosen, {
    run_id: words.get("run"), intervention: words.get("intervention"), subset: words.get("subset"), statistic: words.get("statistic"),
    layers: numbers(words.get("layers"), /^(\d+)-(\d+)$/), head: numbers(words.get("head"), /^L(\d+)H(\d+)$/),
    shown: words.get("shown")?.split(",").slice(0, MOST_HISTOGRAMS) ?? [],
    brushes: new Map(words.getAll("brush").map(brush).filter(([, range]) => range)),
    meaning: words.get("picks") === "rows" ? "rows" : "sequences", lowest: words.get("end") === "lowest",
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
  show();
}

// The heatmap

async function showHeatmap() {
  const turn = ++turns.heat;
  const statistic = chosen.statistic;
  const answer = await tryToAsk({ kind: "heatmap", scope: scope(), statistic });
  if (!answer || turn !== turns.heat) return;
  const [values] = answer.arrays;
  sql.heat = answer.sql.join("\n");
  means.set(`${JSON.stringify(scope())} ${statistic}`, values);
  const defined = values.filter((value) => !Number.isNaN(value));
  let range = defined.length ? [Math.min(...defined), Math.max(...defined)] : [0, 1];
  const isSigned = range[0] < 0 && range[1] > 0;
  if (isSigned) range = [-Math.max(-range[0], range[1]), Math.max(-range[0], range[1])];
  const scale = isSigned ? "diverging" : "sequential";
  const { meaning, unit } = facts(statistic);
  by("meaning").textContent = [meaning, unit && `Unit: ${unit}.`].filter(Boolean).join(" ");
  const matrix = [...Array(run.n_layers).keys()].map((layer) => values.subarray(layer * run.n_heads, (layer + 1) * run.n_heads));
  const hadFocus = by("heatmap").contains(document.activeElement);
  const figure = heatmap({
    rows: run.n_layers, cols: run.n_heads, values: matrix, range, scale, title: `${statistic}, layer by head`,
    width: Math.max(340, Math.min(520, run.n_heads * 30 + 40)), chosen: chosen.head, onChoose: (row, col) => chooseHead([row, col]),
    onHover: (row, col) => { by("readout").textContent = row === null ? "" : says(row, col); },
  });
  by("heatmap").replaceChildren(figure);
  performance.measure("heatmap");
  map = { figure, cells: [...figure.querySelectorAll("[data-cell]")], colour: colourOf(range, scale), values, shown: values };
  if (hadFocus) figure.querySelector("[tabindex='0']")?.focus();
  const notes = [answer.source === "rollups" ? "Means of all rows, from roll-ups." : sampled(answer.every)];
  by("heat-note").textContent = notes.filter(Boolean).join(" ");
  if (!chosen.head) chooseStrongest(values);
  else figure.choose(...chosen.head);
}

const sampled = (every) => (every > 1 ? `A large run: 1 of ${every} sequences is read.` : "");
const waitsForSample = () => run.waits_for_sample.includes(chosen.intervention);

function sayBrushNote(every) {
  const hint = "Drag over a histogram, or move its two handles with the arrow keys.";
  const waiting = `Coarse histograms of all rows, from roll-ups. Brushes wait until 1 of ${every} sequences is in memory.`;
  by("brush-note").textContent = isCoarse ? waiting : [hint, sampled(every)].filter(Boolean).join(" ");
}

// The page begins with a head, so that no panel is empty.
function chooseStrongest(values) {
  let best = 0;
  values.forEach((value, i) => { if (!(values[best] >= value) && !Number.isNaN(value)) best = i; });
  chosen.head = [Math.floor(best / run.n_heads), best % run.n_heads];
  map.figure.choose(...chosen.head);
}

function says(row, col) {
  const value = map.shown[row * run.n_heads + col];
  return `${label([row, col])}: ${chosen.statistic} ${number(value)}${chosen.brushes.size && !isCoarse ? " under the brush" : ""}`;
}

// Other colours for the same cells, which is faster than another drawing.
function recolour(values) {
  map.shown = values;
  map.cells.forEach((cell, i) => {
    const isUndefined = Number.isNaN(values[i]);
    cell.classList.toggle("empty", isUndefined);
    if (isUndefined) cell.removeAttribute("fill");
    else cell.setAttribute("fill", map.colour(values[i]));
  });
}

// What cells say, after their colours have come to rest.
function renameCells() {
  map?.cells.forEach((cell, i) => {
    const words = says(Math.floor(i / run.n_heads), i % run.n_heads);
    cell.querySelector("title").textContent = words;
    cell.setAttribute("aria-label", words);
  });
}

// Histograms and brushes

function makeHistograms() {
  histograms = new Map(chosen.shown.map((name) => [name, brushHistogram(name, facts(name).meaning ?? "", {
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
  // One after the other: the head's own histograms come between them.
  for (const [name, histogram] of [...histograms]) {
    const answer = await tryToAsk({ kind: "background", scope: scope(), statistic: name });
    if (!answer) return;
    if (histograms.get(name) !== histogram) return;
    histogram.drawAll(answer.arrays[0]);
  }
}

// The cube of a brush is asked for when a pointer or the focus comes near: moves then ask nothing.
function warm(name) {
  if (!chosen.head || isCoarse) return null;
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
  if (range) {
    // The last one is the one that the cube is of.
    chosen.brushes.delete(name);
    chosen.brushes.set(name, range);
  } else chosen.brushes.delete(name);
  const turn = ++turns.brush;
  if (!range) {
    // A cube has no rows in which the active statistic is undefined: these count again now.
    takeBrushAway();
    return;
  }
  const asked = warm(name);
  const whole = asked?.whole ?? (await asked?.done);
  if (!whole || turn !== turns.brush) return;
  sayPicked(whole.picked(range), whole.rows);
  const began = performance.now();
  for (const [other, histogram] of histograms) if (other !== name) histogram.drawOwn(whole.histogram(other, range));
  recolour(whole.means(range));
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
  if (chosen.brushes.size) showHead();
  else {
    for (const histogram of histograms.values()) histogram.drawUnbrushed();
    recolour(map.values);
  }
}

function rested() {
  remember();
  renameCells();
  showExtremes();
}

function clearBrushes() {
  cube?.abort.abort();
  cube = null;
  for (const histogram of histograms.values()) histogram.setRange(null);
  choose({ brushes: new Map() }, () => { takeBrushAway(); rested(); });
}

// Brushes stay when something else is chosen: the heatmap under them is asked for again.
async function applyBrushes() {
  for (const [name, range] of chosen.brushes) histograms.get(name).setRange(range);
  const last = [...chosen.brushes].at(-1);
  if (!last) return sayPicked();
  await brushed(...last);
  renameCells();
}

// The head

function chooseHead(place) {
  choose({ head: place }, () => { map?.figure.choose(...place); showHead(); });
}

async function showHead() {
  if (!chosen.head) return;
  const turn = ++turns.head;
  const began = performance.now();
  by("head-name").textContent = `Head ${label(chosen.head)}`;
  const statistics = chosen.shown;
  const query = { kind: "histograms", scope: scope(), head: head(), statistics };
  const answer = await tryToAsk(query);
  if (!answer || turn !== turns.head) return;
  sql.hist = answer.sql.join("\n");
  isCoarse = answer.source === "rollups";
  sayBrushNote(answer.every);
  statistics.forEach((name, i) => {
    const histogram = histograms.get(name);
    histogram.setAxis(answer.axes[name]);
    histogram.drawBefore(bins(answer, i));
  });
  performance.measure("head", { start: began });
  // Counts of a sample are not drawn over counts of all rows.
  const under = chosen.brushes.size && !isCoarse ? tryToAsk({ ...query, brushes: brushList() }) : null;
  showExtremes();
  showCard(turn);
  if (run.subsets.length) showSubsets(turn);
  if (run.has_curves) showCurves(turn);
  const brushedAnswer = await under;
  if (!brushedAnswer || turn !== turns.head) return;
  statistics.forEach((name, i) => histograms.get(name).drawOwn(bins(brushedAnswer, i)));
  await applyBrushes();
}

const bins = (answer, i) => answer.arrays[0].subarray((i * BINS) / 2, ((i + 1) * BINS) / 2);

async function showCard(turn) {
  const answer = await tryToAsk({ kind: "card", scope: scope(), head: head() });
  if (!answer || turn !== turns.head) return;
  card = answer.rows;
  drawCard();
  askForPercentiles(turn);
}

function drawCard() {
  by("card-rows").replaceChildren(cardTable(card, chosen.statistic, percentile, chooseStatistic));
}

// The share of heads with a smaller mean. Null until the means of all heads are there.
function percentile(statistic) {
  const values = means.get(`${JSON.stringify(scope())} ${statistic}`);
  const own = values?.[chosen.head[0] * run.n_heads + chosen.head[1]];
  if (own === undefined || Number.isNaN(own)) return null;
  const others = values.filter((value) => !Number.isNaN(value));
  if (others.length < 2) return null;
  return others.filter((value) => value < own).length / (others.length - 1);
}

// One statistic at a time, while the page waits for nothing else.
async function askForPercentiles(turn) {
  if (!run.has_rollups && run.rows > PERCENTILE_ROWS) return;
  for (const { statistic } of card) {
    const key = `${JSON.stringify(scope())} ${statistic}`;
    if (means.has(key)) continue;
    while (isWaiting() || isDragging() || document.hidden) {
      await new Promise((done) => setTimeout(done, 100));
      if (turn !== turns.head) return;
    }
    const answer = await tryToAsk({ kind: "heatmap", scope: scope(), statistic });
    if (!answer || turn !== turns.head) return;
    means.set(key, answer.arrays[0]);
    drawCardCell(statistic);
  }
}

function drawCardCell(statistic) {
  const cell = by("card-rows").querySelector(`[data-statistic="${CSS.escape(statistic)}"]`)?.cells[4];
  const rank = percentile(statistic);
  if (cell && rank !== null) cell.textContent = `${Math.round(rank * 100)} %`;
}

async function showSubsets(turn) {
  const answer = await tryToAsk({ kind: "subsets", scope: scope(), head: head(), statistic: chosen.statistic });
  if (!answer || turn !== turns.head) return;
  by("subsets-note").textContent = `Mean ${chosen.statistic} of ${label(chosen.head)}, ± standard error`;
  by("subsets").replaceChildren(subsetBars(answer.rows, chosen.statistic));
}

async function showCurves(turn) {
  const answer = await tryToAsk({ kind: "curves", scope: scope(), head: head() });
  if (!answer || turn !== turns.head) return;
  sql.curves = answer.sql.map((query) => `FROM (${query})`).join("\nUNION ALL BY NAME\n");
  const figures = answer.rows.flatMap((curve) => headCurve(curve, label(chosen.head)));
  by("curves").replaceChildren(...(figures.length ? figures : [html("p", { class: "note" }, "This head has no profiles.")]));
}

async function showExtremes() {
  const turn = ++turns.extremes;
  const statistics = [chosen.statistic, ...chosen.shown.filter((name) => name !== chosen.statistic)].slice(0, 4);
  const answer = await tryToAsk({
    kind: "extremes", scope: scope(), head: head(), statistic: chosen.statistic, statistics, brushes: brushList(), lowest: chosen.lowest,
  });
  if (!answer || turn !== turns.extremes) return;
  sql.extremes = answer.sql.join("\n");
  const where = chosen.brushes.size ? ", within the brushes" : "";
  by("extremes-name").textContent = `Where ${label(chosen.head)} has the ${chosen.lowest ? "lowest" : "highest"} ${chosen.statistic}${where}`;
  by("extremes").replaceChildren(
    answer.rows.length ? html("div", { class: "scroll" }, extremesTable(answer.rows, statistics, run.subsets.length > 0, showWholeText)) : html("p", { class: "note" }, "No sequence."),
  );
  const sequences = answer.rows.map((row) => row.sequence);
  if (sequences.length) showTexts(sequences, SNIPPET_TOKENS, () => turn === turns.extremes);
}

async function showTexts(sequences, first, isCurrent) {
  const answer = await tryToAsk({ kind: "texts", scope: scope(), sequences, statistic: chosen.statistic, ...(first && { first }) });
  if (!answer || !isCurrent()) return;
  by("text-note").textContent = answer.note ?? "";
  for (const row of answer.rows) by("extremes").querySelector(`[data-text="${row.sequence}"]`)?.replaceChildren(text(row, !first));
}

function showWholeText(sequence) {
  const turn = turns.extremes;
  showTexts([sequence], null, () => turn === turns.extremes);
}

// SQL

async function askSql() {
  by("sql-note").textContent = "…";
  by("run-sql").disabled = true;
  try {
    const answer = await ask({ kind: "sql", text: by("sql").value });
    by("sql-rows").replaceChildren(sqlTable(answer));
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

// Choices

function chooseStatistic(name) {
  choose({ statistic: name }, showAll);
}

async function showAll() {
  remember();
  // The heatmap is what a reader waits for: the rest is asked for after it.
  await showHeatmap();
  if (!map) return;
  remember();
  await showHead();
  if (!chosen.brushes.size) return;
  await applyBrushes();
}

async function showEverything() {
  makeHistograms();
  sayPicked();
  await showAll();
  await showBackgrounds();
}

const isDragging = () => [...histograms.values()].some((histogram) => histogram.isDragging());

async function lookAgain() {
  const answer = await tryToAsk({ kind: "overview" });
  if (!answer) return;
  const isNew = answer.revision !== overview?.revision;
  overview = answer;
  fillMenus();
  if (isNew) {
    means.clear();
    await showEverything();
  } else if (isCoarse && !waitsForSample()) {
    await showHead();
    await showBackgrounds();
  }
}

function pollLater() {
  const isChanging = run && (!run.complete || isCoarse);
  const pause = isChanging ? LIVE_MILLISECONDS : FINISHED_MILLISECONDS;
  setTimeout(async () => {
    if (!document.hidden && !isDragging() && !isWaiting()) await lookAgain();
    pollLater();
  }, pause);
}

function search() {
  const place = /^\s*[Ll](\d+)[Hh](\d+)\s*$/.exec(by("search").value);
  const [layer, index] = place ? [Number(place[1]), Number(place[2])] : [-1, -1];
  const exists = place && layer < run.n_layers && index < run.n_heads;
  by("search").setCustomValidity(exists || !by("search").value ? "" : `expected L0H0 to ${label([run.n_layers - 1, run.n_heads - 1])}`);
  if (exists) chooseHead([layer, index]);
  return exists;
}

function listen() {
  by("family").onchange = (event) => {
    const isOfFamily = [run.input_family, ""].includes(event.target.value);
    choose(isOfFamily ? {} : { run_id: null, layers: null, brushes: new Map() }, showEverything);
  };
  by("run").onchange = (event) => choose({ run_id: event.target.value, layers: null, brushes: new Map() }, showEverything);
  by("intervention").onchange = (event) => choose({ intervention: event.target.value }, showEverything);
  by("subset").onchange = (event) => choose({ subset: event.target.value || null }, showEverything);
  by("statistic").onchange = (event) => chooseStatistic(event.target.value);
  const layers = () => {
    const ends = [Number(by("first-layer").value), Number(by("last-layer").value)].sort((a, b) => a - b);
    choose({ layers: ends[0] === 0 && ends[1] === run.n_layers - 1 ? null : ends }, showEverything);
  };
  by("first-layer").onchange = layers;
  by("last-layer").onchange = layers;
  by("search").oninput = () => by("search").setCustomValidity("");
  by("search").onkeydown = (event) => { if (event.key === "Enter" && !search()) by("search").reportValidity(); };
  by("search").onchange = search;
  by("clear").onclick = clearBrushes;
  by("refresh").onclick = lookAgain;
  for (const input of document.getElementsByName("meaning")) input.onchange = () => choose({ meaning: input.value }, applyBrushes);
  for (const input of document.getElementsByName("end")) input.onchange = () => choose({ lowest: input.value === "lowest" }, showExtremes);
  for (const place of ["heatmap", "histograms", "curves", "subsets"]) {
    by(`${place}-pictures`).append(...pictureButtons(by(place), () => `${label(chosen.head)}-${place}`));
  }
  by("heat-sql").onclick = () => offerSql(sql.heat);
  by("hist-sql").onclick = () => offerSql(sql.hist);
  by("curves-sql").onclick = () => offerSql(sql.curves);
  by("extremes-sql").onclick = () => offerSql(sql.extremes);
  by("run-sql").onclick = askSql;
  // Back, another address, or the token of a server that was started again.
  // Not "hashchange", which comes later: a step back could be overwritten before it.
  addEventListener("popstate", () => {
    const isToken = takeToken(shownHash);
    if (!isToken) recall();
    if (isToken || !overview) return lookAgain();
    fillMenus();
    return showEverything();
  });
  by("sql").onkeydown = (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) askSql(); };
}

takeToken();
recall();
listen();
await lookAgain();
document.body.dataset.ready = "yes";
pollLater();
