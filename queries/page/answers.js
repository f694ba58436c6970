// The question and the data behind a figure: SQL to copy, and a CSV file to download.
import { html } from "./draw.js";

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

function download(name, content) {
  const link = html("a", { download: name, href: URL.createObjectURL(new Blob([content], { type: "text/csv" })) });
  link.click();
  // The browser has taken the content by then.
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
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

// A folded part of a card: the SQL of its figure, and its data. `rows` is a function.
export function behind({ sql, columns, rows, name }) {
  const place = html("pre", { tabindex: 0 });
  place.textContent = sql;
  const copyButton = html("button", { type: "button" }, "Copy SQL");
  copyButton.addEventListener("click", () => copy(copyButton, sql, place));
  const parts = [html("summary", {}, "SQL and data"), place, copyButton];
  if (rows) {
    const saveButton = html("button", { type: "button", "data-csv": name }, "Download CSV");
    saveButton.addEventListener("click", () => download(`${name}.csv`, csv(columns, rows())));
    parts.push(saveButton);
  }
  return html("details", { class: "behind" }, ...parts);
}

// A text as a literal of SQL.
export function literal(value) {
  return `'${String(value).replaceAll("'", "''")}'`;
}
