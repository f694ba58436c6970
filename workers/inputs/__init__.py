"""Input families: where the sequences of a scan come from. Importing the package registers all of
them.
"""

from workers.inputs import bigram_backcopy, corpus_families, layouts, synthetic
from workers.inputs.input_registry import (
    INPUTS,
    Draw,
    InputFamily,
    Labelled,
    find_input,
    input_family,
)

__all__ = [
    "INPUTS", "Draw", "InputFamily", "Labelled", "find_input", "input_family",
    "bigram_backcopy", "corpus_families", "layouts", "synthetic",
]  # fmt: skip
