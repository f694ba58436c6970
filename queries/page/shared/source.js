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
// heatmap: `values`, the NUMBERS of each statistic by head, and of one head `rows` too. histograms:
// `histograms`, ends and counts by statistic. effects: `effects`, `parts`. Others: `rows`.
export async function answerTo(query, signal) {
  const found = report ? embedded(query) : await ask(query, signal);
  return found && inNames(query, found);
}

// What a report answers about all heads, by the key of `key_of` in report.py.
function embedded({ kind, scope, statistic, changes, lowest, head }) {
  if (kind === "overview") return report.overview;
  const words = [kind, scope.run_id, scope.intervention];
  if (kind === "extremes" || kind === "texts") words.push(statistic);
  if (changes || lowest) words.push("yes");
  const whole = report.answers[words.join("/")];
  if (!whole) return { rows: [], effects: [], parts: [] };
  const [layers, heads] = whole.shape;
  return { ...whole, cells: layers * heads, place: head && head.layer * heads + head.head };
}

// The rows of a table that are about what is asked for.
function rowsOf(columns, { head, heads = [head], statistic }) {
  const wanted = { layer: heads[0]?.layer, head: heads[0]?.head, statistic };
  const tests = Object.entries(wanted).filter(
    ([name, value]) => value !== undefined && name in columns,
  );
  const names = Object.keys(columns);
  const places = [...(columns[names[0]] ?? []).keys()];
  return places
    .filter((i) => tests.every(([name, value]) => columns[name][i] === value))
    .map((i) => Object.fromEntries(names.map((name) => [name, columns[name][i]])))
    .map(({ text, ...row }) => (text === undefined ? row : { ...row, tokens: report.texts[text] }));
}

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

// Arrays [statistic …] by the names of the statistics, of which a report has all heads.
function inNames(query, { cells = 1, place, ...found }) {
  const { statistics, arrays, table: columns } = found;
  if (columns) found.rows = rowsOf(columns, query);
  const part = (array, i) => {
    const size = array.length / statistics.length;
    const [first, length] =
      place === undefined ? [0, size] : [place * (size / cells), size / cells];
    return array.slice(i * size + first, i * size + first + length);
  };
  const named = (content) =>
    Object.fromEntries(statistics.map((name, i) => [name, content(name, i)]));
  if (query.kind === "heatmap" && statistics) {
    found.values = named((name, i) => ({
      uniform_baseline: found.uniform_baseline[name] ?? null,
      ...Object.fromEntries(NUMBERS.map((number, j) => [number, part(arrays[j], i)])),
    }));
    const numbersOf = ({ uniform_baseline, ...own }) => ({
      uniform_baseline,
      ...Object.fromEntries(NUMBERS.map((number) => [number, own[number][0]])),
    });
    if (query.head)
      found.rows = statistics.map((statistic) => ({
        statistic,
        ...numbersOf(found.values[statistic]),
      }));
  } else if (query.kind === "histograms" && statistics) {
    found.histograms = named((name, i) => ({
      edges: found.axes[name],
      counts: part(arrays[0], i),
    }));
  }
  return found;
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
