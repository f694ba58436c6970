// The report: choices, what stands out, a heatmap of every statistic, and the card of one head.
import { behind, literal } from "./answers.js";
import { drawCard, plusMinus } from "./card.js";
import { pageData } from "./data.js";
import { bars, breakable, heatmap, html, lines, number, points } from "./draw.js";

const report = await pageData();
const place = (id) => document.getElementById(id);

// Statistics that say what a head does. The first of them that were measured stand at the top.
const LEADING = [
  "sink_mass",
  "induction_score",
  "previous_token_score",
  "duplicate_score",
  "self_attention",
  "entropy",
];
const MOST_LEADING = 3;
const SHOWN_HEADS = 8;

const FAMILIES = {
  sink: "sinks",
  matching: "matching tokens",
  shape: "shape",
  norms: "lengths",
  scores: "scores",
  diagonals: "diagonals",
  residual: "residual stream",
  head_results: "results",
  decomposition: "decomposition",
  labels: "labels",
  mixing: "mixing",
};

// What is chosen. `section` and `other` are indices, `head` is [layer, head].
let absent = []; // What the address names and is not here.
const state = { section: 0, other: null, head: null, statistic: null, ownRange: false };

const section = () => report.sections[state.section];
const other = () => (state.other === null ? null : report.sections[state.other]);
const sectionName = (one) =>
  one.intervention === "none" ? one.run_id : `${one.run_id} · ${one.intervention}`;
const label = (layer, head) => `L${layer}H${head}`;
const facts = (name) =>
  report.statistics[name] ?? {
    meaning: "",
    unit: "",
    formula: "",
    low: null,
    high: null,
    family: "other",
  };
const at = (list, one, layer, head) => list?.[layer * one.n_heads + head] ?? null;
const isMap = (one, name) => one.values[name]?.kind === "heads";
const condition = (one) =>
  `run_id = ${literal(one.run_id)}
  AND intervention = ${literal(one.intervention)}`;

function matrix(one, list) {
  return Array.from({ length: one.n_layers }, (_, layer) =>
    list.slice(layer * one.n_heads, (layer + 1) * one.n_heads),
  );
}

// ---- The difference of two sections.

// The heads of two sections can be compared if there are as many.
const isComparable = (one, another) =>
  one.n_layers === another.n_layers &&
  one.n_heads === another.n_heads &&
  another.facts.sequences_done > 0;

// Differences of means, and their standard errors. An intervention is compared with the untouched
// model sequence by sequence. Two runs are compared as if their sequences were independent.
function differences(one, another, name) {
  const [before, after] = [one.values[name], another.values[name]];
  const isPaired = one.run_id === another.run_id && one.intervention === "none" && after.changes;
  if (isPaired) return { mean: after.changes.mean, error: after.changes.error, isPaired };
  const isReversed =
    one.run_id === another.run_id && another.intervention === "none" && before.changes;
  if (isReversed) {
    return {
      mean: before.changes.mean.map((change) => (change === null ? null : -change)),
      error: before.changes.error,
      isPaired: true,
    };
  }
  const both = (i, list, combine) => {
    const [x, y] = [before[list][i], after[list][i]];
    return x === null || y === null ? null : combine(x, y);
  };
  return {
    mean: before.mean.map((_, i) => both(i, "mean", (x, y) => y - x)),
    error: before.mean.map((_, i) => both(i, "error", Math.hypot)),
    isPaired: false,
  };
}

// ---- Colours.

// From 0 to 1 if that is the range, even around 0 if the sign has a meaning, else from the smallest
// to the largest value. A reader may ask for the statistic's own range.
function rangeOf(name, values) {
  const defined = values.filter((value) => value !== null);
  const [low, high] = [Math.min(...defined), Math.max(...defined)];
  const { low: lowest, high: highest } = facts(name);
  if (lowest === 0 && highest === 1 && !state.ownRange)
    return { range: [0, 1], scale: "sequential" };
  if (lowest === 0 || lowest > 0 || low >= 0) return { range: [low, high], scale: "sequential" };
  const largest = Math.max(-low, high) || 1;
  return { range: [-largest, largest], scale: "diverging" };
}

// Even around 0. What is smaller than a millionth of the values is the rounding of sums.
function evenRange(values, means) {
  const largestOf = (list) => Math.max(...list.map((value) => Math.abs(value ?? 0)), 0);
  const largest = Math.max(largestOf(values), 1e-6 * largestOf(means)) || 1;
  return { range: [-largest, largest], scale: "diverging" };
}

// ---- Figures that are drawn when they come near the screen.

let waiting = new Map();
let maps = [];

const watcher = new IntersectionObserver(
  (entries) =>
    entries.filter((entry) => entry.isIntersecting).forEach((entry) => drawNow(entry.target)),
  { rootMargin: "800px" },
);

function drawNow(where) {
  const draw = waiting.get(where);
  if (!draw) return;
  waiting.delete(where);
  watcher.unobserve(where);
  where.replaceChildren(...[draw(Math.max(220, where.clientWidth))].flat());
}

