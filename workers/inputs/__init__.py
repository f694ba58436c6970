"""Input families: where the sequences of a scan come from. Importing the package registers them.

A synthetic family draws each sequence from a random stream of its own (`input_registry`). A family
of text names a corpus, and its documents become sequences in these steps:

1. `corpus_families` lists the files and says how documents are packed: a `Corpus`.
2. `documents` reads each file as records, and makes documents of them.
3. `document_index` tokenises the documents once. It notes the number of tokens of each, in the
   order in which the scan takes them: an `Index`.
4. `sequence_reader` cuts the documents into sequences by their lengths. It reads any sequence
   again from the file, and says what became of each document.
5. `sequences` hands out shards of a scan, whichever the family.
"""

from workers.inputs import bigram_backcopy, corpus_families, layouts, sentences, synthetic
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
    "bigram_backcopy", "corpus_families", "layouts", "sentences", "synthetic",
]  # fmt: skip
