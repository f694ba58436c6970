// Questions to the source, and what is known of all heads.
import { answerTo, isLive } from "./source.js";
import { by, state } from "./state.js";

// Above so many rows without roll-ups, the means of all statistics would keep the machine busy.
const MOST_ROWS = 1e7;

function trouble(error) {
  if (error?.name === "AbortError") return;
  by("trouble").hidden = !error;
  by("trouble").textContent = error ? error.message : "";
}

// Ask, and show what goes wrong in one line. Undefined if there is no answer.
export async function tryToAsk(query, signal) {
  try {
    const answer = await answerTo(query, signal);
    const isNewer = answer.revision !== undefined && answer.revision !== state.overview?.revision;
    if (isNewer && state.overview && query.kind !== "overview") state.lookAgain();
    trouble(null);
    return answer;
  } catch (error) {
    trouble(error);
    return undefined;
  }
}

const keyOf = (ofScope, changes = false) => JSON.stringify([ofScope, changes]);

// The SQL of what is known of all heads, if a server has answered.
export const sqlOfHeads = (ofScope) => state.known.get(keyOf(ofScope))?.sql?.join("\n");

// The answer about one statistic of all heads, or about all. Each is asked for once.
export async function aboutHeads(ofScope, statistic, changes = false) {
  const key = keyOf(ofScope, changes);
  if (!state.known.has(key)) state.known.set(key, { values: {} });
  const about = state.known.get(key);
  if (about.isWhole || about.values[statistic]) return about;
  const answer = await tryToAsk({
    kind: "heatmap",
    scope: ofScope,
    ...(statistic && { statistic }),
    ...(changes && { changes }),
  });
  if (!answer) return undefined;
  Object.assign(about, { ...answer, values: Object.assign(about.values, answer.values) });
  about.isWhole ||= !isLive || !statistic;
  return about;
}

export const mayAskForAll = () => !isLive || state.run.has_rollups || state.run.rows <= MOST_ROWS;
