"""The format `important-heads`: heads whose attention tells one kind of text from another."""

import math
from itertools import islice
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from headcount.exports.formats.qrhead import GOLD, OTHER, PASSAGES, lead_of_gold
from headcount.exports.shared.certainty import sure_heads
from headcount.exports.shared.registry import Exported, Needs, export_format, ranked
from headcount.exports.shared.source import ExportSource
from headcount.schemas.errors import QueryError
from headcount.schemas.values import Count

Deviations = Annotated[float, Field(ge=0)]


@export_format(
    "Important heads for retrieval, as a configuration",
    read_by="vLLM-Hook (`config_file`: core_reranker, attention_tracker)",
    source="https://github.com/IBM/vLLM-Hook",
    writes="file",
    example="model_configs/core_reranker/my-model.json",
    load="""\
import json

with open("model_configs/core_reranker/my-model.json") as file:
    config = json.load(file)
print(config["params"]["important_heads"])  # [layer, head], the highest first
""",
    needs=lambda score: (
        Needs(statistics=("effect_mean",), calibrated=True) if score == "effect" else PASSAGES
    ),
    least_documents=2,
)
def important_heads(
    source: ExportSource,
    *,
    score: Literal["lead", "effect"] = "lead",
    deviations: Deviations = 1.0,
    heads: Count | None = None,
    mode: Literal["all_tokens", "last_token"] = "all_tokens",
) -> Exported:
    """The heads whose attention to the gold passage leads in most sequences, the highest first.

    JSON with `params.important_heads`, a list of `[layer, head]`. The lead is the mean attention of
    the query's tokens to the gold passage, less that to another passage. Attention-Tracker takes
    the lead of an instruction in normal over attacked prompts by the same rule; its prompts are not
    ours, so this file is made for retrieval (CoRe). Heads whose score is not surely above 0 (q ≤
    0.05) are left out.

    * `score`: lead, as said above; or effect, which is the rise of the loss if the head's output
      becomes its mean, estimated by `effect_mean` and calibrated, on any input.
    * `deviations`: by its lead, a head is taken if that is above so many standard deviations of
      both masses over the sequences. Attention-Tracker's code tries 0 to 5.
    * `heads`: how many heads at most. CoRe's configurations have 8.
    * `mode`: `hookq_mode` of vLLM-Hook: the queries that it records. Its attention tracker needs
      `last_token`.
    """
    least = deviations * spread_of_masses(source) if score == "lead" else None

    def highest(part: ExportSource) -> dict[tuple[int, int], float]:
        if least is None:
            found = part.surely_harmful("effect_mean")
        else:
            lead, q = lead_of_gold(part)
            found = sure_heads((head for head in ranked(lead) if lead[head] > least[head]), q)
        return dict(islice(found.items(), heads))

    choice = source.choice(highest)
    if not choice.items:
        problem = f"leads by {deviations:g} standard deviations; lower --deviations"
        if least is None:
            problem = "surely raises the loss as its mean; expected more documents"
        raise QueryError(f"export important-heads: no head of run {source.run_id} {problem}")
    model = source.model_name
    content = {
        "model_info": {
            "provider": "attn-hf",
            "name": model.rpartition("/")[2],
            "model_id": model,
        },
        # The readers want all three.
        "params": {
            "temperature": 0.1,
            "max_output_tokens": 32,
            "important_heads": [list(head) for head in choice.items],
        },
        "hookq": {"hookq_mode": mode},
    }
    return Exported(
        stability=choice.stability,
        files={"heads.json": source.json_file(content, choice=choice)},
        notes=(f"{len(choice.items)} of {math.prod(source.shape)} heads",),
    )


def spread_of_masses(source: ExportSource) -> np.ndarray:
    """The standard deviations of both masses over the sequences, added up: `[layer head]`."""
    others = source.input_options["passages"] - 1
    gold, other = (source.matrix(name, "stddev_samp(value)", "heads") for name in (GOLD, OTHER))
    return gold + other / others
