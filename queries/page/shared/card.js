// The parts of the card of one head, and the card as a page of its own.
import { behind, literal, summaries } from "./behind.js";
import { bars, breakable, html, isUndefined, lines, number, smallText, tokens } from "./draw.js";
import { histogram } from "./histogram.js";
import { patternPicture } from "./pattern.js";

// A value and its standard error, of which two digits say all that it knows, and one if it is tiny.
export function plusMinus(value, error) {
  if (isUndefined(error)) return number(value);
  return `${number(value)} ± ${number(Number(error.toPrecision(error < 1e-3 ? 1 : 2)))}`;
}

// A table. A column is a name, or `{name, title, words}`; `rows` are elements.
export function table(columns, rows, caption) {
  const heads = columns.map(({ name, title, words }, i) =>
    html("th", { scope: "col", title, class: words ? "words" : null }, name ?? columns[i]),
  );
  return html(
    "table",
    {},
    html("caption", { class: "visually-hidden" }, caption),
    html("thead", {}, html("tr", {}, heads)),
    html("tbody", {}, rows),
  );
}

// A row of a table, from texts or cells.
export const tableRow = (cells, attributes = {}) =>
  html(
    "tr",
    attributes,
    ...cells.map((cell) =>
      cell instanceof Element && cell.tagName === "TD" ? cell : html("td", {}, cell),
    ),
  );

// A button that looks like a link.
export const button = (content, onclick, attributes = {}) =>
  html("button", { type: "button", class: "plain", onclick, ...attributes }, content);

// Where a head stands among the others: a number on a bar from 0 to 100.
export function fillPercentile(cell, percentile) {
  cell.textContent = isUndefined(percentile) ? "–" : String(Math.round(percentile));
  if (!isUndefined(percentile)) cell.style.setProperty("--share", `${percentile}%`);
}

// Every statistic of a head. `percentile(name)` is null until it is known; `onStatistic(name)`
// chooses one. `compared` are the rows of the same head elsewhere.
export function statisticsTable(
  rows,
  { label, statistic, onStatistic, percentile, compared, titles = {} },
) {
  const most = Math.max(...rows.map((row) => row.count), 0);
  const numbers = compared
    ? ["first", "second", "difference ±"]
    : [
        { name: "mean ±", title: "One standard error, over documents" },
        { name: "baseline", title: "What uniform attention would score" },
      ];
  const ends = compared ? [] : ["smallest", "largest", "undefined"];
  const columns = [
    "statistic",
    ...numbers,
    { name: "percentile", title: "Share of the other heads with a smaller mean" },
    ...ends,
  ];
  const tableRows = rows.map((row) => {
    const name = button(breakable(row.statistic), () => onStatistic?.(row.statistic), {
      title: titles[row.statistic],
    });
    const other = compared?.find((one) => one.statistic === row.statistic);
    const cells = compared
      ? [number(row.mean), number(other?.mean), plusMinus(...difference(row, other))]
      : [
          plusMinus(row.mean, row.standard_error),
          isUndefined(row.uniform_baseline) ? "" : number(row.uniform_baseline),
        ];
    const place = html("td", { class: "percentile" });
    fillPercentile(place, percentile(row.statistic));
    const last = compared
      ? []
      : [
          number(row.minimum),
          number(row.maximum),
          row.count === most ? "" : number(most - row.count),
        ];
    return tableRow([name, ...cells, place, ...last], {
      "aria-selected": String(row.statistic === statistic),
      "data-statistic": row.statistic,
    });
  });
  return table(columns, tableRows, `Every statistic of ${label}`);
}

// Rises of the loss under interventions on heads: effect, direct, their errors, indirect, and trust
// in a row of its own, if that is not the same for all. `nameOf(row)` is the first cell.
export function effectsTable(rows, first, nameOf, caption) {
  const columns = [
    first,
    { name: "rise of the loss ±", title: "To first order, in nats per token" },
    { name: "q", title: "Of the rise, over all heads" },
    { name: "direct ±", title: "What reaches the logits without passing a later layer" },
    { name: "indirect", title: "The rest of the rise" },
  ];
  const cells = (row) => [
    nameOf(row),
    plusMinus(row.effect, row.standard_error),
    smallText(row.q),
    plusMinus(row.direct, row.direct_error),
    number(row.indirect),
  ];
  const trusted = ({ trust }) =>
    trust ? [tableRow([html("td", { class: "note", colspan: columns.length }, trust)])] : [];
  return html(
    "div",
    { class: "scroll" },
    table(
      columns,
      rows.flatMap((row) => [tableRow(cells(row)), ...trusted(row)]),
      caption,
    ),
  );
}

