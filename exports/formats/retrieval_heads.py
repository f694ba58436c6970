"""The format `retrieval-heads`: how often each head looks at the token that is to be copied."""

from __future__ import annotations

import json

import numpy as np

from headcount.exports.registry import Exported, Needs, export_format
from headcount.exports.source import ExportSource

NEEDLE_FAMILIES = ("needle", "text_needle")
"""The first is a fact of random tokens in random tokens: it needs no text and fits every model."""


@export_format(
    "Retrieval scores of every head",
    read_by="Retrieval_Head (`needle_in_haystack_with_mask.py`), HeadKV",
    source="https://github.com/nightdessert/Retrieval_Head",
    writes="file",
    example="head_score/my-model.json",
    load="""\
import json

with open("head_score/my-model.json") as file:
    scores = json.loads(file.readline())
print(sum(scores["1-5"]) / len(scores["1-5"]))  # layer 1, head 5
""",
    needs=Needs(statistics=("retrieval_score",), families=NEEDLE_FAMILIES),
)
def retrieval_heads(source: ExportSource, *, only_scores: bool = False) -> Exported:
    """The retrieval scores of every head, one for each sequence with a needle (Wu et al. 2024).

    The first line of the file is `{"layer-head": [score, …], …}` for all heads in order. The
    second line says where it is from; the readers named here take the first line alone. The model
    reads the right answer, while Retrieval_Head lets it answer and counts right answers only.

    * `only_scores`: `true` leaves out the second line, for readers that take the file as one JSON
      value.
    """
    return exported_scores(source, scores_by_head(source, "retrieval_score"), only_scores)


def scores_by_head(source: ExportSource, statistic: str) -> dict[str, list[float]]:
    """A statistic in every sequence, by `layer-head`; readers count on the order of the heads.

    A layer that does not attend scores 0, and so does a head in a sequence whose needle lies beyond
    its window: it attends to nothing there.
    """
    values = source.by_head(statistic, "list(value ORDER BY sequence)", "heads")
    return {
        # float32 has no more than nine digits.
        f"{layer}-{head}": [float(f"{score:.9g}") for score in values.get((layer, head), [0.0])]
        for layer, head in np.ndindex(source.shape)
    }


def exported_scores(
    source: ExportSource, scores: dict[str, list[float]], only_scores: bool
) -> Exported:
    """Scores as a file of JSON lines, the second of which says where they are from."""
    content = f"{json.dumps(scores)}\n".encode()
    if not only_scores:
        content += source.json_file({})
    highest = sorted(scores, key=lambda head: -float(np.mean(scores[head])))[:5]
    shown = ", ".join(f"{head} ({np.mean(scores[head]):.2f})" for head in highest)
    notes = (f"highest mean scores (layer-head): {shown}",)
    return Exported(files={"scores.json": content}, notes=notes)
