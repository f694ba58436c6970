"""Input families: where the sequences of a scan come from. Importing the package registers them.

A synthetic family draws each sequence from a random stream of its own (`input_registry`). A family
of text names a corpus, and its documents become sequences in these steps:

1. `corpus_families` lists the files and says how documents are packed: a `Corpus`.
2. `extents` cuts the files into what one task reads, by their sizes alone. `documents` reads an
   extent as records, and makes documents of them.
3. `preparation` tokenises the documents of an extent, and commits them in portions to the
   `token_store`. That is done once for all scans of these files.
4. `sequence_index` chooses the documents of each portion, says where each sequence lies in them and
   what became of each document, and reads any sequence.
5. `sequences` hands out shards of a scan, whichever the family.
"""

from headcount.schemas.registry import import_files
from headcount.workers.inputs import families
from headcount.workers.inputs.input_registry import (
    INPUTS,
    Draw,
    InputFamily,
    Labelled,
    input_family,
)

import_files(families.__name__, families.__path__)

__all__ = ["INPUTS", "Draw", "InputFamily", "Labelled", "input_family"]
