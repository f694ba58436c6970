// The card of one head: every statistic, and one of them in detail.
//
// `card` is what `queries/report/head_card.py` describes as HeadCard. Undefined numbers are null.
import { bars, breakable, headCurve, histogram, html, number, tokens } from "./draw.js";
import { behind, literal } from "./answers.js";

// A value and its standard error, of which two digits say all that it knows, and one if it is tiny.
export function plusMinus(value, error) {
  if (error === null || error === undefined) return number(value);
  return `${number(value)} ± ${number(Number(error.toPrecision(error < 1e-3 ? 1 : 2)))}`;
}

const cell = (content, attributes = {}) => html("td", attributes, content);

// Where a head stands among the others: a number on a bar from 0 to 100.
function percentileCell(percentile) {
  if (percentile === null || percentile === undefined) return cell("–");
  const node = cell(String(Math.round(percentile)), { class: "percentile" });
  node.style.setProperty("--share", `${percentile}%`);
  return node;
}

const difference = (one, other) => {
  const isDefined = one?.mean !== null && other?.mean !== null && one && other;
  if (!isDefined) return [null, null];
  const errors = [one.standard_error, other.standard_error];
  const hasErrors = errors.every((error) => error !== null && error !== undefined);
  return [other.mean - one.mean, hasErrors ? Math.hypot(...errors) : null];
};

function statisticsTable(card, options) {
  const { compared, statistic, onStatistic } = options;
  const names = [
    "statistic",
    ...(compared ? ["first", "second", "difference ±"] : ["mean ±", "uniform baseline"]),
    "percentile",
  ];
  const head = html("tr", {}, ...names.map((name) => html("th", { scope: "col" }, name)));
  const rows = card.statistics.map((one) => {
    const button = html(
      "button",
      { type: "button", class: "plain", "data-statistic": one.name, title: one.meaning },
      breakable(one.name),
    );
    button.addEventListener("click", () => onStatistic?.(one.name));
    const cells = [
      cell(button),
      cell(compared ? number(one.mean) : plusMinus(one.mean, one.standard_error)),
    ];
    if (compared) {
      const other = compared.statistics.find((each) => each.name === one.name);
      const [change, error] =
        (other?.change ?? null) ? [other.change, other.change_error] : difference(one, other);
      cells.push(cell(number(other?.mean)), cell(plusMinus(change, error)));
    } else cells.push(cell(number(one.uniform_baseline)));
    cells.push(percentileCell(one.percentile));
    return html("tr", { "aria-selected": one.name === statistic ? "true" : "false" }, ...cells);
  });
  const table = html(
    "table",
    { class: "statistics" },
    html("thead", {}, head),
    html("tbody", {}, ...rows),
  );
  return html(
    "div",
    {
      class: "scroll statistics-scroll",
      tabindex: 0,
      role: "region",
      "aria-label": `Statistics of ${card.label}`,
    },
    table,
  );
}

const conditions = (card) =>
  `run_id = ${literal(card.run_id)} AND intervention = ${literal(card.intervention)} AND label = ${literal(card.label)}`;

function distributionPart(card, one) {
  const shown = card.distributions[one.name];
  if (!shown) return [];
  const figure = histogram({
    ...shown,
    title: one.name,
    unit: one.unit,
    marks: [
      { x: one.mean, name: "mean" },
      { x: one.uniform_baseline, name: "uniform baseline", kind: "baseline" },
    ],
  });
  const plot = html("div", { class: "plot" }, figure);
  const undefinedText = one.undefined ? ` It is undefined in ${number(one.undefined)} more.` : "";
  const behindIt = shown.background ? " The dashed line is all heads together." : "";
  const sql = `SELECT low, high, sum(count) AS count
FROM distributions
WHERE ${conditions(card)}
  AND statistic = ${literal(one.name)}
GROUP BY ALL
ORDER BY low`;
  return [
    html("h4", {}, "Over sequences"),
    html(
      "p",
      { class: "note" },
      `${number(one.count)} sequences, from ${number(one.minimum)} to ${number(one.maximum)}.${undefinedText}${behindIt}`,
    ),
    plot,
    behind({
      sql,
      plot,
      name: `${card.label}-${one.name}-distribution`,
      columns: ["low", "high", "count"],
      rows: () => shown.counts.map((count, i) => [shown.edges[i], shown.edges[i + 1], count]),
    }),
  ];
}