// The effects on the loss of one head.
export const effectsOfHead = (rows, label) =>
  rows.length
    ? [
        html("h4", {}, "Effects on the loss"),
        effectsTable(rows, "intervention", (row) => row.intervention, `Effects of ${label}`),
      ]
    : [];

// The difference of a statistic of a head, and its error: paired if both are of the same sequences.
function difference(one, other) {
  if (!other) return [null, null];
  if (!isUndefined(other.change)) return [other.change, other.change_error];
  if (isUndefined(one.mean) || isUndefined(other.mean)) return [null, null];
  return [
    other.mean - one.mean,
    Math.hypot(one.standard_error ?? NaN, other.standard_error ?? NaN),
  ];
}

// What a head does, in one sentence about one statistic.
export function sentence(label, row, percentile, heads) {
  if (!row) return `${label} was not measured.`;
  if (isUndefined(row.mean)) return `${row.statistic} of ${label} is undefined in every sequence.`;
  const parts = [
    `${row.statistic} of ${label} is ` +
      `${plusMinus(row.mean, row.standard_error)} over ${number(row.count)} ` +
      "sequences",
  ];
  if (row.uniform_baseline)
    parts.push(
      `${number(Number((row.mean / row.uniform_baseline).toPrecision(2)))} ` +
        "times the uniform baseline",
    );
  if (!isUndefined(percentile))
    parts.push(
      `larger than in ${Math.round(percentile)} % of the other ${number(heads - 1)} heads`,
    );
  const missing = row.undefined ? ` It is undefined in ${number(row.undefined)} more.` : "";
  return `${parts.join(", ")}.${missing}`;
}

// The marks of a histogram: its mean, and what uniform attention would score.
export const marksOf = (row) => [
  { x: row?.mean, name: "mean" },
  { x: row?.uniform_baseline, name: "uniform baseline", kind: "baseline" },
];

// The mean of a statistic in each subset of the corpus.
export function subsetBars(rows, statistic, baseline, width) {
  return bars({
    width,
    names: rows.map((row) => `${row.subset ?? "no subset"} (${row.count})`),
    values: rows.map((row) => row.mean),
    errors: rows.map((row) => row.standard_error),
    reference: { x: baseline, name: "uniform baseline" },
    title: `${statistic} by subset`,
  });
}

// The mean of a profile of one head along the sequence, and its SQL, as `fillAndDraw` takes it.
export function curveCard(curve, label, where, askSql) {
  const length = curve.indices.at(-1) + 1;
  const thinned =
    length > curve.indices.length ? ` ${curve.indices.length} of ${length} places are drawn.` : "";
  const { axis, profile } = curve;
  const series = [{ name: profile, y: curve.values, errors: curve.standard_errors }];
  const draw = (width) =>
    lines({
      x: curve.indices,
      series,
      xName: axis,
      yName: curve.unit,
      title: `${profile} of ${label}`,
      height: 170,
      width,
    });
  const plot = html("div", { class: "plot" });
  const sql = curve.profiled
    ? `SELECT ${axis}, mean, standard_error
FROM profile_means
WHERE ${where}
  AND profile = ${literal(profile)}
ORDER BY ${axis}`
    : `SELECT ${axis}, avg(value) AS mean
FROM (
  SELECT generate_subscripts(${profile}, 1) - 1 AS ${axis}, unnest(${profile}) AS value
  FROM curves
  WHERE ${where}
)
GROUP BY ALL
ORDER BY ALL`;
  const rows = () =>
    curve.indices.map((index, i) => [index, curve.values[i], curve.standard_errors[i]]);
  const element = html(
    "div",
    {},
    html("h4", {}, profile),
    html("p", { class: "note" }, `${curve.meaning}${thinned}`),
    plot,
    behind({
      plot,
      sql,
      rows,
      askSql,
      name: `${label}-${profile}`,
      columns: [axis, "mean", "standard_error"],
    }),
  );
  return { element, plot, draw };
}

