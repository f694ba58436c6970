"""The format `headkv`: how large a share of the cache each head gets."""

from __future__ import annotations

from typing import Literal

from headcount.exports.formats.retrieval_heads import (
    NEEDLE_FAMILIES,
    exported_scores,
    scores_by_head,
)
from headcount.exports.registry import Exported, Needs, export_format
from headcount.exports.source import ExportSource
from headcount.schemas.errors import QueryError

STATISTIC = {"mass": "labelled_key_mass(gold,answer)", "copy": "retrieval_score"}
"""What each way to score heads asks a scan for."""


@export_format(
    "Scores of every head for its share of the cache",
    read_by="HeadKV (`ReasonSnapKVCluster`), which reads a path that stands in its code",
    source="https://github.com/FYYFU/HeadKV",
    writes="file",
    example="head_score/my-model_retrieval_heads.json",
    load="""\
import json

with open("head_score/my-model_retrieval_heads.json") as file:
    scores = json.loads(file.readline())
print(max(scores, key=lambda head: sum(scores[head])))  # "layer-head"
""",
    needs=lambda score: Needs(statistics=(STATISTIC[score],), families=NEEDLE_FAMILIES),
)
def headkv(
    source: ExportSource, *, score: Literal["mass", "copy"] = "mass", only_scores: bool = False
) -> Exported:
    """The scores of every head on needles, in the form of `retrieval-heads` (Fu et al. 2024).

    HeadKV divides the mean score of a head by the sum over all heads, so only ratios count.

    * `score`: `mass` is the attention of the answer's tokens to the needle's value. HeadKV's own
      reasoning score is near to it: it counts the token before each token of the answer, leaves out
      keys that are not among the highest, and asks questions that need reasoning. `copy` is the
      retrieval score, as in its files `…_retrieval_heads.json`.
    * `only_scores`: `true` leaves out the second line, which says where the file is from. HeadKV
      reads the first line alone.
    """
    scores = scores_by_head(source, STATISTIC[score])
    if not any(map(any, scores.values())):
        raise QueryError(
            f"export headkv: every head of run {source.run_id} scores 0, and HeadKV divides by "
            "their sum; expected a model that finds needles, or --score mass"
        )
    return exported_scores(source, scores, only_scores)
