"""The format `retrieval-heads`: how often each head looks at the token that is to be copied."""

import json
from collections.abc import Mapping

import numpy as np

from headcount.exports.shared.certainty import Choice, sure_heads
from headcount.exports.shared.registry import Exported, Needs, export_format
from headcount.exports.shared.source import ExportSource

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
    least_documents=2,
)
def retrieval_heads(source: ExportSource, *, only_scores: bool = False) -> Exported:
    """The retrieval scores of every head, one for each sequence with a needle (Wu et al. 2024).

    The first line of the file is `{"layer-head": [score, …], …}` for all heads in order. The
    second line says where it is from, and which heads are surely above chance; the readers named
    here take the first line alone. The model reads the right answer, while Retrieval_Head lets it
    answer and counts right answers only. Where the needle lies beyond a head's window, the head
    scores 0.

    * `only_scores`: `true` leaves out the second line, for readers that take the file as one JSON
      value.
    """
    return scores_of_sequences(source, "retrieval_score", only_scores)


def scores_of_sequences(source: ExportSource, statistic: str, only_scores: bool) -> Exported:
    """A statistic of every head in every sequence.

    It is an error if no head is surely above what uniform attention would score.
    """

    def heads_of(part: ExportSource) -> dict[tuple[int, int], float]:
        return sure_heads(np.ndindex(part.shape), part.scores(statistic).q)

    choice = source.choice(heads_of)
    if not choice.items:
        raise source.nothing_found(statistic)
    values = source.by_head(statistic, "list(value ORDER BY sequence)", "heads")
    return exported_scores(source, values, choice, only_scores)


def exported_scores(
    source: ExportSource,
    values: Mapping[tuple[int, int], list[float]],
    choice: Choice,
    only_scores: bool,
) -> Exported:
    """Scores by `layer-head` as one line of JSON, and a line that says where they are from."""
    # Readers count on the order of the heads. A layer that does not attend scores 0.
    scores = {
        # float32 has no more than nine digits.
        f"{layer}-{head}": [float(f"{score:.9g}") for score in values.get((layer, head), [0.0])]
        for layer, head in np.ndindex(source.shape)
    }
    content = f"{json.dumps(scores)}\n".encode()
    if not only_scores:
        content += source.json_file({}, choice=choice)
    highest = sorted(scores, key=lambda head: -float(np.mean(scores[head])))[:5]
    shown = ", ".join(f"{head} ({np.mean(scores[head]):.2f})" for head in highest)
    notes = (
        f"highest mean scores (layer-head): {shown}",
        f"{len(choice.items)} of {len(scores)} heads are surely above 0 or uniform attention",
    )
    return Exported(files={"scores.json": content}, stability=choice.stability, notes=notes)
