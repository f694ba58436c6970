"""The format `headkv`: how large a share of the cache each head gets."""

from typing import Literal

from headcount.exports.formats.duo import problem_of_window
from headcount.exports.formats.retrieval_heads import (
    NEEDLE_FAMILIES,
    exported_scores,
    scores_of_sequences,
)
from headcount.exports.shared.registry import Exported, Needs, Options, Setting, export_format
from headcount.exports.shared.source import ExportSource
from headcount.schemas.errors import QueryError
from headcount.schemas.values import Count, Index

MASS = "labelled_key_mass(gold,answer)"  # the statistic of the default score


def needs_of_headkv(score: str, sink: int, recent: int) -> Needs:
    """What the score is made of."""
    if score == "effect":
        return Needs(statistics=(f"effect_window({sink},{recent})",), calibrated=True)
    return Needs(statistics=(MASS,), families=NEEDLE_FAMILIES)


def refusal_of_headkv(setting: Setting, options: Options) -> str | None:
    """A window that hides nothing has no effect."""
    if options["score"] != "effect":
        return None
    return problem_of_window(setting.n_ctx, options["sink"], options["recent"])


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
    needs=needs_of_headkv,
    refusal=refusal_of_headkv,
    least_documents=2,
)
def headkv(
    source: ExportSource,
    *,
    score: Literal["mass", "effect"] = "mass",
    sink: Index = 4,
    recent: Count = 64,
    only_scores: bool = False,
) -> Exported:
    """The scores of every head on needles, in the form of `retrieval-heads` (Fu et al. 2024), which
    writes HeadKV's files `…_retrieval_heads.json`.

    HeadKV divides the mean score of a head by the sum over all heads, so only ratios count. A list
    is written if some heads are above what uniform attention would score, or have an effect.

    * `score`: `mass` is the attention of the answer's tokens to the needle's value. HeadKV's own
      reasoning score is near to it: it counts the token before each token of the answer, leaves out
      keys that are not among the highest, and asks questions that need reasoning. `effect` is the
      rise of the loss if the head sees only the first `sink` and the last `recent` keys, estimated
      by `effect_window` and calibrated, on any input; 0 where it is not surely above 0.
    * `sink`: first keys of `effect`.
    * `recent`: last keys of `effect`.
    * `only_scores`: `true` leaves out the second line, which says where the file is from. HeadKV
      reads the first line alone. Without it, a file cannot say that it is `unfinished`, so with
      --model it is written when its effects are calibrated.
    """
    if score != "effect":
        return scores_of_sequences(source, MASS, only_scores)
    choice = source.choice(lambda part: part.surely_harmful(f"effect_window({sink},{recent})"))
    if not choice.items:
        raise QueryError(
            f"export headkv: run {source.run_id}: no head whose streaming surely raises the loss; "
            "expected more documents, a text with distant references, or smaller windows"
        )
    effects = source.effects(f"effect_window({sink},{recent})").means
    values = {head: [float(effects[head])] for head in choice.items}
    return exported_scores(source, values, choice, only_scores)
