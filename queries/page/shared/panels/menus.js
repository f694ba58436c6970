// The header: what can be chosen, and what is said of the chosen run.
import { MOST_HISTOGRAMS } from "../address.js";
import { copy } from "../behind.js";
import { html, isUndefined, number } from "../draw.js";
import { isLive } from "../source.js";
import {
  by,
  choose,
  chosen,
  facts,
  label,
  sectionName,
  sectionNamed,
  sections,
  state,
} from "../state.js";

function fill(select, options, value) {
  select.replaceChildren(
    ...options.map(([key, name, isOff]) =>
      html("option", { value: key, disabled: Boolean(isOff) }, name ?? key),
    ),
  );
  select.value = value ?? "";
}

// What was asked for. If it is not here, a line says what is shown instead.
function available(what, wanted, names, instead, words = instead) {
  if (wanted === null || names.includes(wanted)) return wanted ?? instead;
  state.absent.push(`${what} ${wanted} is not here, ${words} is shown`);
  return instead;
}

export function fillMenus() {
  const families = [...new Set(state.overview.runs.map((one) => one.input_family))].sort();
  by("family-menu").hidden = families.length < 2;
  fill(by("family"), [["", "all"], ...families.map((name) => [name])], by("family").value);
  const family = by("family").value;
  const runs = state.overview.runs.filter((one) => !family || one.input_family === family);
  const measured = runs.filter((one) => one.sequences_done);
  const [leading = runs[0]] = measured;
  // Of checkpoints the last one: the first is a model that knows nothing.
  const first = isUndefined(leading.step)
    ? leading
    : measured.findLast((one) => one.name === leading.name);
  chosen.run_id = available(
    "run",
    chosen.run_id,
    runs.map((one) => one.run_id),
    first.run_id,
  );
  state.run = state.overview.runs.find((one) => one.run_id === chosen.run_id);
  fill(
    by("run"),
    runs.map((one) => [
      one.run_id,
      `${one.run_id} · ${one.model} · ${one.input_family}`,
    ]),
    state.run.run_id,
  );
  chosen.intervention = available(
    "intervention",
    chosen.intervention,
    state.run.interventions,
    state.run.interventions[0],
  );
  fill(
    by("intervention"),
    state.run.interventions.map((name) => [name]),
    chosen.intervention,
  );
  by("subset-menu").hidden = by("subsets-card").hidden = state.run.subsets.length === 0;
  by("curves-card").hidden = !state.run.has_curves;
  // Without these two the first column is the shorter one.
  const isShort = by("subsets-card").hidden && by("curves-card").hidden;
  (isShort ? by("hist-card") : by("heat-card")).after(by("heads-card"));
  chosen.subset = available("subset", chosen.subset, state.run.subsets, null, "all of the input");
  fill(
    by("subset"),
    [["", "all"], ...state.run.subsets.map((name) => [name])],
    chosen.subset ?? "",
  );
  const layers = [...Array(state.run.n_layers).keys()].map((layer) => [layer, String(layer)]);
  const [low, high] = chosen.layers ?? [0, state.run.n_layers - 1];
  if (!(low <= high && high < state.run.n_layers))
    chosen.layers = available("layers", `${low} to ${high}`, [], null, "every layer");
  fill(by("first-layer"), layers, chosen.layers?.[0] ?? 0);
  fill(by("last-layer"), layers, chosen.layers?.[1] ?? state.run.n_layers - 1);
  const others = sections().filter(
    (one) => one.run_id !== chosen.run_id || one.intervention !== chosen.intervention,
  );
  const names = others.map((one) => `${one.run_id}/${one.intervention}`);
  const other = available(
    "with",
    chosen.other && `${chosen.other.run_id}/${chosen.other.intervention}`,
    names,
    null,
    "no comparison",
  );
  chosen.other = others[names.indexOf(other)] ?? null;
  by("compare-menu").hidden = !others.length;
  fill(
    by("compare"),
    [["", "nothing"], ...others.map((one, i) => [names[i], sectionName(one)])],
    other,
  );
  const isHead =
    chosen.head && chosen.head[0] < state.run.n_layers && chosen.head[1] < state.run.n_heads;
  if (chosen.head && !isHead)
    chosen.head = available("head", label(chosen.head), [], null, "the head with the largest mean");
  fillStatistics();
  fillHeader();
  by("own").checked = chosen.ownRange;
  by("absent").hidden = !state.absent.length;
  by("absent").textContent = `${state.absent.join("; ")}.`;
}

function fillStatistics() {
  const leading = [...state.run.first_statistics, ...state.run.statistics];
  chosen.statistic = available("statistic", chosen.statistic, state.run.statistics, leading[0]);
  chosen.shown = chosen.shown.filter((name) =>
    available("histogram", name, state.run.statistics, null, "another"),
  );
  if (!chosen.shown.length) chosen.shown = [...state.run.first_statistics];
  for (const name of chosen.brushes.keys())
    if (!available("brush", name, chosen.shown, null, "every value")) chosen.brushes.delete(name);
  // What another run measured and this one did not is said, not hidden.
  const names = state.overview.statistics.map(({ name }) => name);
  const isMeasured = (name) => state.run.statistics.includes(name);
  fill(
    by("statistic"),
    names.map((name) => [
      name,
      isMeasured(name) ? name : `${name} (not measured in this run)`,
      !isMeasured(name),
    ]),
    chosen.statistic,
  );
  const axes = ["layer", "head", ...names.filter(isMeasured)];
  const [up, right] = [...new Set(leading)];
  const defaults = { x: right ?? "layer", y: up ?? "head", colour: "layer" };
  for (const [axis, instead] of Object.entries(defaults)) {
    chosen[axis] = available(axis, chosen[axis], axes, instead);
    fill(
      by(axis),
      axes.map((name) => [name]),
      chosen[axis],
    );
  }
  by("shown-list").replaceChildren(
    ...names.filter(isMeasured).map((name) => {
      const isShown = chosen.shown.includes(name);
      const box = html("input", {
        type: "checkbox",
        checked: isShown,
        onchange: () => chooseHistogram(name, box.checked),
      });
      return html("label", { title: facts(name).meaning ?? null }, box, ` ${name}`);
    }),
  );
}