// `draw` is given the width that there is.
function drawnLater(height, draw) {
  const where = html("div", { class: "plot" });
  where.style.minHeight = `${height}px`;
  waiting.set(where, (width) => {
    where.style.minHeight = "";
    return draw(width);
  });
  watcher.observe(where);
  return where;
}

addEventListener("beforeprint", () => [...waiting.keys()].forEach(drawNow));

// ---- Choices.

function option(value, text, isChosen, isDisabled = false) {
  const node = html("option", { value, selected: isChosen, disabled: isDisabled }, text);
  return node;
}

function choice(name, id, options, onChange) {
  const select = html("select", { id }, ...options);
  select.addEventListener("change", () => onChange(select.value));
  return html("label", { for: id }, name, select);
}

function drawChoices() {
  const form = place("choices");
  const chosen = section();
  const runs = [...new Set(report.sections.map((one) => one.run_id))];
  const ofRun = report.sections.filter((one) => one.run_id === chosen.run_id);
  const parts = [];
  if (runs.length > 1) {
    const names = runs.map((run) => {
      const one = report.sections.find((each) => each.run_id === run);
      return option(
        run,
        `${run} (${one.facts.input_family}, ${one.facts.n_ctx} tokens)`,
        run === chosen.run_id,
      );
    });
    parts.push(
      choice("Run", "run", names, (run) =>
        show({ section: indexOf(run, chosen.intervention) ?? indexOf(run), other: null }),
      ),
    );
  }
  if (ofRun.length > 1) {
    const names = ofRun.map((one) => option(one.intervention, one.intervention, one === chosen));
    parts.push(
      choice("Intervention", "intervention", names, (name) =>
        show({ section: indexOf(chosen.run_id, name), other: null }),
      ),
    );
  }
  if (report.sections.length > 1) {
    const names = report.sections.map((one, i) =>
      i === state.section
        ? null
        : option(i, sectionName(one), i === state.other, !isComparable(chosen, one)),
    );
    const all = [option("", "nothing", state.other === null), ...names.filter(Boolean)];
    parts.push(
      choice("Compare with", "compare", all, (i) => show({ other: i === "" ? null : Number(i) })),
    );
  }
  const search = html("input", {
    type: "search",
    id: "search",
    placeholder: "L5H1",
    autocomplete: "off",
    spellcheck: "false",
    list: "heads",
  });
  const heads = html("datalist", { id: "heads" });
  // The names of all heads, of which a browser shows those that begin so.
  heads.append(
    ...Array.from({ length: chosen.n_layers * chosen.n_heads }, (_, i) =>
      html("option", { value: label(Math.floor(i / chosen.n_heads), i % chosen.n_heads) }),
    ),
  );
  search.addEventListener("change", () => find(search.value));
  parts.push(html("label", { for: "search" }, "Find a head", search, heads));
  const own = html("input", { type: "checkbox", id: "own", checked: state.ownRange });
  own.addEventListener("change", () => show({ ownRange: own.checked }));
  parts.push(
    html("label", { class: "check", for: "own" }, own, "Colours over the values' own range"),
  );
  form.replaceChildren(...parts);
  form.onsubmit = (event) => {
    event.preventDefault();
    find(search.value);
  };
}

function indexOf(run, intervention) {
  const index = report.sections.findIndex(
    (one) =>
      one.run_id === run && (intervention === undefined || one.intervention === intervention),
  );
  return index < 0 ? undefined : index;
}

function find(wanted) {
  const match = /^\s*l(\d+)h(\d+)\s*$/i.exec(wanted);
  const one = section();
  const exists = match && Number(match[1]) < one.n_layers && Number(match[2]) < one.n_heads;
  const input = place("search");
  input.setCustomValidity(
    exists || !wanted
      ? ""
      : `Expected a head from L0H0 to ${label(one.n_layers - 1, one.n_heads - 1)}`,
  );
  if (exists) choose(Number(match[1]), Number(match[2]));
  else if (wanted) input.reportValidity();
}

// ---- The head of the page.

function drawHeader() {
  const one = section();
  const run = one.facts;
  place("title").textContent = `What the attention heads of ${run.model} do`;
  place("lead").textContent = one.heads
    ? `${number(one.heads)} heads over ${number(run.sequences_done)} sequences of ${number(run.n_ctx)} tokens (${number(run.sequences_done * run.n_ctx)} in all), input ${run.input_family}. Every number is a mean over sequences; ± is one standard error of the mean, over documents: the sequences of one are not independent.`
    : "No rows yet.";
  const measured = run.measured_heads === "all" ? "" : `; measured: ${run.measured_heads}`;
  const entries = {
    run: one.run_id,
    "layers × heads": `${one.n_layers} × ${one.n_heads}${measured}`,
    input: `${run.input_family}${run.options ? ` (${run.options})` : ""}`,
    intervention: one.intervention,
    weights: run.weight_processing,
    engine: `${one.facts.engine}, ${run.precision}`,
    shards: `${number(run.shards_done)} of ${number(run.shards)}`,
    started: String(run.created)
      .replace("T", " ")
      .replace(/(:\d\d)(\.\d+)?(Z|\+00:00)$/, " UTC"),
  };
  place("facts").replaceChildren(
    ...Object.entries(entries).map(([name, value]) =>
      html("div", {}, html("dt", {}, name), html("dd", {}, value)),
    ),
  );
  const warnings = [];
  if (absent.length)
    warnings.push(html("p", { class: "warning", id: "absent", role: "alert" }, `${absent.join("; ")}.`));
  if (!run.complete) {
    const damaged = one.damaged.length
      ? ` Damaged and left out: shard ${one.damaged.join(", ")}.`
      : "";
    warnings.push(
      html(
        "p",
        { class: "warning" },
        html("strong", {}, "Incomplete. "),
        `${number(run.shards_done)} of ${number(run.shards)} shards are done: the numbers below cover ${number(run.sequences_done)} of ${number(run.sequences)} sequences.${damaged}`,
      ),
    );
  }
  if (!report.detailed) {
    warnings.push(
      html(
        "p",
        { class: "warning" },
        "These runs have so many heads and statistics that one file holds their means, but not their distributions. A report of one run, or headcount explore, has them.",
      ),
    );
  }
  place("warnings").replaceChildren(...warnings);
}