function subsetsPart(card, one) {
  const subsets = card.subsets[one.name] ?? [];
  if (!subsets.length) return [];
  const figure = bars({
    names: subsets.map((subset) => `${subset.subset} (${subset.count})`),
    values: subsets.map((subset) => subset.mean),
    errors: subsets.map((subset) => subset.standard_error),
    reference: { x: one.uniform_baseline, name: "uniform baseline" },
    title: `${one.name} by subset of the Pile`,
    unit: one.unit,
  });
  const plot = html("div", { class: "plot" }, figure);
  const sql = `SELECT pile_set_name, mean, standard_error, documents, count
FROM subset_summaries
WHERE ${conditions(card)}
  AND statistic = ${literal(one.name)}`;
  return [
    html("h4", {}, "By subset of the Pile"),
    html(
      "p",
      { class: "note" },
      "Means and their standard errors, over documents. The number of sequences is in brackets.",
    ),
    plot,
    behind({
      sql,
      plot,
      name: `${card.label}-${one.name}-subsets`,
      columns: ["pile_set_name", "mean", "standard_error", "documents", "count"],
      rows: () =>
        subsets.map((subset) => [
          subset.subset,
          subset.mean,
          subset.standard_error,
          subset.documents,
          subset.count,
        ]),
    }),
  ];
}

function curvePart(card, curve) {
  const sql = `SELECT ${curve.axis}, mean, standard_error
FROM profile_means
WHERE ${conditions(card)}
  AND profile = ${literal(curve.profile)}
ORDER BY ${curve.axis}`;
  const drawn = headCurve(curve, card.label);
  return [
    ...drawn,
    behind({
      plot: drawn.at(-1),
      sql: curve.profiled ? sql : curveSql(card, curve),
      name: `${card.label}-${curve.profile}`,
      columns: [curve.axis, "mean", "standard_error"],
      rows: () =>
        curve.indices.map((index, i) => [index, curve.values[i], curve.standard_errors[i]]),
    }),
  ];
}

// A curve that was kept for each sequence and not averaged.
function curveSql(card, curve) {
  return `SELECT ${curve.axis}, avg(value) AS mean
FROM (
  SELECT generate_subscripts(${curve.profile}, 1) - 1 AS ${curve.axis}, unnest(${curve.profile}) AS value
  FROM curves
  WHERE ${conditions(card)}
)
GROUP BY ALL
ORDER BY ALL`;
}

function excerptItem(excerpt) {
  const cut = (isCut) => (isCut ? html("span", { class: "cut" }, "…") : null);
  const names = excerpt.tokens.map((_, i) => `token ${excerpt.start + i}`);
  const origin = excerpt.pile_set_name ? `, ${excerpt.pile_set_name}` : "";
  const heading = html(
    "p",
    { class: "note" },
    html("strong", {}, number(excerpt.value)),
    ` in sequence ${excerpt.sequence}${origin}`,
  );
  const content = tokens(excerpt.tokens, {
    marked: excerpt.marked,
    weights: excerpt.weights,
    names,
  });
  const end = excerpt.start + excerpt.tokens.length < excerpt.length;
  return html(
    "li",
    {},
    heading,
    html("div", { class: "excerpt" }, cut(excerpt.start > 0), content, cut(end)),
  );
}

function markedText(statistic, excerpts) {
  const grounds = excerpts.some((excerpt) => excerpt.weights)
    ? " The stronger its ground, the more attention a token receives."
    : "";
  if (!excerpts.some((excerpt) => excerpt.marked.length)) return grounds.trim();
  if (statistic.startsWith("sink_")) return `The framed token is the first one, key 0.${grounds}`;
  if (statistic.startsWith("induction"))
    return `Framed tokens follow an earlier copy of a token that comes again.${grounds}`;
  if (statistic.startsWith("duplicate")) return `Framed tokens come again later.${grounds}`;
  return `The framed token receives most attention.${grounds}`;
}

