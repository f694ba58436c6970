// A page with a text, token by token: where each looks in a head.
import { attentionText } from "./card.js";
import { pageData } from "./data.js";
import { html } from "./draw.js";

const read = await pageData();
const row = { ...read, start: 0, n_tokens: read.tokens.length };
// JSON has no NaN: null is where a query cannot look.
const weights = Float32Array.from(read.weights.flat(), (value) => value ?? NaN);
const parts = attentionText({ rows: [row], arrays: [weights, [], null] });
document
  .getElementById("attention")
  .replaceChildren(html("h1", {}, `Where tokens look in ${read.label}`), ...parts);
document.body.dataset.ready = "yes";
