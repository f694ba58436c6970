"""The format `qrhead`: heads that attend from a query to the passage that answers it."""

import json
from itertools import islice

import numpy as np

from headcount.exports.shared.certainty import sure_heads
from headcount.exports.shared.registry import Exported, Needs, export_format, ranked
from headcount.exports.shared.source import ExportSource, column_of
from headcount.schemas.errors import QueryError
from headcount.schemas.significance import p_above, q_of
from headcount.schemas.values import Count

GOLD, OTHER = "labelled_key_mass(gold,query)", "labelled_key_mass(other,query)"

CLASSES = (
    "llama-3.1-8b-instruct",
    "llama-3.1-70b-instruct",
    "llama-3.2-3b-instruct",
    "llama-3.2-1b-instruct",
    "qwen2.5-7b-instruct",
)
"""The values of `model_base_class` that QRHead's `attn_retriever.py` takes, in small letters."""

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
    least_documents=2,
)
def qrhead(source: ExportSource, *, heads: Count = 16, model_class: str | None = None) -> Exported:
    """The heads with the largest lead of the gold passage, the highest first (Zhang et al. 2025).

    YAML with `attn_head_set: "layer-head,…"`, `model_name_or_path`, and `model_base_class` if it is
    known: QRHead's code has a class and a prompt for five models, and refuses others. The lead
    is the attention of the query's tokens to the gold passage, less that to another passage, on
    average. The other passages stand for what QRHead subtracts: the attention of a query that asks
    for nothing.

    * `heads`: how many heads at most. The published files have 16. Heads that do not surely lead
      (q ≤ 0.05) are left out.
    * `model_class`: `model_base_class`, by which QRHead's code chooses its own class and prompt of
      the model: Llama-3.1-8B-Instruct, Llama-3.1-70B-Instruct, Llama-3.2-3B-Instruct,
      Llama-3.2-1B-Instruct or Qwen2.5-7B-Instruct, or what a code of yours has. By default that of
      the model, if it has one of these names; else the file has none.
    """

    def leading(part: ExportSource) -> dict[tuple[int, int], float]:
        lead, q = lead_of_gold(part)
        return dict(islice(sure_heads(ranked(lead), q).items(), heads))

    choice = source.choice(leading)
    if not choice.items:
        raise QueryError(
            f"export qrhead: no head of run {source.run_id} attends to the gold passage more than "
            "to the others; expected sequences in which the model finds it"
        )
    name = source.model_name.rpartition("/")[2]
    model_class = model_class or (name if name.lower() in CLASSES else None)
    class_line = f"model_base_class: {json.dumps(model_class)}"
    notes: tuple[str, ...] = ()
    if model_class is None:
        problem = f"QRHead's code has no class and no prompt for {name}"
        class_line = f"# model_base_class: {problem}"
        notes = (
            f"{problem}, so the file names none; --model-class names one of its own, or yours",
        )
    lead, _ = lead_of_gold(source)
    chosen = choice.items
    scores = ", ".join(f"{layer}-{head} {lead[layer, head]:.4f}" for layer, head in chosen)
    facts = json.dumps(source.provenance | choice.facts, ensure_ascii=False)
    # A text in JSON is the same text in YAML.
    lines = [
        f"# {facts}",
        f"# lead of the gold passage: {scores}",
        f"attn_head_set: {json.dumps(','.join(f'{layer}-{head}' for layer, head in chosen))}",
        class_line,
        f"model_name_or_path: {json.dumps(source.model_name)}",
    ]
    return Exported(
        stability=choice.stability,
        files={"qrhead.yaml": ("\n".join(lines) + "\n").encode()},
        notes=(f"{len(chosen)} of {lead.size} heads", *notes),
    )


def lead_of_gold(source: ExportSource) -> tuple[np.ndarray, np.ndarray]:
    """The mean mass on the gold passage less that on another one, and q of its being above 0:
    `[layer head]`.
    """
    gold, other = map(column_of, (GOLD, OTHER))
    others = source.input_options["passages"] - 1
    lead = source.sums(f"coalesce({gold}, 0) - coalesce({other}, 0) / {others}")
    p = p_above(lead.means, lead.errors, lead.degrees_of_freedom, 0)
    return lead.means, q_of(p)
