// Answers to what the page asks: those that a report has in it, or the server's.
import { pageData } from "./data.js";

const report = document.getElementById("data") ? await pageData() : null;

// Whether a server answers. It can count again under a brush, and answer SQL.
export const isLive = !report;

const NUMBERS = [
  "mean",
  "standard_error",
  "minimum",
  "maximum",
  "degrees_of_freedom",
  "count",
  "documents",
  "undefined",
  "percentile",
];
const STORED_TOKEN = "headcount-token";
let offered = null;
let open = 0;
let sent = 0;

export const isWaiting = () => open > 0;

// The token comes in the fragment, which no browser sends, and leaves it at once: `hash` stands
// there instead. Once the server has taken it, it is kept for this host and port, so that a
// bookmark opens in any tab. A cookie would go to every port of the host.
export function takeToken(hash = "") {
  if (report || !/^#[\w-]{20,}$/.test(location.hash)) return false;
  offered = location.hash.slice(1);
  history.replaceState(null, "", hash || location.pathname);
  return true;
}

// An answer to a query. One that says no is an Error with one line.
//
// heatmap: `values`, the NUMBERS of each statistic by head. card: `rows`, those of a head by
// statistic. histograms: `histograms`, edges and counts by statistic. curves, subsets, extremes:
// `rows`. effects: `effects`, `parts`.
export async function answerTo(query, signal) {
  if (report) return embedded[query.kind]?.(query) ?? {};
  // The card of a head is the numbers of all heads, of which only one is asked for.
  const isCard = query.kind === "card";
  return inNames(query, await ask(isCard ? { ...query, kind: "heatmap" } : query, signal));
}

// ---- From the report. Its lists are in the order of layers and heads.

const sectionOf = ({ run_id, intervention }) =>
  report.sections[`${run_id}/${intervention}`] ?? { values: {} };
const placeOf = (section, { layer, head }) => layer * section.n_heads + head;

// Every statistic of one head.
function cardRows(values, at) {
  return Object.entries(values).map(([statistic, { uniform_baseline, changes, ...numbers }]) => ({
    statistic,
    uniform_baseline,
    ...Object.fromEntries(NUMBERS.map((name) => [name, numbers[name]?.[at] ?? null])),
    change: changes?.mean[at] ?? null,
    change_error: changes?.standard_error[at] ?? null,
  }));
}

function histogramOf(values, at) {
  const bins = values?.bins?.[at];
  if (!bins || bins.length < 3) return null;
  const { edges } = values;
  const [first, size, ...counts] = bins;
  const last = Array.isArray(edges) ? edges.length - 1 : edges.bins;
  const edge = (i) =>
    Array.isArray(edges) ? edges[i] : edges.low + (i / edges.bins) * (edges.high - edges.low);
  return {
    edges: [...counts, 0].map((_, group) => edge(Math.min(last, first + size * group))),
    counts,
  };
}

const embedded = {
  overview: () => report.overview,
  heatmap({ scope, changes }) {
    const { values } = sectionOf(scope);
    if (!changes) return { values };
    return {
      values: Object.fromEntries(
        Object.entries(values)
          .map(([name, one]) => [name, one.changes])
          .filter(([, one]) => one),
      ),
    };
  },
  card({ scope, head }) {
    const section = sectionOf(scope);
    return { rows: cardRows(section.values, placeOf(section, head)) };
  },
  histograms({ scope, head, statistics }) {
    const section = sectionOf(scope);
    return {
      histograms: Object.fromEntries(
        statistics.map((name) => [name, histogramOf(section.values[name], placeOf(section, head))]),
      ),
    };
  },
  subsets({ scope, head, statistic }) {
    const section = sectionOf(scope);
    const at = placeOf(section, head);
    const own = (means) =>
      Object.fromEntries(Object.entries(means).map(([name, numbers]) => [name, numbers[at]]));
    const rows = Object.entries(section.values[statistic]?.subsets ?? {}).map(
      ([subset, means]) => ({ subset, ...own(means) }),
    );
    return {
      rows: rows.filter((row) => row.mean !== null).sort((one, other) => other.mean - one.mean),
    };
  },
  curves({ scope, head }) {
    const section = sectionOf(scope);
    const ofHead = (curve) => {
      const start = placeOf(section, head) * curve.indices.length;
      const own = (list) => list.slice(start, start + curve.indices.length);
      return { ...curve, values: own(curve.values), standard_errors: own(curve.standard_errors) };
    };
    return {
      rows: section.curves
        .map(ofHead)
        .filter((curve) => curve.values.some((value) => value !== null)),
    };
  },
  effects: ({ scope }) => sectionOf(scope).effects ?? { effects: [], parts: [] },
  extremes({ scope, head, statistic, lowest }) {
    const { examples } = sectionOf(scope);
    const rows =
      examples?.[lowest ? "least" : "most"][statistic]?.[`L${head.layer}H${head.head}`] ?? [];
    return {
      rows: rows.map((row) => ({ ...row, tokens: examples.texts[row.text] })),
      note: examples?.note,
      has_examples: Boolean(examples),
    };
  },
};

// ---- From the server: a header and arrays of numbers.

const ARRAYS = { "<u4": Uint32Array, "<f4": Float32Array, "<f8": Float64Array };

function unpacked(body) {
  const headerBytes = new DataView(body).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(body, 4, headerBytes)));
  let at = 4 + headerBytes;
  header.arrays = header.arrays.map(([type, shape]) => {
    const length = shape.reduce((product, size) => product * size, 1);
    const array = new ARRAYS[type](body, at, length);
    at += Math.ceil(array.byteLength / 8) * 8;
    return array;
  });
  return header;
}

// Arrays of several statistics, by their names.
function inNames(query, answer) {
  const part = (array, names, i) =>
    array.subarray((i * array.length) / names.length, ((i + 1) * array.length) / names.length);
  if (query.kind === "heatmap" || query.kind === "card") {
    const { statistics, uniform_baseline: baselines } = answer;
    const numbers = (name, i) => ({
      uniform_baseline: baselines[name] ?? null,
      ...Object.fromEntries(
        NUMBERS.map((number, j) => [number, part(answer.arrays[j], statistics, i)]),
      ),
    });
    answer.values = Object.fromEntries(statistics.map((name, i) => [name, numbers(name, i)]));
    answer.rows = cardRows(answer.values, 0);
  } else if (query.kind === "histograms") {
    const own = (name, i) => [
      name,
      { edges: answer.axes[name], counts: part(answer.arrays[0], query.statistics, i) },
    ];
    answer.histograms = Object.fromEntries(query.statistics.map(own));
  }
  return answer;
}

// Tests and screen readers see whether the page waits.
function count(change) {
  open += change;
  if (change > 0) sent += 1;
  document.body.dataset.sent = sent;
  document.body.ariaBusy = open > 0;
}

async function ask(query, signal) {
  count(1);
  try {
    const token = offered ?? localStorage.getItem(STORED_TOKEN) ?? "";
    const response = await fetch("/ask", {
      method: "POST",
      signal,
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` },
      body: JSON.stringify(query),
    });
    document.body.classList.toggle("locked", response.status === 401);
    if (response.status === 401)
      offered = null; // A wrong one does not replace the one that is kept.
    else if (token === offered) localStorage.setItem(STORED_TOKEN, offered);
    if (!response.ok) throw new Error((await response.json()).error);
    return unpacked(await response.arrayBuffer());
  } catch (error) {
    if (error instanceof TypeError)
      throw new Error("the explorer does not answer: it may have ended");
    throw error;
  } finally {
    count(-1);
  }
}