export function fillHeader() {
  const { engines, damaged = [] } = state.details.of === sectionName(chosen) ? state.details : {};
  by("title").textContent = `What the attention heads of ${state.run.model} do`;
  const share = Math.floor((100 * state.run.sequences_done) / state.run.sequences);
  const words = state.run.complete
    ? [`${number(state.run.sequences_done)} sequences of ${number(state.run.n_ctx)} tokens`]
    : [
        `${number(state.run.sequences_done)} of ${number(state.run.sequences)} ` +
          `sequences are in (${share} %)`,
      ];
  if (state.run.rows) words.push(`${number(state.run.rows)} rows`);
  words.push(`input ${state.run.input_family}`);
  if (isLive && !state.run.complete) words.push(`looked at ${new Date().toLocaleTimeString()}`);
  by("progress").textContent = state.run.sequences_done ? words.join(" · ") : "No rows yet.";
  const measured =
    state.run.measured_heads === "all" ? "" : `; measured: ${state.run.measured_heads}`;
  const about = {
    run: state.run.run_id,
    "layers × heads": `${state.run.n_layers} × ${state.run.n_heads}${measured}`,
    input: `${state.run.input_family}${state.run.options ? ` (${state.run.options})` : ""}`,
    weights: state.run.weight_processing,
    engine: `${engines || state.run.engine}, ${state.run.precision}`,
    shards: `${number(state.run.shards_done)} of ${number(state.run.shards)}`,
    started:
      state.run.created &&
      String(state.run.created)
        .replace("T", " ")
        .replace(/(:\d\d)(\.\d+)?(Z|\+00:00)$/, " UTC"),
  };
  const shown = Object.entries(about).filter(([, value]) => value);
  by("facts").replaceChildren(
    ...shown.flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]),
  );
  const leftOut = damaged.length ? ` Damaged and left out: shard ${damaged.join(", ")}.` : "";
  const done =
    `${number(state.run.shards_done)} of ${number(state.run.shards)} shards ` +
    `are done, which are ${number(state.run.sequences_done)} of ` +
    `${number(state.run.sequences)} sequences`;
  const warnings = [
    ...state.overview.damage,
    ...(isLive || state.run.complete ? [] : [`Incomplete: ${done}.${leftOut}`]),
  ];
  if (state.overview.is_short)
    warnings.push(
      "One file holds the means of so many heads, but not their distributions. " +
        "A report of one run, or headcount explore, has them.",
    );
  by("warnings").replaceChildren(
    ...warnings.map((words) => html("p", { class: "warning" }, words)),
  );
}

function search() {
  const found = /^\s*[Ll](\d+)[Hh](\d+)\s*$/.exec(by("search").value);
  const [layer, index] = found ? [Number(found[1]), Number(found[2])] : [-1, -1];
  const exists = found && layer < state.run.n_layers && index < state.run.n_heads;
  by("search").setCustomValidity(
    exists || !by("search").value
      ? ""
      : `expected L0H0 to ${label([state.run.n_layers - 1, state.run.n_heads - 1])}`,
  );
  if (exists) choose({ head: [layer, index] });
  return exists;
}

function chooseHistogram(name, isShown) {
  const others = chosen.shown.filter((one) => one !== name);
  const shown = isShown || !others.length ? [...others, name] : others;
  choose({ shown: shown.slice(-MOST_HISTOGRAMS) });
}

export function beginMenus() {
  const elsewhere = { layers: null, brushes: new Map(), other: null, pick: null, sequence: null };
  const choices = {
    family: (name) =>
      [state.run.input_family, ""].includes(name) ? {} : { run_id: null, ...elsewhere },
    run: (run_id) => ({ run_id, ...elsewhere }),
    intervention: (intervention) => ({ intervention, other: null }),
    subset: (subset) => ({ subset: subset || null }),
    compare: (words) => ({ other: sectionNamed(words) }),
  };
  for (const [id, changes] of Object.entries(choices)) {
    by(id).onchange = ({ target }) => choose(changes(target.value));
  }
  const chooseLayers = () => {
    const ends = ["first-layer", "last-layer"]
      .map((id) => Number(by(id).value))
      .sort((a, b) => a - b);
    const isEvery = ends[0] === 0 && ends[1] === state.run.n_layers - 1;
    choose({ layers: isEvery ? null : ends });
  };
  by("first-layer").onchange = chooseLayers;
  by("last-layer").onchange = chooseLayers;
  by("choices").onsubmit = (event) => event.preventDefault();
  by("search").oninput = () => by("search").setCustomValidity("");
  by("search").onkeydown = (event) => {
    if (event.key === "Enter" && !search()) by("search").reportValidity();
  };
  by("search").onchange = search;
  by("copy-link").onclick = (event) => copy(event.target, location.href);
}
