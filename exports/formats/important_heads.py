"""The format `important-heads`: heads whose attention tells one kind of text from another."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headcount.exports.formats.qrhead import PASSAGES, lead_of_gold
from headcount.exports.registry import Exported, export_format, ranked
from headcount.exports.source import ExportSource
from headcount.schemas.errors import QueryError
from headcount.schemas.scans.values import Count

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
    needs=PASSAGES,
)
def important_heads(
    source: ExportSource,
    *,
    deviations: Deviations = 1.0,
    heads: Count | None = None,
    mode: Literal["all_tokens", "last_token"] = "all_tokens",
) -> Exported:
    """The heads whose attention to the gold passage leads in most sequences, the highest first.

    JSON with `params.important_heads`, a list of `[layer, head]`. The lead is the mean attention of
    the query's tokens to the gold passage, less that to another passage. Attention-Tracker takes
    the lead of an instruction in normal over attacked prompts by the same rule; its prompts are not
    ours, so this file is made for retrieval (CoRe).

    * `deviations`: a head is taken if its lead is above so many standard deviations of both masses
      over the sequences. Attention-Tracker's code tries 0 to 5.
    * `heads`: how many heads at most. CoRe's configurations have 8.
    * `mode`: `hookq_mode` of vLLM-Hook: the queries that it records. Its attention tracker needs
      `last_token`.
    """
    lead, spread = lead_of_gold(source)
    is_ahead = lead > deviations * spread
    chosen = [place for place in ranked(lead) if is_ahead[place]][:heads]
    if not chosen:
        raise QueryError(
            f"export important-heads: no head of run {source.run_id} leads by {deviations:g} "
            "standard deviations; lower --deviations"
        )
    model = source.model_name
    content = {
        "model_info": {
            "provider": "attn-hf",
            "name": model.rstrip("/").rpartition("/")[2],
            "model_id": model,
        },
        # The readers want all three.
        "params": {"temperature": 0.1, "max_output_tokens": 32, "important_heads": chosen},
        "hookq": {"hookq_mode": mode},
    }
    return Exported(
        files={"heads.json": source.json_file(content)},
        notes=(f"{len(chosen)} of {lead.size} heads",),
    )
