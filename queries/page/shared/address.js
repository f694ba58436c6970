// What is shown stands in the address, so that a reload, a bookmark and Back keep it.
import { BINS } from "./histogram.js";
import { isLive } from "./source.js";
import { by, chosen, label, sectionNamed, state } from "./state.js";

export const MOST_HISTOGRAMS = 12;

// A choice is a step that Back undoes; a brush is none.
export function remember(isStep = false) {
  const words = new URLSearchParams({
    run: chosen.run_id,
    intervention: chosen.intervention,
    statistic: chosen.statistic,
  });
  if (chosen.head) words.set("head", label(chosen.head));
  if (chosen.other) words.set("with", `${chosen.other.run_id}/${chosen.other.intervention}`);
  if (chosen.subset !== null) words.set("subset", chosen.subset);
  if (chosen.layers) words.set("layers", chosen.layers.join("-"));
  for (const axis of ["x", "y", "colour"]) if (chosen.hasAxes) words.set(axis, chosen[axis]);
  if (chosen.pick) words.set("pick", chosen.pick.map((end) => Number(end.toPrecision(4))).join());
  if (chosen.ownRange) words.set("range", "own");
  if (chosen.shown.join() !== state.run.first_statistics.join())
    words.set("shown", chosen.shown.join());
  for (const [name, range] of chosen.brushes) words.append("brush", `${name}:${range.join("-")}`);
  if (chosen.meaning !== "sequences") words.set("picks", chosen.meaning);
  if (chosen.lowest) words.set("end", "lowest");
  if (chosen.sequence !== null) words.set("sequence", chosen.sequence);
  if (chosen.prompt !== null) words.set("prompt", chosen.prompt);
  state.shownHash = `#${words}`;
  if (location.hash !== state.shownHash)
    history[isStep ? "pushState" : "replaceState"](null, "", state.shownHash);
}

export function recall() {
  state.shownHash = location.hash;
  const words = new URLSearchParams(state.shownHash.slice(1));
  state.absent = [];
  const readNumbers = (text, pattern) => {
    const found = pattern.exec(text);
    if (text !== null && !found) state.absent.push(`${text} cannot be read`);
    return found?.slice(1).map(Number) ?? null;
  };
  const brush = (text) => [
    text.replace(/:[^:]*$/, ""),
    readNumbers(text, /:(\d+)-(\d+)$/)
      ?.map((bin) => Math.min(bin, BINS - 1))
      .sort((a, b) => a - b),
  ];
  const end = "(-?[\\d.]+(?:e[-+]?\\d+)?)";
  Object.assign(chosen, {
    run_id: words.get("run"),
    intervention: words.get("intervention"),
    subset: words.get("subset"),
    statistic: words.get("statistic"),
    other: sectionNamed(words.get("with")),
    layers: readNumbers(words.get("layers"), /^(\d+)-(\d+)$/),
    head: readNumbers(words.get("head"), /^L(\d+)H(\d+)$/),
    x: words.get("x"),
    y: words.get("y"),
    colour: words.get("colour"),
    hasAxes: words.has("x"),
    pick: readNumbers(words.get("pick"), new RegExp(`^${end},${end},${end},${end}$`)),
    ownRange: words.get("range") === "own",
    shown: words.get("shown")?.split(",").slice(0, MOST_HISTOGRAMS) ?? [],
    brushes: new Map(
      isLive
        ? words
            .getAll("brush")
            .map(brush)
            .filter(([, range]) => range)
        : [],
    ),
    meaning: words.get("picks") === "rows" ? "rows" : "sequences",
    lowest: words.get("end") === "lowest",
    sequence: readNumbers(words.get("sequence"), /^(\d+)$/)?.[0] ?? null,
    prompt: words.get("prompt"),
  });
  by("family").value = "";
  for (const input of document.getElementsByName("meaning"))
    input.checked = input.value === chosen.meaning;
  for (const input of document.getElementsByName("end"))
    input.checked = (input.value === "lowest") === chosen.lowest;
}
