// What is behind a figure: its query to copy, its numbers as CSV, and itself as a picture. SVG and
// PNG have the light colours, without any style sheet.
import { html, set, svg } from "./draw.js";

const TITLE = 24;
const PIXELS = 3;
const KEPT = [
  "fill",
  "fill-opacity",
  "stroke",
  "stroke-width",
  "stroke-dasharray",
  "stroke-linejoin",
  "opacity",
  "font-size",
  "font-weight",
  "text-anchor",
];

// A copy of what is drawn whose looks are attributes: editors read neither classes nor `light-
// dark()`.
function plain(node) {
  if (node.nodeType !== Node.ELEMENT_NODE || node.tagName === "title") return node.cloneNode(true);
  const looks = getComputedStyle(node);
  if (looks.display === "none" || looks.opacity === "0") return "";
  // What is chosen on the page is no part of the picture.
  if (node.classList.contains("chosen") || node.classList.contains("picked-range")) return "";
  const copy = node.cloneNode(false);
  for (const name of ["class", "style", "tabindex"]) copy.removeAttribute(name);
  for (const name of KEPT) copy.setAttribute(name, looks.getPropertyValue(name));
  copy.append(...[...node.childNodes].map(plain));
  return copy;
}

// The figures of a place, one below the other, each under its name.
export function picture(place) {
  const whole = svg("svg", { "font-family": "Helvetica, Arial, sans-serif" });
  const size = { width: 0, height: 0 };
  for (const figure of place.querySelectorAll("svg.figure")) {
    figure.style.colorScheme = "light";
    const { width, height } = figure.viewBox.baseVal;
    const title = svg("text", { x: 4, y: 15, "font-size": 12, fill: "#1b2127" });
    title.textContent = figure.getAttribute("aria-label");
    const drawn = svg("g", { transform: `translate(0 ${TITLE})` });
    const chosen = [...figure.querySelectorAll(".on")];
    for (const mark of chosen) mark.classList.remove("on");
    drawn.append(...plain(figure).childNodes);
    for (const mark of chosen) mark.classList.add("on");
    whole.append(svg("g", { transform: `translate(0 ${size.height})` }, title, drawn));
    figure.style.colorScheme = "";
    size.width = Math.max(size.width, width);
    size.height += TITLE + height;
  }
  const [width, height] = [size.width, size.height].map(Math.ceil);
  set(whole, { width, height, viewBox: `0 0 ${width} ${height}` });
  return { text: new XMLSerializer().serializeToString(whole), ...size };
}

async function png({ text, width, height }) {
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = html("canvas", {
    width: PIXELS * Math.ceil(width),
    height: PIXELS * Math.ceil(height),
  });
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

// Give a file to the reader. `content` is a Blob.
function download(name, content) {
  const link = html("a", { download: name, href: URL.createObjectURL(content) });
  link.click();
  // The browser has taken the content by then.
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

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

// Copy a text. `place` shows it: without the right to the clipboard it is at least selected.
export async function copy(button, content, place) {
  const name = button.textContent;
  try {
    await navigator.clipboard.writeText(content);
    button.textContent = "Copied";
  } catch {
    if (place) getSelection().selectAllChildren(place);
    button.textContent = place ? "Selected: press Ctrl+C" : "Copy it from the address bar";
  }
  setTimeout(() => (button.textContent = name), 2000);
}

// A text as a literal of SQL.
export const literal = (value) => `'${String(value).replaceAll("'", "''")}'`;

// The SQL of numbers by head.
export const summaries = (columns, where) =>
  `SELECT ${columns.join(", ")}\nFROM head_summaries\nWHERE ${where}`;

// A folded part of a card. `plot` is where the figure is; `columns` and `rows` are its numbers.
// Whatever may change is a function. `askSql`, if there is one, takes the query to be asked.
export function behind({ sql, columns, rows, name, plot, askSql }) {
  const now = (value) => (typeof value === "function" ? value() : value);
  const place = html("pre", { tabindex: 0 });
  const button = (text, onclick, attributes = {}) =>
    html("button", { type: "button", onclick, ...attributes }, text);
  const show = () => (place.textContent = now(sql));
  const buttons = [button("Copy SQL", (event) => copy(event.target, now(sql), place))];
  if (askSql) buttons.push(button("Ask it", () => askSql(now(sql))));
  if (rows) {
    const save = () =>
      download(`${now(name)}.csv`, new Blob([csv(now(columns), rows())], { type: "text/csv" }));
    buttons.push(button("Download CSV", save, { "data-csv": "" }));
  }
  const kinds = plot
    ? { svg: (drawn) => new Blob([drawn.text], { type: "image/svg+xml" }), png }
    : {};
  for (const [kind, content] of Object.entries(kinds)) {
    const save = async () => download(`${now(name)}.${kind}`, await content(picture(plot)));
    buttons.push(button(kind.toUpperCase(), save, { "data-picture": kind }));
  }
  const pictures = plot ? "SQL, data, picture" : rows ? "SQL, data" : "SQL";
  const details = html(
    "details",
    { class: "behind", ontoggle: show },
    html("summary", {}, pictures),
    place,
    ...buttons,
  );
  if (typeof sql === "string") show();
  return details;
}
