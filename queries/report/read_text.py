"""Where each token of a text looks in one head, as an array and as a page."""

import numpy as np

from headcount.queries.ask.asking import RunDatabase
from headcount.queries.report.head_card import chosen_head
from headcount.queries.report.html_page import CARD, TEMPLATES, html_text, json_value
from headcount.workers.run_model import RunModels


def read_text(
    database: RunDatabase,
    models: RunModels,
    label: str,
    text: str,
    run_id: str | None,
    intervention: str,
) -> tuple[list[str], np.ndarray]:
    """The tokens of a text, and the attention of each to all: `[query key]`.

    It is 0 behind a query, and NaN behind a window.
    """
    head, run = chosen_head(database, label, run_id, intervention)
    model = models[run["run_id"]]
    tokens = model.tokens_of(text)
    rows: list[np.ndarray] = []
    place = head.layer, head.head
    model.read_pattern(None, tokens, place, intervention, "auto", lambda _, row: rows.append(row))
    return model.texts(tokens), np.array(rows)


def text_html(label: str, tokens: list[str], weights: np.ndarray) -> str:
    """The page of a text that was read."""
    given = np.nan_to_num(weights)
    # Of the queries that see a key.
    seen = np.tril(~np.isnan(weights)).sum(0)
    data = {"label": label, "tokens": tokens, "weights": weights.tolist()}
    data["received"] = (given.sum(0) / seen).tolist()
    return html_text(TEMPLATES / "read_text", {"label": label}, json_value(data), CARD)
