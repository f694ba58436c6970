"""The format `qrhead`: heads that attend from a query to the passage that answers it."""

from __future__ import annotations

import json
import math

import numpy as np

from headcount.exports.registry import Exported, Needs, export_format, ranked
from headcount.exports.source import ExportSource
from headcount.schemas.errors import QueryError
from headcount.schemas.scans.values import Count

GOLD, OTHER = "labelled_key_mass(gold,query)", "labelled_key_mass(other,query)"

PASSAGES = Needs(statistics=(GOLD, OTHER), families=("passages",), input_options={"query": 16})
"""Random passages, and a query that is a part of one of them: it needs no text."""


@export_format(
    "Query-focused retrieval heads",
    read_by="QRHead (`QRRetriever(config_or_config_path=…)`)",
    source="https://github.com/princeton-pli/QRHead",
    writes="file",
    example="my-model_qr_head.yaml",
    load="""\
import yaml

with open("my-model_qr_head.yaml") as file:
    config = yaml.safe_load(file)
print(config["attn_head_set"].split(","))  # "layer-head", the highest first
""",
    needs=PASSAGES,
)
def qrhead(source: ExportSource, *, heads: Count = 16) -> Exported:
    """The heads with the largest lead of the gold passage, the highest first (Zhang et al. 2025).

    YAML with `attn_head_set: "layer-head,…"`, `model_base_class` and `model_name_or_path`. The lead
    is the attention of the query's tokens to the gold passage, less that to another passage, on
    average. The other passages stand for what QRHead subtracts: the attention of a query that asks
    for nothing. QRHead runs models of the classes that its code names only.

    * `heads`: how many heads at most. The published files have 16. Heads whose lead is below two
      standard errors are left out.
    """
    lead, spread = lead_of_gold(source)
    is_certain = lead > 2 * spread / math.sqrt(source.run["sequences_done"])
    chosen = [place for place in ranked(lead) if is_certain[place]][:heads]
    if not chosen:
        raise QueryError(
            f"export qrhead: no head of run {source.run_id} attends to the gold passage more than "
            "to the others; expected sequences in which the model finds it"
        )
    model = source.model_name
    scores = ", ".join(f"{layer}-{head} {lead[layer, head]:.4f}" for layer, head in chosen)
    # A text in JSON is the same text in YAML.
    lines = [
        f"# {source.provenance_line}",
        f"# lead of the gold passage: {scores}",
        f"attn_head_set: {json.dumps(','.join(f'{layer}-{head}' for layer, head in chosen))}",
        f"model_base_class: {json.dumps(model.rstrip('/').rpartition('/')[2])}",
        f"model_name_or_path: {json.dumps(model)}",
    ]
    return Exported(
        files={"qrhead.yaml": ("\n".join(lines) + "\n").encode()},
        notes=(f"{len(chosen)} of {lead.size} heads",),
    )


def lead_of_gold(source: ExportSource) -> tuple[np.ndarray, np.ndarray]:
    """The mean mass on the gold passage less that on another one, and the standard deviations of
    both masses over the sequences, `[layer head]`.

    That of the lead is no larger than their sum.
    """
    if source.run["sequences_done"] < 2:
        raise QueryError(
            f"run {source.run_id}: has one sequence; {source.format.name} needs 2 or more, to say "
            "how much they differ"
        )
    others = source.input_options["passages"] - 1
    lead = source.matrix(GOLD, "avg(value)", "heads")
    lead -= source.matrix(OTHER, "avg(value)", "heads") / others
    spread = source.matrix(GOLD, "stddev_samp(value)", "heads")
    spread += source.matrix(OTHER, "stddev_samp(value)", "heads") / others
    return lead, spread
