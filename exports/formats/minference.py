"""The format `minference`: how many columns and diagonals of its pattern each head needs."""

import json

import numpy as np

from headcount.exports.formats.head_profiles import (
    input_name,
    input_notes,
    profile_of_shards,
)
from headcount.exports.shared.certainty import FEWEST_PARTS, Stability, half_of, stability_of
from headcount.exports.shared.registry import Exported, Needs, export_format
from headcount.exports.shared.source import ExportSource
from headcount.schemas.errors import counted
from headcount.schemas.profiles.columns_and_diagonals import CANDIDATES, LAST_QUERIES, SEARCH_LENGTH

PROFILE = "column_diagonal_attention_by_candidate"


@export_format(
    "Columns and diagonals that each head needs in a long prompt",
    read_by="MInference (`config_path`), vLLM's dual-chunk sparse attention",
    source="https://github.com/microsoft/MInference/blob/main/minference/modules/"
    "minference_forward.py",
    writes="file",
    example="my-model_best_pattern.json",
    load="""\
import json

with open("my-model_best_pattern.json") as file:
    patterns = json.load(file)
print(patterns[1]["0"])  # layer 1, head 0: pattern, columns, diagonals, their share
""",
    needs=Needs(statistics=("entropy_normalised",), profiles=(PROFILE,), about_text=True),
)
def minference(source: ExportSource) -> Exported:
    """For every query head, how many columns and diagonals of the pattern hold most attention.

    The file is a JSON list with an object for each layer: `{"0": ["vertical_and_slash", 30, 2048,
    0.93], …}`, which is a head, the numbers of columns and diagonals that MInference computes, and
    their share of the attention. The numbers are those of the four candidates of its search with
    the largest share: 30 columns and 2,048 diagonals, 100 and 1,800, 500 and 1,500, 3,000 and 200.
    They were published for 30,000 tokens, and are measured scaled to the run's n_ctx. The share is
    that of the last 64 queries, by which MInference chooses columns and diagonals; its own search
    then scores all queries. The search's other two patterns are left out: `stream_llm` is the first
    columns and nearest diagonals, which are always among those here, and `block_sparse` is written
    as 1,000 columns and 6,096 diagonals. Nothing in the file says where it comes from, because its
    readers take every entry for a layer or a head.
    """
    source.check_differs_from_uniform("entropy_normalised")
    numbers, totals = profile_of_shards(source, PROFILE, "candidate")
    shares = totals.sum(0) / numbers.sum()
    best = shares.argmax(-1)

    def patterns_of(split: int, half: int) -> list[tuple[int, ...]]:
        choices = totals[half_of(len(numbers), split, half)].sum(0).argmax(-1)
        return [(*head, int(choices[head])) for head in np.ndindex(source.shape)]

    documents = source.documents
    if documents < FEWEST_PARTS:
        # Shards of one document are not independent.
        stability = Stability(0, 0, 0, 0, documents)
    else:
        of = f"shards of {counted(documents, 'document')}"
        stability = stability_of(patterns_of, len(numbers), of)
    layers = [
        {
            str(head): ["vertical_and_slash", *CANDIDATES[candidate], float(of_head[candidate])]
            for head, (of_head, candidate) in enumerate(zip(of_layer, choices, strict=True))
        }
        for of_layer, choices in zip(shares.round(6), best, strict=True)
    ]
    n_ctx = source.run["n_ctx"]
    notes = (f"measured on {input_name(source)}", *input_notes(source))
    if n_ctx < SEARCH_LENGTH / 2:
        notes += (
            f"chosen on sequences of {n_ctx:,} tokens, of which {LAST_QUERIES} queries were looked "
            f"at; the numbers are for {SEARCH_LENGTH:,}, so scan with an n_ctx near that",
        )
    return Exported(
        files={"best_pattern.json": json.dumps(layers).encode()}, stability=stability, notes=notes
    )
