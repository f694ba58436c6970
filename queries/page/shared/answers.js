// The query and the data behind a figure: SQL to copy, and a CSV file to download.
import { html } from "./draw.js";
import { download, pictureButtons } from "./picture.js";

// A field of a CSV file. Quotes are doubled, as RFC 4180 says.
function csvField(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  const field = String(value);
  return /[",\r\n]/.test(field) ? `"${field.replaceAll('"', '""')}"` : field;
}

// Rows as CSV. The first line names the columns.
export function csv(columns, rows) {
  return [columns, ...rows].map((row) => row.map(csvField).join(",")).join("\r\n") + "\r\n";
}

async function copy(button, content, place) {
  try {
    await navigator.clipboard.writeText(content);
    button.textContent = "Copied";
  } catch {
    // Without the right to the clipboard, the text is at least selected.
    getSelection().selectAllChildren(place);
    button.textContent = "Selected: press Ctrl+C";
  }
  setTimeout(() => (button.textContent = "Copy SQL"), 2000);
}

// A folded part of a card: the SQL of its figure, its data, and its picture. `rows` is a function,
// `plot` is where the figure is.
export function behind({ sql, columns, rows, name, plot }) {
  const place = html("pre", { tabindex: 0 });
  place.textContent = sql;
  const copyButton = html("button", { type: "button" }, "Copy SQL");
  copyButton.addEventListener("click", () => copy(copyButton, sql, place));
  const parts = [html("summary", {}, "SQL, data and picture"), place, copyButton];
  if (rows) {
    const saveButton = html("button", { type: "button", "data-csv": name }, "Download CSV");
    saveButton.addEventListener("click", () => download(`${name}.csv`, new Blob([csv(columns, rows())], { type: "text/csv" })));
    parts.push(saveButton);
  }
  if (plot) parts.push(...pictureButtons(plot, () => name));
  return html("details", { class: "behind" }, ...parts);
}

// A text as a literal of SQL.
export function literal(value) {
  return `'${String(value).replaceAll("'", "''")}'`;
}