// What frames and grounds of tokens mean.
export function markedText(rows) {
  const grounds = rows.some((row) => row.weights)
    ? "The stronger its ground, the more attention a token receives: point at it."
    : "";
  const framed = rows.find((row) => row.marked?.length);
  return framed ? `${framed.marks} ${grounds}`.trim() : grounds;
}

// The tokens of a text, with a dash for what is cut off.
export function tokenText({ tokens: strings, marked, weights, start = 0, length, look }) {
  const cut = (words) => html("span", { class: "cut" }, words);
  const missing = length - start - strings.length;
  const names = strings.map((_, i) => `token ${start + i}`);
  // Without a tokenizer there are numbers, which would run together.
  const areNumbers = strings.every((string) => /^\d+$/.test(string));
  const shown = areNumbers ? strings.map((string) => `${string} `) : strings;
  return [
    start > 0 ? cut("… ") : null,
    tokens(shown, { marked, weights, names, look }),
    missing > 0 ? cut(` … ${number(missing)} more tokens`) : null,
  ].filter(Boolean);
}

// Tokens of a sequence, each of which shows where it looks: the answer of the kind "attention".
// `showFrom(start)` shows other tokens of a sequence that is cut.
export function attentionText({ rows: [row], arrays: [weights, outside, received] }, showFrom) {
  const { tokens: strings, start, n_tokens: length } = row;
  const readout = html("p", { class: "readout", role: "status" });
  const name = (i) => `${start + i} ${JSON.stringify(strings[i])}`;
  const rowOf = (query) => weights.subarray(query * strings.length, (query + 1) * strings.length);
  const says = (query) => {
    if (query === null)
      return void (readout.textContent =
        "No token is chosen: grounds show what each receives, on average of the " +
        "tokens that see it.");
    const keys = [...rowOf(query).subarray(0, query + 1)].map((weight, i) => [weight, name(i)]);
    const before = [
      [outside[2 * query], "0, which is cut off"],
      [outside[2 * query + 1], "others that are cut off"],
    ];
    const most = [...keys, ...before]
      .filter(([weight]) => weight >= 5e-4)
      .sort(([one], [other]) => other - one)
      .slice(0, 6);
    readout.textContent =
      `Token ${name(query)} looks at ` +
      `${most.map(([weight, words]) => `${words}: ${weight.toFixed(3)}`).join(" · ") || "none"}`;
  };
  const saysPair = (query, key) => {
    if (query === undefined) return says(null);
    const weight = number(weights[query * strings.length + key]);
    readout.textContent = `Token ${name(query)} looks at ${name(key)}: ${weight}`;
  };
  const look = weights && { row: rowOf, says };
  const shown = received ?? row.received;
  if (shown) says(null);
  const move = (words, to, isOff) =>
    html("button", { type: "button", disabled: isOff, onclick: () => showFrom(to) }, words);
  const step = Math.ceil(strings.length / 2);
  const moves =
    strings.length < length
      ? [
          move("Earlier tokens", Math.max(0, start - step), !start),
          move("Later tokens", start + step, start + strings.length >= length),
        ]
      : [];
  const excerpt = html(
    "div",
    { class: "excerpt" },
    ...tokenText({ tokens: strings, start, length, weights: shown, look }),
  );
  const onChoose = (query) => excerpt.querySelectorAll("[role=option]")[query].click();
  const picture = weights && patternPicture(weights, { onHover: saysPair, onChoose });
  return [excerpt, readout, ...moves, picture].filter(Boolean);
}

