// SQL of the reader's own. Only a server answers it.
import { table, tableRow } from "../card.js";
import { html, number } from "../draw.js";
import { answerTo, isLive } from "../source.js";
import { by } from "../state.js";

async function askSql() {
  by("sql-note").textContent = "…";
  by("run-sql").disabled = true;
  try {
    const answer = await answerTo({ kind: "sql", text: by("sql").value });
    const cell = (value) =>
      html(
        "td",
        { class: typeof value === "string" ? "words" : null },
        typeof value === "number" || value === null ? number(value) : String(value),
      );
    const isText = (column) => answer.rows.some((row) => typeof row[column] === "string");
    const columns = answer.columns.map((name, column) => ({ name, words: isText(column) }));
    by("sql-rows").replaceChildren(
      table(
        columns,
        answer.rows.map((row) => tableRow(row.map(cell))),
        "The answer",
      ),
    );
    const more = answer.has_more
      ? `the first ${number(answer.rows.length)} rows`
      : `${number(answer.rows.length)} ${answer.rows.length === 1 ? "row" : "rows"}`;
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

// What a figure offers its SQL to.
export const offer = isLive ? offerSql : null;

export function beginSql() {
  by("run-sql").onclick = askSql;
  by("sql").onkeydown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) askSql();
  };
}