// ---- What stands out.

function leadingNames(one) {
  const scores = LEADING.filter((name) => isMap(one, name));
  const others = Object.keys(one.values).filter(
    (name) => isMap(one, name) && !scores.includes(name),
  );
  return [...scores, ...others].slice(0, MOST_LEADING);
}

function ranked(one, name) {
  const values = one.values[name];
  return values.mean
    .map((mean, i) => ({
      mean,
      error: values.error[i],
      documents: values.documents[i],
      layer: Math.floor(i / one.n_heads),
      head: i % one.n_heads,
    }))
    .filter((entry) => entry.mean !== null)
    .toSorted((first, second) => second.mean - first.mean);
}

function howSure(one, name, top) {
  const [first, second] = top;
  const uniform_baseline = one.values[name].uniform_baseline;
  const parts = [
    html("strong", {}, label(first.layer, first.head)),
    ` leads with ${plusMinus(first.mean, first.error)}`,
  ];
  if (uniform_baseline) parts.push(`, ${number(Number((first.mean / uniform_baseline).toPrecision(2)))} times the uniform baseline`);
  if (second && first.error !== null && second.error !== null) {
    const gap = (first.mean - second.mean) / Math.hypot(first.error, second.error);
    if (Number.isFinite(gap))
      parts.push(
        `. It is ${gap > 100 ? "more than 100" : number(Number(gap.toPrecision(2)))} standard errors above ${label(second.layer, second.head)}${gap < 2 ? ": the two may as well be equal" : ""}`,
      );
  }
  const ranking = one.rankings.find((each) => each.statistic === name);
  if (ranking)
    parts.push(
      `. ${number(ranking.passing)} of ${number(one.heads)} heads pass the threshold of ${ranking.view}`,
    );
  return html("p", { class: "finding" }, ...parts, ".");
}

function definedNote(one, name) {
  const values = one.values[name];
  const undefinedMost = Math.max(...values.undefined);
  if (!undefinedMost) return null;
  const definedLeast = Math.min(
    ...values.count.filter((count, i) => values.mean[i] !== null),
    ...[Infinity],
  );
  const text = Number.isFinite(definedLeast)
    ? `Defined in ${number(definedLeast)} of ${number(definedLeast + undefinedMost)} sequences.`
    : "Undefined in every sequence.";
  return html("p", { class: "note" }, text);
}

function rankingTable(ranking) {
  const head = html(
    "tr",
    {},
    ...["head", ...ranking.columns.map((column) => column.replaceAll("_", " "))].map((name) =>
      html("th", { scope: "col" }, name),
    ),
  );
  const rows = ranking.rows.map((row) => {
    const button = html("button", { type: "button", class: "plain" }, row.label);
    button.addEventListener("click", () => find(row.label));
    return html(
      "tr",
      { class: row[ranking.flag] ? "on" : null },
      html("td", {}, button),
      ...ranking.columns.map((column) => html("td", {}, number(row[column]))),
    );
  });
  return html(
    "div",
    { class: "scroll" },
    html("table", {}, html("thead", {}, head), html("tbody", {}, ...rows)),
  );
}

function standoutCard(one, name) {
  const top = ranked(one, name).slice(0, SHOWN_HEADS);
  if (!top.length) return null;
  const figure = (width) =>
    bars({
      width: Math.min(width, 420),
      names: top.map((entry) => label(entry.layer, entry.head)),
      values: top.map((entry) => entry.mean),
      errors: top.map((entry) => entry.error),
      reference: { x: one.values[name].uniform_baseline, name: "uniform baseline" },
      range:
        facts(name).low === 0 && facts(name).high === 1 && !state.ownRange ? [0, 1] : undefined,
      title: `Heads with the largest ${name}`,
      unit: facts(name).unit,
      onChoose: (i) => choose(top[i].layer, top[i].head, name),
    });
  const ranking = one.rankings.find((each) => each.statistic === name);
  const table = ranking
    ? html(
        "details",
        {},
        html("summary", {}, "As a table, with thresholds"),
        html(
          "p",
          { class: "note" },
          `A dot marks a head that passes the threshold of the view ${ranking.view}.`,
        ),
        rankingTable(ranking),
      )
    : null;
  const plot = drawnLater(24 + 19 * top.length, figure);
  return html(
    "section",
    { class: "card", "data-standout": name },
    html("h3", {}, breakable(name)),
    html("p", { class: "meaning" }, facts(name).meaning),
    howSure(one, name, top),
    definedNote(one, name),
    plot,
    table,
    behind({
      sql: `SELECT label, mean, standard_error, documents, count
FROM head_summaries
WHERE ${condition(one)}
  AND statistic = ${literal(name)}
ORDER BY mean DESC NULLS LAST`,
      name: `${name}-ranking`,
      columns: ["head", "mean", "standard_error", "documents"],
      rows: () =>
        ranked(one, name).map((entry) => [
          label(entry.layer, entry.head),
          entry.mean,
          entry.error,
          entry.documents,
        ]),
    }),
  );
}