function examplesPart(card, one) {
  const most = card.most[one.name] ?? [];
  const least = card.least[one.name] ?? [];
  const value = `"${one.name}"`;
  const sql = `SELECT sequence, ${one.name}, pile_set_name, tokens
FROM heads
JOIN sequences USING (run_id, intervention, sequence)
WHERE heads.${conditions(card)}
ORDER BY ${value} DESC
LIMIT 3`;
  if (!most.length) return [];
  const note = [markedText(one.name, [...most, ...least]), card.note].filter(Boolean).join(" ");
  return [
    html("h4", {}, `Sequences with the largest ${one.name}`),
    note ? html("p", { class: "note" }, note) : null,
    html("ol", { class: "excerpts" }, ...most.map(excerptItem)),
    least.length ? html("h4", {}, "And with the smallest") : null,
    least.length ? html("ol", { class: "excerpts" }, ...least.map(excerptItem)) : null,
    behind({ sql, name: "" }),
  ].filter(Boolean);
}

// The statistic of a card that is shown in detail, if none is named.
export function leadingStatistic(card) {
  const scores = card.statistics.filter(
    (one) => one.percentile !== null && card.most[one.name]?.length,
  );
  const byPlace = scores.toSorted((one, other) => other.percentile - one.percentile);
  return (byPlace[0] ?? card.statistics[0])?.name ?? null;
}

// Draw a card. `statistic` is shown in detail. `onStatistic(name)` is called if another is chosen.
// `compared` is a card of the same head elsewhere.
export function drawCard(card, options = {}) {
  const statistic = options.statistic ?? leadingStatistic(card);
  const one = card.statistics.find((each) => each.name === statistic);
  const heading = html("header", { class: "card-heading" });
  heading.append(
    html("h2", { id: `card-${card.label}` }, card.label),
    html(
      "p",
      { class: "note" },
      `layer ${card.layer}, head ${card.head} · ${card.model} · ${card.input_family}${card.intervention === "none" ? "" : ` · ${card.intervention}`}`,
    ),
  );
  const detail = one
    ? [
        html("h3", { class: "detail-name" }, breakable(one.name)),
        html("p", { class: "meaning" }, one.meaning),
        one.formula ? html("p", {}, html("code", {}, one.formula)) : null,
        ...distributionPart(card, one),
        ...subsetsPart(card, one),
        ...examplesPart(card, one),
      ]
    : [html("p", { class: "note" }, "This head was not measured.")];
  const summarySql = `SELECT statistic, mean, standard_error, documents, minimum, maximum, count, undefined
FROM head_summaries
WHERE ${conditions(card)}`;
  const columns = [
    "statistic",
    "mean",
    "standard_error",
    "documents",
    "minimum",
    "maximum",
    "count",
    "undefined",
    "uniform_baseline",
    "percentile",
  ];
  return html(
    "article",
    { class: "head-card", "aria-labelledby": `card-${card.label}` },
    heading,
    statisticsTable(card, { ...options, statistic }),
    html(
      "p",
      { class: "note" },
      `± is one standard error, over documents. Percentile: the share of the ${number(card.heads)} measured heads with a smaller mean. Uniform baseline: what uniform attention would score.`,
    ),
    behind({
      sql: summarySql,
      name: `${card.label}-statistics`,
      columns,
      rows: () =>
        card.statistics.map((row) => [row.name, ...columns.slice(1).map((column) => row[column])]),
    }),
    html("section", { class: "detail" }, ...detail.filter(Boolean)),
    ...(card.curves.length
      ? [
          html(
            "section",
            { class: "detail" },
            html("h3", {}, "Along the sequence"),
            ...card.curves.flatMap((curve) => curvePart(card, curve)),
          ),
        ]
      : []),
  );
}