// Sequences in which a statistic is extreme: its value, where it comes from, its text once it is
// there. `onSequence(sequence)` is called for where its tokens look.
export function excerptList(rows, { statistic, others = [], onSequence }) {
  const item = (row) => {
    const name = `sequence ${number(row.sequence)}`;
    const origin = row.file ? `. It is from ${row.file}, row ${row.row}` : "";
    const title = `Where its tokens look${origin}`;
    const heading = html(
      "p",
      { class: "note" },
      html("strong", {}, number(row.value ?? row[statistic])),
      " in ",
    );
    heading.append(onSequence ? button(name, () => onSequence(row.sequence), { title }) : name);
    const words = [row.subset, ...others.map((other) => `${other} ${number(row[other])}`)].filter(
      Boolean,
    );
    if (words.length) heading.append(` · ${words.join(" · ")}`);
    const text = row.tokens ? tokenText(row) : [];
    return html(
      "li",
      { "data-sequence": row.sequence },
      heading,
      html("div", { class: "excerpt", "data-text": row.sequence }, ...text),
    );
  };
  return html("ol", { class: "excerpts" }, ...rows.map(item));
}

// A page with the card of one head, which `queries/report/head_card.py` describes as HeadCard.
export function drawCard(card, chosen, onStatistic) {
  // If none is chosen, the one in which it stands highest.
  const scores = card.statistics.filter(
    (one) => one.percentile !== null && card.most[one.name]?.length,
  );
  const [leading = card.statistics[0]] = scores.toSorted(
    (one, other) => other.percentile - one.percentile,
  );
  const statistic = chosen ?? leading?.name ?? null;
  const rows = card.statistics.map((one) => ({ ...one, statistic: one.name }));
  const one = rows.find((row) => row.name === statistic);
  const percentiles = Object.fromEntries(rows.map((row) => [row.name, row.percentile]));
  const titles = Object.fromEntries(rows.map((row) => [row.name, row.meaning]));
  const where =
    `run_id = ${literal(card.run_id)} AND intervention = ` +
    `${literal(card.intervention)} AND label = ${literal(card.label)}`;
  const about =
    `${card.model} · ` +
    `${card.input_family}${card.intervention === "none" ? "" : ` · ${card.intervention}`}`;
  const parts = [html("h2", {}, card.label), html("p", { class: "note" }, about)];
  const options = {
    label: card.label,
    statistic,
    onStatistic,
    titles,
    percentile: (name) => percentiles[name],
  };
  const columns = [
    "statistic",
    "mean",
    "standard_error",
    "documents",
    "minimum",
    "maximum",
    "count",
    "undefined",
  ];
  parts.push(
    html("p", { class: "finding" }, sentence(card.label, one, one?.percentile, one?.heads)),
    html("div", { class: "scroll" }, statisticsTable(rows, options)),
    behind({
      sql: summaries(columns, where),
      name: `${card.label}-statistics`,
      columns,
      rows: () => rows.map((row) => columns.map((column) => row[column])),
    }),
  );
  parts.push(...effectsOfHead(card.effects, card.label));
  if (one) {
    parts.push(
      html("h3", { class: "detail-name" }, ...breakable(one.name)),
      html("p", { class: "meaning" }, one.meaning),
    );
    if (one.formula) parts.push(html("p", {}, html("code", {}, one.formula)));
    const shown = card.distributions[one.name];
    if (shown?.counts.length) {
      const plot = histogram(one.name, one.meaning);
      plot.setAxis([shown.edges[0], shown.edges.at(-1)]);
      plot.drawBefore(shown.counts);
      plot.mark(marksOf(one));
      parts.push(html("div", { class: "plot" }, plot));
    }
    const subsets = card.subsets[one.name] ?? [];
    if (subsets.length)
      parts.push(html("h4", {}, "By subset"), subsetBars(subsets, one.name, one.uniform_baseline));
    for (const [group, title] of [
      ["most", "largest"],
      ["least", "smallest"],
    ]) {
      const excerpts = card[group][one.name] ?? [];
      if (!excerpts.length) continue;
      const note = [markedText(excerpts), card.note].filter(Boolean).join(" ");
      parts.push(
        html("h4", {}, `Sequences with the ${title} ${one.name}`),
        html("p", { class: "note" }, note),
      );
      parts.push(excerptList(excerpts, { statistic: one.name }));
    }
  }
  for (const curve of card.curves) {
    const { element, plot, draw } = curveCard(curve, card.label, where);
    plot.append(draw());
    parts.push(element);
  }
  return html("article", { class: "card head-card" }, ...parts);
}