// ---- Heatmaps.

function mapFigure(one, options) {
  const figure = heatmap({
    rows: one.n_layers,
    cols: one.n_heads,
    rowName: "layer",
    colName: "head",
    chosen: state.head,
    ...options,
    values: matrix(one, options.list),
  });
  maps.push(figure);
  return figure;
}

function summariesSql(one, name) {
  return `SELECT layer, head, mean, standard_error, documents, count
FROM head_summaries
WHERE ${condition(one)}
  AND statistic = ${literal(name)}`;
}

function mapCard(one, name) {
  const values = one.values[name];
  const another = other();
  const compared = another?.values[name] ? another : null;
  const readout = html("p", { class: "readout" });
  const restingText = values.uniform_baseline === null ? "\u00a0" : `Uniform baseline: ${number(values.uniform_baseline)}`;
  readout.textContent = restingText;
  const difference = compared ? differences(one, compared, name) : null;
  const onHover = (layer, head) => {
    readout.textContent =
      layer === null ? restingText : readoutText(one, name, compared, difference, layer, head);
  };
  const onChoose = (layer, head) => choose(layer, head, name);
  const shared = rangeOf(name, [...values.mean, ...(compared ? compared.values[name].mean : [])]);
  const draw = (width) => {
    const size = { width: compared && width > 700 ? (width - 50) / 3 : Math.min(width, 420) };
    const first = mapFigure(one, {
      list: values.mean,
      ...shared,
      ...size,
      title: `${name} by layer and head`,
      onChoose,
      onHover,
    });
    if (!compared) return first;
    const second = mapFigure(compared, {
      list: compared.values[name].mean,
      ...shared,
      ...size,
      title: `${name} in ${sectionName(compared)}`,
      onChoose,
      onHover,
    });
    const isFaint = (layer, head) => {
      const error = at(difference.error, one, layer, head);
      return error !== null && Math.abs(at(difference.mean, one, layer, head)) < 2 * error;
    };
    const third = mapFigure(one, {
      list: difference.mean,
      ...evenRange(difference.mean, values.mean),
      ...size,
      title: `Difference of ${name}`,
      onChoose,
      onHover,
      faint: isFaint,
    });
    const captioned = (caption, figure) =>
      html("figure", {}, html("figcaption", {}, caption), figure);
    return html(
      "div",
      { class: "plots" },
      captioned(sectionName(one), first),
      captioned(sectionName(compared), second),
      captioned("second minus first", third),
    );
  };
  const columns = [
    "head",
    "mean",
    "standard_error",
    "documents",
    "count",
    ...(compared ? ["other_mean", "difference", "difference_standard_error"] : []),
  ];
  const rows = () =>
    values.mean.map((mean, i) => [
      label(Math.floor(i / one.n_heads), i % one.n_heads),
      mean,
      values.error[i],
      values.documents[i],
      values.count[i],
      ...(compared ? [compared.values[name].mean[i], difference.mean[i], difference.error[i]] : []),
    ]);
  const plot = drawnLater(60 + 12 * one.n_layers, draw);
  return html(
    "figure",
    { class: "card map", "data-map": name },
    html("p", { class: "eyebrow" }, FAMILIES[facts(name).family] ?? facts(name).family),
    html("h3", {}, breakable(name)),
    html(
      "p",
      { class: "meaning" },
      `${facts(name).meaning}${facts(name).unit ? ` Unit: ${facts(name).unit}.` : ""}`,
    ),
    facts(name).formula
      ? html("p", {}, html("code", { title: `Source: ${facts(name).source}` }, facts(name).formula))
      : null,
    definedNote(one, name),
    readout,
    plot,
    behind({
      plot,
      sql: compared ? comparedSql(one, compared, name) : summariesSql(one, name),
      name,
      columns,
      rows,
    }),
  );
}

function readoutText(one, name, compared, difference, layer, head) {
  const values = one.values[name];
  const here = plusMinus(at(values.mean, one, layer, head), at(values.error, one, layer, head));
  if (!compared) return `${label(layer, head)}  ${here}`;
  const there = compared.values[name];
  return `${label(layer, head)}  ${here} → ${plusMinus(at(there.mean, one, layer, head), at(there.error, one, layer, head))}; difference ${plusMinus(at(difference.mean, one, layer, head), at(difference.error, one, layer, head))}`;
}

