// A page with the card of one head.
import { drawCard } from "./card.js";
import { pageData } from "./data.js";

const card = await pageData();

function show(statistic) {
  const drawn = drawCard(card, statistic, show);
  document.getElementById("card").replaceChildren(drawn);
  drawn.querySelector(`[aria-selected="true"] button`)?.focus({ preventScroll: true });
}

show(null);
document.body.dataset.ready = "yes";
