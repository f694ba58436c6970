// Sequences in which the chosen head is highest or lowest, and where the tokens of one look.
import { tryToAsk } from "../asking.js";
import { behind } from "../behind.js";
import { attentionText, button, excerptList, markedText, tokenText } from "../card.js";
import { html, number } from "../draw.js";
import { whereHead } from "../numbers.js";
import { isLive } from "../source.js";
import { brushList, by, choose, chosen, head, label, scope, state, turns } from "../state.js";
import { offer } from "./sql.js";

const EXCERPT_TOKENS = 44;
const NOT_KEPT =
  "A report keeps sequences of the leading heads of each statistic; headcount explore finds " +
  "those of every head.";
const MOST_ATTEMPTS = 20; // At a question that waits for the run's model.

export async function showExtremes() {
  if (!chosen.head) return;
  const turn = ++turns.extremes;
  const { statistic, lowest } = chosen;
  const others = chosen.shown.filter((name) => name !== statistic).slice(0, 3);
  const query = {
    kind: "extremes",
    scope: scope(),
    head: head(),
    statistic,
    statistics: [statistic, ...others],
    brushes: brushList(),
    lowest,
  };
  const answer = await tryToAsk(query);
  if (!answer || turn !== turns.extremes) return;
  state.sql.extremes =
    answer.sql?.join("\n") ??
    `SELECT sequence, "${statistic}", pile_set_name, tokens
FROM heads
JOIN sequences USING (run_id, intervention, sequence)
WHERE heads.${whereHead()}
ORDER BY "${statistic}" ${lowest ? "" : "DESC"}
LIMIT 3`;
  by("extremes-card").hidden = !isLive && !state.run.rows;
  by("extremes-name").textContent =
    `Where ${label(chosen.head)} has the ${lowest ? "lowest" : "highest"} ` +
    `${statistic}${chosen.brushes.size ? ", within the brushes" : ""}`;
  const onSequence = isLive && ((sequence) => choose({ sequence, prompt: null }));
  const list = excerptList(answer.rows, { statistic, others: isLive ? others : [], onSequence });
  by("extremes").replaceChildren(
    answer.rows.length ? list : html("p", { class: "note" }, isLive ? "No sequence." : NOT_KEPT),
  );
  by("text-note").textContent = "";
  if (!answer.rows.length) return;
  const texts = await tryToAsk({
    kind: "texts",
    scope: scope(),
    sequences: answer.rows.map((row) => row.sequence),
    heads: answer.rows.map(head),
    statistic,
    first: EXCERPT_TOKENS,
  });
  if (!texts || turn !== turns.extremes) return;
  by("text-note").textContent = [markedText(texts.rows), texts.note].filter(Boolean).join(" ");
  for (const row of texts.rows)
    by("extremes")
      .querySelector(`[data-text="${row.sequence}"]`)
      ?.replaceChildren(...tokenText({ ...row, length: row.n_tokens }));
}

const isTooLate = () => by("trouble").textContent.startsWith("stopped after");

// A stored sequence or a text of the reader's, token by token: where each looks in the chosen head.
export async function showAttention(start) {
  const { sequence, prompt, statistic } = chosen;
  by("sequence").value = sequence ?? "";
  if (prompt !== null) {
    by("prompt").value = prompt;
    by("prompt-part").open = true;
  }
  by("attention").hidden = !isLive || (sequence === null && prompt === null);
  const query = {
    kind: "attention",
    scope: scope(),
    head: head(),
    ...(prompt === null ? { sequence } : { prompt }),
    statistic,
    ...(start !== undefined && { start }),
  };
  const key = JSON.stringify(query);
  // The same tokens stay, and with them the one that is chosen.
  if (by("attention").hidden || by("attention").dataset.shown === key) return;
  by("attention").dataset.shown = key;
  const text = prompt === null ? `sequence ${number(sequence)}` : "your text";
  const title = html("h4", {}, `Where the tokens of ${text} look in ${label(chosen.head)}`);
  const waiting = html("p", { class: "note" }, "The model of the run reads it …");
  by("attention").replaceChildren(title, waiting);
  let answer = await tryToAsk(query);
  // A model may load for longer than a query may take. The server goes on loading it.
  for (let attempt = 1; !answer && isTooLate() && attempt < MOST_ATTEMPTS; attempt++) {
    if (by("attention").dataset.shown !== key) return;
    waiting.textContent = `The model of the run is still loading; asked ${attempt + 1} times …`;
    answer = await tryToAsk(query);
  }
  if (by("attention").dataset.shown !== key) return;
  if (!answer) {
    by("attention").removeAttribute("data-shown");
    return void by("attention").lastChild.replaceChildren(
      `${by("trouble").textContent} `,
      button("Ask again", () => showAttention(start)),
    );
  }
  const hint =
    "Point at a token, or walk with the arrow keys: grounds show where it " +
    "looks. A click or Enter holds it.";
  const note = html(
    "p",
    { class: "note" },
    [answer.why ?? hint, answer.note].filter(Boolean).join(" "),
  );
  const tokens = answer.rows.length ? attentionText(answer, showAttention) : [];
  by("attention").replaceChildren(title, note, ...tokens);
}

export function beginSequences() {
  for (const input of document.getElementsByName("end")) {
    input.onchange = () => choose({ lowest: input.value === "lowest" });
  }
  by("sequence").onchange = ({ target: { value } }) =>
    choose({ sequence: value === "" ? null : Math.max(0, Math.floor(value)), prompt: null });
  const showPrompt = () => choose({ sequence: null, prompt: by("prompt").value || null });
  by("show-prompt").onclick = showPrompt;
  by("prompt").onkeydown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) showPrompt();
  };
  by("extremes-card").append(
    behind({
      askSql: offer,
      sql: () => state.sql.extremes,
      name: () => `${label(chosen.head)}-sequences`,
    }),
  );
}