function comparedSql(one, another, name) {
  if (one.run_id === another.run_id && one.intervention === "none") {
    return `SELECT layer, head, untouched, intervened, change, standard_error, documents, pairs
FROM effects
WHERE ${condition(another)}
  AND statistic = ${literal(name)}`;
  }
  return `SELECT layer, head, a.mean, b.mean AS other_mean, b.mean - a.mean AS difference,
  sqrt(a.standard_error ** 2 + b.standard_error ** 2) AS standard_error
FROM head_summaries a JOIN head_summaries b USING (layer, head, statistic)
WHERE statistic = ${literal(name)}
  AND a.run_id = ${literal(one.run_id)} AND a.intervention = ${literal(one.intervention)}
  AND b.run_id = ${literal(another.run_id)} AND b.intervention = ${literal(another.intervention)}`;
}

// All statistics that differ between heads. Those of one file stand together.
function mapSections(one) {
  const names = Object.keys(one.values).filter((name) => isMap(one, name));
  const families = [...new Set(names.map((name) => facts(name).family))];
  const cards = families.flatMap((family) =>
    names.filter((name) => facts(name).family === family).map((name) => mapCard(one, name)),
  );
  if (!cards.length) return [];
  const note =
    "Rows are layers, columns are heads. Point at a cell to read it. A click, or Enter after the arrow keys, shows the card of a head.";
  return [
    html("h2", {}, `${number(cards.length)} statistics, head by head`),
    html("p", { class: "note" }, note),
    html("div", { class: "grid narrow even maps" }, ...cards),
  ];
}

function comparisonNote(one) {
  const another = other();
  if (!another) return null;
  const isPaired =
    one.run_id === another.run_id && [one.intervention, another.intervention].includes("none");
  const how = isPaired
    ? "Differences are means over the same sequences, with and without the intervention."
    : "The standard error of a difference takes the two for independent. Shared documents make it too large: run_changes has that of pairs.";
  return html(
    "p",
    { class: "note" },
    `First ${sectionName(one)}, second ${sectionName(another)}, with the same colours. ${how} A pale cell differs by less than two standard errors.`,
  );
}

// ---- By layer, by subset of the Pile, and what all heads share.

function layerCards(one) {
  const cards = one.norms.map((chart) =>
    lineCard(
      one,
      chart.title,
      chart.meaning,
      chart.unit,
      chart.series,
      true,
      `SELECT layer, ${chart.series.map((line) => line.column).join(", ")}
FROM layer_norms
WHERE ${condition(one)}`,
    ),
  );
  const inCharts = one.norms.length
    ? ["resid_pre_norm", "sink_resid_pre_norm", "resid_post_norm", "sink_resid_post_norm"]
    : [];
  for (const [name, values] of Object.entries(one.values)) {
    if (values.kind !== "layers" || inCharts.includes(name)) continue;
    const byLayer = matrix(one, values.mean).map(
      (row) => row.find((value) => value !== null) ?? null,
    );
    cards.push(
      lineCard(
        one,
        name,
        facts(name).meaning,
        facts(name).unit,
        [{ name, y: byLayer }],
        false,
        summariesSql(one, name),
      ),
    );
  }
  return cards;
}

function lineCard(one, title, meaning, unit, series, log, sql) {
  const layers = [...Array(one.n_layers).keys()];
  const draw = (width) =>
    lines({
      x: layers,
      series,
      xName: "layer",
      yName: unit,
      log,
      title,
      width: Math.min(width, 560),
      height: 240,
    });
  const plot = drawnLater(240, draw);
  return html(
    "figure",
    { class: "card", "data-lines": title },
    html("h3", {}, title),
    html("p", { class: "meaning" }, meaning),
    plot,
    behind({
      plot,
      sql,
      name: title,
      columns: ["layer", ...series.map((line) => line.name)],
      rows: () => layers.map((layer) => [layer, ...series.map((line) => line.y[layer])]),
    }),
  );
}

