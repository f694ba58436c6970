// The page of a report and of the explorer: in which order its panels ask and are shown.
import { recall, remember } from "./address.js";
import { aboutHeads, mayAskForAll, tryToAsk } from "./asking.js";
import { showEffects } from "./panels/effects.js";
import { beginHead, fillPercentiles, saySentence, showChoice, showHead } from "./panels/head.js";
import { beginHeatmap, showHeatmap } from "./panels/heatmap.js";
import {
  applyBrushes,
  beginHistograms,
  isDragging,
  makeHistograms,
  sayPicked,
  showBackgrounds,
  showUnbrushed,
} from "./panels/histograms.js";
import { beginMenus, fillHeader, fillMenus } from "./panels/menus.js";
import { showMore } from "./panels/more.js";
import { beginScatter, showScatter } from "./panels/scatter.js";
import { beginSections, showMaps, showSections, showTraining } from "./panels/sections.js";
import { beginSequences, showAttention, showExtremes } from "./panels/sequences.js";
import { beginSql } from "./panels/sql.js";
import { isLive, isWaiting, takeToken } from "./source.js";
import { by, chosen, scope, sectionName, state, turns } from "./state.js";

const LIVE_MILLISECONDS = 5_000;
const FINISHED_MILLISECONDS = 30_000;

// What is shown anew if one of these was chosen. The first line that fits is it.
const SHOWN_FOR = [
  [["run_id", "intervention", "subset", "layers"], showEverything],
  [["statistic", "other", "ownRange"], showAll],
  [["head"], showNewHead],
  [["shown"], showNewHistograms],
  [["brushes"], showUnbrushed],
  [["meaning"], applyBrushes],
  [["x", "y", "colour"], () => showScatter(turns.all)],
  [["sequence", "prompt"], () => showAttention()],
  [["lowest"], showExtremes],
];

state.lookAgain = lookAgain;
state.show = (changes) => {
  fillMenus();
  remember(true);
  const [, show] = SHOWN_FOR.find(([names]) => names.some((name) => name in changes)) ?? [];
  show?.();
};

function showNewHead() {
  showChoice();
  showTraining();
  showScatter(turns.all);
  showHead();
}

function showNewHistograms() {
  makeHistograms();
  showHead();
  showBackgrounds();
}

async function showAll() {
  const turn = ++turns.all;
  // The heatmap is what a reader waits for: the rest is asked for after it.
  if (!(await showHeatmap(turn))) return;
  remember();
  await showHead();
  if (chosen.brushes.size) await applyBrushes();
  await showScatter(turn);
  await showDetails(turn);
  if (mayAskForAll()) {
    // From rows one statistic at a time, while the page waits for nothing else.
    for (const name of !isLive || state.run.has_rollups ? [null] : state.run.statistics) {
      while (isWaiting() || isDragging() || document.hidden) {
        await new Promise((done) => setTimeout(done, 50));
        if (turn !== turns.all) return;
      }
      if (!(await aboutHeads(scope(), name)) || turn !== turns.all) return;
    }
    fillPercentiles();
    saySentence();
    await showMore(turn);
    await showMaps();
  }
  await showEffects(turn);
  if (turn === turns.all) await showSections(turn);
}

async function showDetails(turn) {
  const answer = await tryToAsk({ kind: "details", scope: scope() });
  if (!answer || turn !== turns.all) return;
  state.details = { ...answer, of: sectionName(chosen) };
  fillHeader();
}

async function showEverything() {
  makeHistograms();
  sayPicked();
  await showAll();
  await showBackgrounds();
}

async function lookAgain() {
  const answer = await tryToAsk({ kind: "overview" });
  if (!answer) return;
  const isNew = !state.overview || answer.revision !== state.overview.revision;
  state.overview = answer;
  if (!state.overview.runs.length) {
    by("progress").textContent = "There is no run here.";
    return;
  }
  fillMenus();
  if (isNew) {
    state.known.clear();
    await showEverything();
  }
}

function pollLater() {
  const pause = state.run && !state.run.complete ? LIVE_MILLISECONDS : FINISHED_MILLISECONDS;
  setTimeout(async () => {
    if (!document.hidden && !isDragging() && !isWaiting()) await lookAgain();
    pollLater();
  }, pause);
}

function listen() {
  by("refresh").onclick = lookAgain;
  // Back, another address, or the token of a server that was started again.
  // Not "hashchange", which comes later: a step back could be overwritten before it.
  addEventListener("popstate", () => {
    const isToken = takeToken(state.shownHash);
    if (!isToken) recall();
    if (isToken || !state.overview) return lookAgain();
    fillMenus();
    return showEverything();
  });
}

takeToken();
recall();
listen();
beginMenus();
beginHeatmap();
beginScatter();
beginHistograms();
beginHead();
beginSequences();
beginSections();
beginSql();
await lookAgain();
document.body.dataset.ready = "yes";
if (isLive) pollLater();
