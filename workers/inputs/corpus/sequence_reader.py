"""Sequences of a corpus, read from the token store by their index."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from headcount.schemas.errors import printable
from headcount.schemas.files.tables import carried_name
from headcount.workers.inputs.corpus.corpus import Corpus
from headcount.workers.inputs.corpus.document_block import DocumentBlock
from headcount.workers.inputs.corpus.sequence_index import SequenceIndex
from headcount.workers.inputs.store.token_store import BAD

BLOCKS_IN_MEMORY = 4
"""Blocks of documents that are kept. They hold no tokens. A shard seldom spans more than two."""

Origin = dict[str, list[Any]]
"""Where sequences came from: columns of the table `sequences`, by name."""


class SequenceReader:
    """Reads sequences by their index: in any order, and fastest one after the other."""

    def __init__(self, corpus: Corpus, index: SequenceIndex, separator: int | None) -> None:
        """`separator` is the token that joins documents."""
        self.corpus = corpus
        self.index = index
        self.separator = separator
        self._blocks: OrderedDict[int, DocumentBlock] = OrderedDict()

    def __len__(self) -> int:
        """The number of sequences that the index holds."""
        return self.index.sequences

    def read(self, start: int, stop: int) -> tuple[np.ndarray, Origin]:
        """Tokens `[sequence length]` of the sequences `start .. stop-1`, and their origin."""
        origin: Origin = {name: [] for name in ("file", "row", "offset", "pile_set_name")}
        origin |= {carried_name(column): [] for column in self.corpus.choice.columns}
        origin["document"] = []
        tokens: list[np.ndarray] = []
        for number, first, end in self.index.in_blocks(start, stop):
            block = self.block(number)
            documents, offsets = block.beginnings(first, end)
            origin["file"] += [self.corpus.sources[i].name for i in block.source[documents]]
            origin["row"] += block.row[documents].tolist()
            origin["offset"] += offsets.tolist()
            origin["pile_set_name"] += block.pile_set_names(documents)
            for column in self.corpus.choice.columns:
                origin[carried_name(column)] += block.carried(documents, column)
            origin["document"] += block.position[block.main_documents(first, end)].tolist()
            tokens.append(block.tokens(first, end, self.separator))
        return np.concatenate(tokens), origin

    def bad_rows(self, start: int, stop: int) -> list[str]:
        """The bad rows between the beginning of sequence `start` and that of sequence `stop`."""
        # The first sequence also answers for bad rows before it, the last for those after it.
        first_block, first_document = self._beginning_of(start) if start else (0, 0)
        blocks = len(self.index.ends)
        last_block, end = (blocks, 0) if stop >= len(self) else self._beginning_of(stop)
        bad_rows: list[str] = []
        for number in range(first_block, min(last_block + 1, blocks)):
            block = self.block(number)
            begin = first_document if number == first_block else 0
            lengths = block.n_tokens[begin : end if number == last_block else None]
            bad_documents = begin + np.flatnonzero(lengths == BAD)
            bad_rows += [self.problem_of(block, i) for i in bad_documents.tolist()]
        return bad_rows

    def _beginning_of(self, sequence: int) -> tuple[int, int]:
        """The block and the document that a sequence begins in."""
        ((number, first, end),) = self.index.in_blocks(sequence, sequence + 1)
        return number, int(self.block(number).beginnings(first, end)[0][0])

    def problem_of(self, block: DocumentBlock, document: int) -> str:
        """A bad document, with its place and its problem."""
        place = self.corpus.sources[block.source[document]].place_of(int(block.row[document]))
        return f"{place} ({printable(block.problem(document))})"

    def block(self, number: int) -> DocumentBlock:
        """The documents of a block of the index."""
        if number in self._blocks:
            self._blocks.move_to_end(number)
        else:
            self._blocks[number] = self.index.block(number, self.corpus)
            if len(self._blocks) > BLOCKS_IN_MEMORY:
                self._blocks.popitem(last=False)
        return self._blocks[number]