// The heads whose means differ most between subsets, in standard errors of the larger error.
function subsetsCard(one) {
  const names = Object.keys(one.values).filter(
    (name) => isMap(one, name) && Object.keys(one.values[name].subsets ?? {}).length,
  );
  if (!names.length) return null;
  const chosen = names.includes(state.statistic)
    ? state.statistic
    : (LEADING.find((name) => names.includes(name)) ?? names[0]);
  const select = html(
    "select",
    { id: "subset-statistic", "aria-label": "Statistic by subset of the Pile" },
    ...names.map((name) => option(name, name, name === chosen)),
  );
  const where = html("div", { class: "plot" });
  const note = html("p", { class: "meaning" });
  const tools = html("div");
  const draw = (name) => {
    const subsets = one.values[name].subsets;
    const subsetNames = Object.keys(subsets);
    const spread = one.values[name].mean.map((_, i) => {
      const means = subsetNames
        .map((subset) => subsets[subset].mean[i])
        .filter((mean) => mean !== null);
      return { i, spread: means.length > 1 ? Math.max(...means) - Math.min(...means) : -1 };
    });
    const heads = spread
      .toSorted((first, second) => second.spread - first.spread)
      .filter((entry) => entry.spread >= 0)
      .slice(0, 14)
      .map((entry) => entry.i);
    const nameOf = (i) => label(Math.floor(i / one.n_heads), i % one.n_heads);
    const counts = subsetNames.map((subset) => Math.max(...subsets[subset].count));
    const values = subsetNames.map((subset) => heads.map((i) => subsets[subset].mean[i]));
    note.textContent = `The ${heads.length} heads whose mean ${name} differs most between subsets. The number of sequences is in brackets: with few, a mean says little.`;
    where.replaceChildren(
      heatmap({
        rows: subsetNames.map((subset, i) => `${subset} (${counts[i]})`),
        cols: heads.map(nameOf),
        rowName: "",
        colName: "head",
        width: 640,
        values,
        ...rangeOf(name, values.flat()),
        title: `${name} by subset of the Pile`,
        cellName: (row, col) => `${subsetNames[row]}, ${nameOf(heads[col])}`,
        onChoose: (row, col) =>
          choose(Math.floor(heads[col] / one.n_heads), heads[col] % one.n_heads, name),
      }),
    );
    tools.replaceChildren(
      behind({
        sql: `SELECT label, pile_set_name, mean, standard_error, documents, count
FROM subset_summaries
WHERE ${condition(one)}
  AND statistic = ${literal(name)}`,
        name: `${name}-subsets`,
        columns: ["head", "pile_set_name", "mean", "standard_error", "documents", "count"],
        rows: () =>
          subsetNames.flatMap((subset) =>
            subsets[subset].mean.map((mean, i) => [
              nameOf(i),
              subset,
              mean,
              subsets[subset].error[i],
              subsets[subset].documents[i],
              subsets[subset].count[i],
            ]),
          ),
      }),
    );
  };
  select.addEventListener("change", () => draw(select.value));
  draw(chosen);
  return html("figure", { class: "card", "data-subsets": "" }, select, note, where, tools);
}

function constants(one) {
  const shared = Object.entries(one.values).filter(([, values]) => values.kind === "model");
  if (!shared.length) return [];
  const entries = shared.map(([name, values]) => {
    const value = values.mean.find((mean) => mean !== null);
    return html(
      "div",
      {},
      html("dt", { title: facts(name).meaning }, name),
      html("dd", {}, value === undefined ? "undefined here" : number(value)),
    );
  });
  return [html("h2", {}, "The same for every head"), html("dl", { class: "facts" }, ...entries)];
}

function predictions(one) {
  if (!one.predictions.length) return [];
  const hasChange = one.predictions.some((row) => row.change !== null);
  const names = [
    "prediction",
    "unit",
    "mean",
    ...(hasChange ? ["change from the untouched model"] : []),
  ];
  const rows = one.predictions.map((row) =>
    html(
      "tr",
      {},
      html("td", { title: row.meaning }, row.name),
      html("td", {}, row.unit),
      html("td", {}, plusMinus(row.mean, row.standard_error)),
      ...(hasChange ? [html("td", {}, plusMinus(row.change, row.change_error))] : []),
    ),
  );
  const table = html(
    "table",
    {},
    html("thead", {}, html("tr", {}, ...names.map((name) => html("th", { scope: "col" }, name)))),
    html("tbody", {}, ...rows),
  );
  return [
    html("h2", {}, "Predictions"),
    html("div", { class: "card scroll", "data-predictions": "" }, table),
  ];
}

function dormantCards(block) {
  const ranking = { columns: block.columns, rows: block.rows, flag: "is_dormant" };
  const runs = [block.repeated_run, block.unrepeated_run, block.text_run]
    .filter(Boolean)
    .join(", ");
  const figure = points({
    points: block.points,
    xName: "induction score where the input repeats",
    yName: "sink mass where nothing repeats",
    xRange: [0, 1.04],
    yRange: [0, 1.04],
    title: "Copying against resting",
  });
  const plot = html("div", { class: "plot" }, figure);
  return html(
    "section",
    { class: "card", "data-dormant": "" },
    html(
      "h3",
      {},
      `${block.model}${block.intervention === "none" ? "" : `, ${block.intervention}`}`,
    ),
    html(
      "p",
      { class: "note" },
      `${number(block.passing)} heads pass both thresholds (induction score 0.4, sink mass 0.3), from ${runs}. To the right are heads that copy where something repeats, at the top heads that rest on the first token where nothing does.`,
    ),
    plot,
    rankingTable(ranking),
    behind({
      plot,
      sql: "FROM dormant_induction_heads",
      name: "dormant",
      columns: ["head", "induction_repeated", "sink_unrepeated"],
      rows: () => block.points.map((point) => [point.name, point.x, point.y]),
    }),
  );
}

