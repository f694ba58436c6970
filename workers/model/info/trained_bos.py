"""Whether sequences begin with a beginning-of-sequence token as those of a model's training did.

No file says it outright. What the model's own tokenizer puts before a text says it best. Where that
is nothing, TransformerLens's choice for the family counts, if training can have shown the token at
the beginning of a text.
"""

from __future__ import annotations

from dataclasses import dataclass

from headcount.workers.model.model_info import TrainedBos

PREPENDS_NONE = frozenset({
    "bloom", "ernie4_5", "ernie4_5_moe", "exaone4", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
    "glm_moe_dsa", "gpt_neox", "granite", "granitemoe", "granitemoehybrid", "minimax_m2", "mpt",
    "phi", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "recurrent_gemma", "seed_oss", "smollm3",
    "starcoder2",
})  # fmt: skip
"""Families whose texts TransformerLens begins with no token, by their `model_type`: adapters with
`default_prepend_bos = False`. Listed, because TransformerLens takes seconds to import.
"""


@dataclass(frozen=True)
class OwnBos:
    """What a model's tokenizer says of the beginning of a text."""

    is_put_first: bool = False  # whether the tokenizer puts it before every text
    is_denied: bool = False  # whether its files say that there is none


def trained_bos(
    family: str, token: int | None, eos: int | None, tokenizer: OwnBos | None
) -> TrainedBos:
    """Whether sequences begin with `token`; `tokenizer` is None if the model has none.

    The `family` of a model in TransformerLens's old layout is empty.
    """
    if token is None:
        return TrainedBos(False, "it names no beginning-of-sequence token", is_strong=False)
    if tokenizer is not None and tokenizer.is_put_first:
        return TrainedBos(True, "its tokenizer puts it before every text")
    if tokenizer is not None and tokenizer.is_denied:
        return TrainedBos(False, "its tokenizer says that it has none")
    by_family = f"TransformerLens puts {{}} before a text of {family or 'such'} models"
    silent = "it has no tokenizer" if tokenizer is None else "its tokenizer puts none before a text"
    if family in PREPENDS_NONE:
        return TrainedBos(False, f"{silent}, and {by_family.format('none')}")
    if tokenizer is None:
        return TrainedBos(True, f"{silent}, and {by_family.format('it')}", is_strong=False)
    if token == eos:
        # As GPT-2, whose texts were joined with it.
        evidence = f"it ends texts, so the next one follows it, and {by_family.format('it')}"
        return TrainedBos(True, evidence, is_strong=False)
    return TrainedBos(False, f"{silent}, and it does not end texts")