function overview() {
  const runs = [...new Set(report.sections.map((one) => one.run_id))].map((run) =>
    report.sections.find((one) => one.run_id === run),
  );
  if (runs.length < 2) return [];
  const rows = runs.map((one) => {
    const button = html("button", { type: "button", class: "plain" }, breakable(one.run_id));
    button.addEventListener("click", () =>
      show({ section: indexOf(one.run_id), other: null }, true),
    );
    const run = one.facts;
    const count = report.sections.filter((each) => each.run_id === one.run_id).length;
    return html(
      "tr",
      { "aria-selected": one.run_id === section().run_id ? "true" : "false" },
      html("td", {}, button),
      html("td", {}, run.model),
      html("td", {}, run.input_family),
      html("td", {}, number(run.n_ctx)),
      html(
        "td",
        {},
        `${number(run.sequences_done)}${run.complete ? "" : ` of ${number(run.sequences)}`}`,
      ),
      html("td", {}, number(count)),
    );
  });
  const names = ["run", "model", "input", "tokens", "sequences", "interventions"];
  const table = html(
    "table",
    { class: "overview" },
    html("thead", {}, html("tr", {}, ...names.map((name) => html("th", { scope: "col" }, name)))),
    html("tbody", {}, ...rows),
  );
  const isLong = runs.length > 6;
  const content = html("div", { class: "scroll" }, table);
  return [
    html("h2", {}, `${number(runs.length)} runs`),
    html(
      "div",
      { class: "card" },
      isLong ? html("details", {}, html("summary", {}, "All runs"), content) : content,
    ),
  ];
}

function drawMain() {
  waiting.forEach((_, where) => watcher.unobserve(where));
  waiting = new Map();
  maps = [];
  const one = section();
  const layers = layerCards(one);
  const subsets = subsetsCard(one);
  const standouts = leadingNames(one)
    .map((name) => standoutCard(one, name))
    .filter(Boolean);
  const main = place("main");
  main.classList.toggle("comparing", other() !== null);
  main.replaceChildren(
    ...[
      standouts.length
        ? [
            html("h2", {}, "What stands out"),
            html("div", { class: "grid narrow even" }, ...standouts),
          ]
        : [],
      predictions(one),
      other() ? [html("h2", {}, "Comparison"), comparisonNote(one)] : [],
      mapSections(one),
      layers.length
        ? [html("h2", {}, "By layer"), html("div", { class: "grid wide" }, ...layers)]
        : [],
      subsets
        ? [html("h2", {}, "By subset of the Pile"), html("div", { class: "grid wide" }, subsets)]
        : [],
      constants(one),
      report.dormant.length
        ? [
            html("h2", {}, "Dormant induction heads"),
            html(
              "p",
              { class: "note" },
              "The same weights in several runs: heads that copy where the input repeats and rest on key 0 where nothing does.",
            ),
            html("div", { class: "grid wide" }, ...report.dormant.map(dormantCards)),
          ]
        : [],
      overview(),
    ].flat(),
  );
}

// ---- The card of a head.

function edgesOf(values, first, size, groups) {
  const { edges } = values;
  const last = Array.isArray(edges) ? edges.length - 1 : edges.bins;
  const edge = (i) =>
    Array.isArray(edges) ? edges[i] : edges.low + (i / edges.bins) * (edges.high - edges.low);
  return Array.from({ length: groups + 1 }, (_, group) =>
    edge(Math.min(last, first + size * group)),
  );
}

function excerptsOf(one, group, name, headLabel) {
  const entries = one.examples[group][name]?.[headLabel] ?? [];
  return entries.map((entry) => ({ ...entry, tokens: one.examples.texts[entry.text] }));
}

// The card of a head, as `queries/report/head_card.py` would give it.
function cardOf(one, layer, head) {
  const value = (list) => at(list, one, layer, head);
  const names = Object.keys(one.values);
  const byName = (make) =>
    Object.fromEntries(
      names.map((name) => [name, make(name, one.values[name])]).filter(([, content]) => content),
    );
  const headLabel = label(layer, head);
  return {
    label: headLabel,
    layer,
    head,
    run_id: one.run_id,
    model: one.facts.model,
    intervention: one.intervention,
    input_family: one.facts.input_family,
    sequences: one.facts.sequences_done,
    n_ctx: one.facts.n_ctx,
    heads: one.heads,
    statistics: names.map((name) => {
      const values = one.values[name];
      return {
        ...facts(name),
        name,
        mean: value(values.mean),
        standard_error: value(values.error),
        documents: value(values.documents),
        minimum: value(values.minimum),
        maximum: value(values.maximum),
        count: value(values.count),
        undefined: value(values.undefined),
        uniform_baseline: values.uniform_baseline,
        percentile: values.kind === "heads" ? value(values.percentile) : null,
        change: value(values.changes?.mean),
        change_error: value(values.changes?.error),
      };
    }),
    distributions: byName((_, values) => {
      const bins = value(values.bins);
      if (!bins || bins.length < 3) return null;
      const [first, size, ...counts] = bins;
      return { edges: edgesOf(values, first, size, counts.length), counts };
    }),
    subsets: byName((_, values) =>
      Object.entries(values.subsets ?? {})
        .map(([subset, means]) => ({
          subset,
          mean: value(means.mean),
          standard_error: value(means.error),
          documents: value(means.documents),
          count: value(means.count),
        }))
        .filter((subset) => subset.mean !== null),
    ),
    curves: one.curves
      .map((curve) => {
        const size = curve.indices.length;
        const start = (layer * one.n_heads + head) * size;
        return {
          ...curve,
          ...facts(curve.profile),
          values: curve.values.slice(start, start + size),
          standard_errors: curve.standard_errors.slice(start, start + size),
        };
      })
      .filter((curve) => curve.values.some((each) => each !== null)),
    most: byName((name) => excerptsOf(one, "most", name, headLabel)),
    least: byName((name) => excerptsOf(one, "least", name, headLabel)),
    note: one.examples.note,
  };
}

function drawHead() {
  const aside = place("card");
  if (!state.head) {
    aside.replaceChildren(
      html("p", { class: "note" }, "Choose a head in a heatmap, or find it by its name."),
    );
    return;
  }
  const another = other();
  const close = html("button", { type: "button", class: "close" }, "Close");
  close.addEventListener("click", () => aside.classList.remove("open"));
  const card = drawCard(cardOf(section(), ...state.head), {
    statistic: state.statistic,
    onStatistic: (name) => {
      state.statistic = name;
      const scrolled = aside.querySelector(".statistics-scroll").scrollTop;
      drawHead();
      aside.querySelector(".statistics-scroll").scrollTop = scrolled;
      aside.querySelector(`[aria-selected="true"] button`)?.focus({ preventScroll: true });
      writeHash(true);
    },
    compared: another ? cardOf(another, ...state.head) : null,
  });
  aside.replaceChildren(close, card);
}

function choose(layer, head, statistic = state.statistic) {
  state.head = [layer, head];
  state.statistic = statistic;
  maps.forEach((map) => map.choose(layer, head));
  drawHead();
  place("card").classList.add("open");
  place("card").scrollTop = 0;
  const name = label(layer, head);
  place("search").value = name;
  place("said").textContent = `${name} is chosen; its card is shown.`;
  place("absent")?.remove();
  writeHash(true);
}

// ---- The address says what is shown, so that it can be sent to others.

let writtenHash = "";

// A choice is a step that Back undoes.
function writeHash(isStep) {
  const words = new URLSearchParams({ run: section().run_id });
  if (section().intervention !== "none") words.set("intervention", section().intervention);
  if (state.head) words.set("head", label(...state.head));
  if (state.statistic) words.set("statistic", state.statistic);
  if (other()) words.set("with", `${other().run_id}/${other().intervention}`);
  if (state.ownRange) words.set("range", "own");
  writtenHash = `#${words}`;
  if (location.hash !== writtenHash) history[isStep ? "pushState" : "replaceState"](null, "", writtenHash);
}

// What the address names is shown. What is not here is said.
function readHash() {
  const words = new URLSearchParams(location.hash.slice(1));
  absent = [];
  const found = (name, value, instead) => {
    if (words.has(name) && value === undefined)
      absent.push(`${name} ${words.get(name)} is not here, ${instead} is shown`);
    return value;
  };
  const first = firstWithRows();
  const run = found("run", indexOf(words.get("run")), report.sections[first].run_id);
  const runId = report.sections[run ?? first].run_id;
  const wanted = indexOf(runId, words.get("intervention") ?? "none");
  const index = found("intervention", wanted, "another") ?? indexOf(runId);
  const one = report.sections[index];
  const [, otherRun, otherIntervention] = /^(.*)\/([^/]*)$/.exec(words.get("with") ?? "") ?? [];
  const another = indexOf(otherRun, otherIntervention);
  const isUsable = another !== undefined && another !== index && isComparable(one, report.sections[another]);
  const match = /^L(\d+)H(\d+)$/.exec(words.get("head") ?? "")?.slice(1).map(Number);
  const isHead = match && match[0] < one.n_layers && match[1] < one.n_heads;
  const statistic = words.get("statistic");
  Object.assign(state, {
    section: index,
    other: found("with", isUsable ? another : undefined, "no comparison") ?? null,
    head: found("head", isHead ? match : undefined, "the leading head") ?? null,
    statistic: found("statistic", one.values[statistic] ? statistic : undefined, "another") ?? null,
    ownRange: words.get("range") === "own",
  });
  return Boolean(state.head);
}

const firstWithRows = () =>
  Math.max(
    0,
    report.sections.findIndex((one) => one.heads),
  );

// Show other choices. The card stays with its head, if there is such a head.
function show(changes, isTop = false) {
  const isStep = Object.keys(changes).length > 0;
  if (isStep) absent = [];
  Object.assign(state, changes);
  const one = section();
  const isKept = state.head && state.head[0] < one.n_layers && state.head[1] < one.n_heads;
  if (!isKept) state.head = leader(one);
  if (state.statistic && !one.values[state.statistic]) state.statistic = null;
  drawChoices();
  drawHeader();
  drawMain();
  drawHead();
  writeHash(isStep);
  if (isTop) scrollTo({ top: 0 });
}

// The head that is shown first: the leader of the first ranking.
function leader(one) {
  const [name] = leadingNames(one);
  const top = name ? ranked(one, name)[0] : null;
  return top ? [top.layer, top.head] : null;
}

addEventListener("hashchange", () => {
  // The page's own changes come here too.
  if (location.hash === writtenHash) return;
  readHash();
  show({});
});

if (report.sections.length) {
  const namesHead = readHash();
  show({});
  place("card").classList.toggle("open", namesHead);
} else {
  place("lead").textContent = "There is no run here.";
}
