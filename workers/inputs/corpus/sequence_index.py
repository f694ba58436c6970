"""Where the sequences of a corpus lie in the portions of the token store, and what they hold.

The index has a few numbers for each portion and none for a document, so a corpus of any size has a
small index. It says where to look; the documents of a portion, a block, are read when a sequence in
it is. The portions of a shuffled corpus are one block together.
"""

import copy
import json
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from headcount.schemas.errors import printable
from headcount.schemas.files.document_fates import FATES, OTHER, Fates
from headcount.schemas.tables import carried_name
from headcount.workers.inputs.corpus.corpus import Corpus
from headcount.workers.inputs.corpus.documents import PART, as_text, is_one_of
from headcount.workers.inputs.store.token_store import (
    BAD,
    Portion,
    TokenStore,
    field_column,
    open_portion,
)

BLOCKS_IN_MEMORY = 4  # of documents without tokens; a shard seldom spans more than two

NAMED_PROBLEMS = 1000  # bad rows that are named; the others are counted
SKIPPED = -2  # number of tokens of a document that `skip` leaves out

SHUFFLE_STREAM = zlib.crc32(b"shuffle")
"""Keeps the order of shuffled documents apart from what else is drawn with the seed of a scan."""


Origin = dict[str, list[Any]]  # where sequences came from: columns of `sequences`, by name


class PortionPlace(NamedTuple):
    """Where a portion lies in its corpus: what the portions before it hold."""

    first_source: int = 0  # number in the corpus of its extent's first source
    rows_before: int = 0  # rows of that source in earlier extents
    taken_before: int = 0  # documents that `where` selects, bad and skipped ones included
    documents_before: int = 0  # all documents; tokens and bad documents are counted likewise
    tokens_before: int = 0
    bad_before: int = 0


@dataclass(frozen=True)
class Findings:
    """What became of the documents of a corpus."""

    fates: Fates
    bad_in_a_row: int  # the largest number of bad documents one after the other
    problems: tuple[str, ...]  # of the first bad documents, in order of the files
    carried: tuple[bool, ...]  # whether a document that was read has each carried field
    carried_of: int  # documents that were read, also those behind the last sequence

    @property
    def bad(self) -> int:
        """How many documents are bad."""
        return self.fates.all.get("bad", 0)

    @property
    def documents(self) -> int:
        """How many documents were read, those that `where` does not select included."""
        return sum(self.fates.all.values())


class SequenceIndex:
    """Sequences `0 .. len-1` of the portions that were added, in the order of the corpus."""

    def __init__(
        self,
        store: TokenStore,
        corpus: Corpus,
        length: int,
        separator: int | None,
        enough: int | None = None,
        most_bad_in_a_row: int | None = None,
        beyond: Mapping[int, str] | None = None,
    ) -> None:
        """`length` is that of a sequence's text; `separator` is the token that joins documents.

        `enough` sequences are needed; None means all. `beyond` are tokens of the store that the
        model does not have, by id: documents with one of them are bad.
        """
        self.store = store
        self.corpus = corpus
        self.length = length
        self.separator = separator
        self.enough = enough
        self.most_bad_in_a_row = most_bad_in_a_row
        self.beyond = dict(beyond or {})
        self.portions: list[Portion] = []
        self.contents: list[str] = []  # of each portion: identifies documents and tokens
        self.special_tokens: list[dict[str, int]] = []  # of each: in how many texts they are spelt
        self.places = [PortionPlace()]  # of each portion, and of what comes behind them
        self.ends: list[int] = []  # of each block: how many sequences it has with those before it
        self.unmeasured = 0  # tokens left over at the ends of portions that are cut
        self.last_documents: int | None = None  # that count of the last portion; None: all
        self.token_counts: np.ndarray | None = None
        """`[token]`, how often the documents have each; None unless tokens are drawn so."""
        if corpus.counted is not None:
            self.token_counts = np.zeros(store.d_vocab, np.int64)
        self._bad_run = BadRun()
        self._blocks: deque[tuple[int, DocumentBlock]] = deque(maxlen=BLOCKS_IN_MEMORY)

    def __getstate__(self) -> dict[str, Any]:
        # Neither a copy nor another process gets the blocks.
        return self.__dict__ | {"_blocks": deque(maxlen=BLOCKS_IN_MEMORY)}

    def __len__(self) -> int:
        """How many sequences there are; those of a shuffled corpus are known when it is `ended`."""
        return self.ends[-1] if self.ends else 0

    @property
    def documents(self) -> int:
        """Documents in the portions, those that the scan does not take included."""
        return self.places[-1].documents_before

    @property
    def tokens(self) -> int:
        """Tokens of these documents."""
        return self.places[-1].tokens_before

    @property
    def bad(self) -> int:
        """How many of these documents are bad."""
        return self.places[-1].bad_before

    @property
    def spelled_out(self) -> Counter[str]:
        """How many texts of these documents spell out each special token, which stays text."""
        return sum(map(Counter, self.special_tokens), Counter[str]())

    # Making it

    def add(self, first_source: int, portion: Portion) -> None:
        """Add the next portion of the corpus; `first_source` is that of its extent."""
        record = open_portion(self.store, portion).record
        place = self.places[-1]._replace(first_source=first_source)
        if not record.start:
            place = place._replace(rows_before=0)
        self.places[-1] = place
        self.portions.append(portion)
        files = [(kind, name.rpartition("/")[2]) for kind, name, _, _ in record.files.values()]
        content = json.dumps([first_source, record.start, files, record.digest, record.groups])
        self.special_tokens.append(record.spelled_out)
        self.contents.append(xxhash.xxh3_64_hexdigest(content.encode()))
        block = self._portion_block(len(self.portions) - 1)
        self._bad_run.add(block.position[block.n_tokens == BAD])
        if self.token_counts is not None:
            self.token_counts = self.token_counts + block.token_counts(self.store.d_vocab)
        if not self.corpus.choice.shuffled:
            self.unmeasured += block.unmeasured
            self.ends.append(len(self) + block.sequences)
        self.places.append(
            PortionPlace(
                first_source,
                # Rows are counted from the beginning of an extent, and the next one may go on with
                # the same source.
                place.rows_before + (record.rows if portion.is_last else 0),
                place.taken_before + len(block),
                place.documents_before + record.documents,
                place.tokens_before + record.tokens,
                place.bad_before + int((block.n_tokens == BAD).sum()),
            )
        )

    @property
    def may_stop(self) -> bool:
        """Whether there are enough sequences, or too many bad documents one after the other."""
        if self.most_bad_in_a_row is not None and self._bad_run.longest > self.most_bad_in_a_row:
            return True
        # Any document of a shuffled corpus may come first, so all are needed.
        if self.corpus.is_read_whole or self.enough is None:
            return False
        return len(self) >= self.enough

    def ended(self) -> "SequenceIndex":
        """The index when its last portion was added: it ends with the last sequence needed."""
        if self.corpus.choice.shuffled and self.portions:
            index = copy.copy(self)
            index.ends = [index.block(0).sequences]
            index.unmeasured = index.block(0).unmeasured
            return index
        return self if self.enough is None else self.up_to(self.enough)

    def up_to(self, sequences: int) -> "SequenceIndex":
        """The index of the first `sequences`, without later documents that other scans need."""
        # Of a shuffled corpus every document is needed, because any may come first.
        if self.corpus.is_read_whole or not 0 < sequences <= len(self):
            return self
        ((last, sequence, _),) = self._in_blocks(sequences - 1, sequences)
        block = self.block(last)
        last_document = block.pieces(sequence, sequence + 1).document[-1]
        left_over = sum(self.block(i).unmeasured for i in range(last, len(self.portions)))
        index = copy.copy(self)
        index.portions = self.portions[: last + 1]
        index.contents = self.contents[: last + 1]
        index.special_tokens = self.special_tokens[: last + 1]
        index.places = self.places[: last + 2]
        index.ends = [*self.ends[:last], sequences]
        index.unmeasured = self.unmeasured - left_over
        position = int(block.position[last_document])
        index.last_documents = position + 1 - self.places[last].documents_before
        return index

    # Reading it

    def block(self, number: int) -> "DocumentBlock":
        """The documents of a block."""
        for known, block in self._blocks:
            if known == number:
                return block
        is_shuffled = self.corpus.choice.shuffled
        block = self._shuffled_block() if is_shuffled else self._portion_block(number)
        self._blocks.append((number, block))
        return block

    def _portion_block(self, number: int) -> "DocumentBlock":
        """The documents that the scan takes from one portion, in the order of the files."""
        place, choice = self.places[number], self.corpus.choice
        is_last = number == len(self.portions) - 1
        table = open_portion(self.store, self.portions[number]).documents()
        table = table.slice(0, self.last_documents if is_last else None)
        is_taken = np.ones(len(table), bool)
        for name, allowed in choice.where:
            column = table[name if name == PART else field_column(name)]
            # Many documents have few different values, so each value is looked at once.
            codes = column.combine_chunks().dictionary_encode()
            fits = [
                value is not None
                and is_one_of(value if name == PART else json.loads(value), allowed)
                for value in codes.dictionary.to_pylist()
            ]
            # The last entry stands for documents that do not have the field.
            is_taken &= np.array([*fits, False])[codes.indices.fill_null(len(fits)).to_numpy()]
        # A row that cannot be read has no fields, and is taken.
        is_taken |= table["problem"].is_valid().to_numpy()
        source, n_tokens = table["source"].to_numpy(), table["n_tokens"].to_numpy()
        lengths = np.maximum(n_tokens, 0)
        if self.beyond:
            table, n_tokens = self._without_beyond(number, table, is_taken)
        if not choice.shuffled:
            numbers = place.taken_before + np.cumsum(is_taken) - 1
            n_tokens = _with_skipped(n_tokens, numbers < choice.skip)
        columns = {
            "portion": np.full(len(table), number, np.int32),
            "position": place.documents_before + np.arange(len(table)),
            "first_token": np.cumsum(lengths, dtype=np.int64) - lengths,
            "source": place.first_source + source,
            "row": table["row"].to_numpy() + np.where(source == 0, place.rows_before, 0),
            "n_tokens": n_tokens,
        }
        # Documents without a part count under the empty name.
        others = table[PART].filter(pa.array(~is_taken)).to_pylist()
        labels = table.drop_columns(["source", "row", "offset", "n_tokens", "content"])
        columns |= dict(zip(labels.column_names, labels.columns, strict=True))
        taken = pa.table(columns).filter(pa.array(is_taken)).combine_chunks()
        return DocumentBlock(self, taken, Counter(name or "" for name in others))

    def _without_beyond(
        self, number: int, table: pa.Table, is_taken: np.ndarray
    ) -> tuple[pa.Table, np.ndarray]:
        """The documents of a portion and their lengths, those bad that use a token of `beyond`."""
        n_tokens = table["n_tokens"].to_numpy().copy()
        file = open_portion(self.store, self.portions[number])
        ends = np.cumsum(np.maximum(n_tokens, 0), dtype=np.int64)
        tokens = file.tokens(0, int(ends[-1]) if len(ends) else 0)
        problems = table["problem"].to_pylist()
        for place in np.flatnonzero(np.isin(tokens, [*self.beyond])).tolist():
            document = int(np.searchsorted(ends, place, side="right"))
            token = int(tokens[place])
            if is_taken[document]:
                n_tokens[document] = BAD
                name = printable(self.beyond[token])
                problems[document] = f"token {token} ({name}) is none of the model's"
        column = table.column_names.index("problem")
        return table.set_column(column, "problem", pa.array(problems, pa.string())), n_tokens

    def _shuffled_block(self) -> "DocumentBlock":
        """The documents of all portions in random order, which depends on the seed alone."""
        blocks = [self._portion_block(number) for number in range(len(self.portions))]
        table = pa.concat_tables(block.table for block in blocks)
        rng = np.random.default_rng([int(self.corpus.choice.shuffle), SHUFFLE_STREAM])
        table = table.take(pa.array(rng.permutation(len(table)))).combine_chunks()
        # `skip` leaves out the first documents of the shuffled order.
        is_skipped = np.arange(len(table)) < self.corpus.choice.skip
        n_tokens = _with_skipped(table["n_tokens"].to_numpy(), is_skipped)
        column = table.column_names.index("n_tokens")
        table = table.set_column(column, "n_tokens", pa.array(n_tokens))
        others = sum((block.others for block in blocks), Counter())
        return DocumentBlock(self, table, others)

    def _in_blocks(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The blocks of some sequences, each with its first one and the one behind its last."""
        while start < stop:
            number = bisect_right(self.ends, start)
            before = self.ends[number - 1] if number else 0
            stop_here = min(stop, self.ends[number])
            yield number, start - before, stop_here - before
            start = stop_here

    def read(self, start: int, stop: int) -> tuple[np.ndarray, Origin]:
        """Tokens `[sequence length]` of the sequences `start .. stop-1`, and their origin."""
        carried = {carried_name(name): field_column(name) for name in self.corpus.choice.columns}
        names = ("file", "row", "offset", "pile_set_name", *carried, "document")
        origin: Origin = {name: [] for name in names}
        tokens: list[np.ndarray] = []
        for number, first, end in self._in_blocks(start, stop):
            block = self.block(number)
            pieces = block.pieces(first, end)
            begins = np.flatnonzero(np.diff(pieces.sequence, prepend=-1))
            documents = pieces.document[begins]
            labels = block.table.take(documents)
            origin["file"] += [self.corpus.sources[i].name for i in block.source[documents]]
            origin["row"] += block.row[documents].tolist()
            origin["offset"] += pieces.offset[begins].tolist()
            origin["pile_set_name"] += labels[PART].to_pylist()
            for name, column in carried.items():
                origin[name] += [
                    None if value is None else as_text(json.loads(value))
                    for value in labels[column].to_pylist()
                ]
            # The document with most tokens of each sequence, the first of equal ones. The separator
            # behind a document belongs to none.
            ends = np.minimum(pieces.offset + pieces.length, block.n_tokens[pieces.document])
            order = np.lexsort((pieces.offset - ends, pieces.sequence))
            mains = pieces.document[order[begins]]
            origin["document"] += block.position[mains].tolist()
            tokens.append(block.tokens(pieces, self.separator).reshape(end - first, self.length))
        return np.concatenate(tokens), origin

    def bad_rows(self, start: int, stop: int) -> list[str]:
        """The bad rows between the beginning of sequence `start` and that of sequence `stop`.

        The first sequence also answers for bad rows before it, the last for those after it.
        """
        first, end = self._beginning_of(start), self._beginning_of(stop)
        bad_rows: list[str] = []
        for number in range(first[0], min(end[0] + 1, len(self.ends))):
            block = self.block(number)
            bad_documents = np.flatnonzero(block.n_tokens == BAD).tolist()
            in_range = (i for i in bad_documents if first <= (number, i) < end)
            bad_rows += [self.problem_of(block, i) for i in in_range]
        return bad_rows

    def _beginning_of(self, sequence: int) -> tuple[int, int]:
        """The block and the document that a sequence begins in; the ends of all for the first one
        and for one behind the last.
        """
        if sequence == 0 or sequence >= len(self):
            return (len(self.ends) if sequence else 0), 0
        ((number, first, end),) = self._in_blocks(sequence, sequence + 1)
        return number, int(self.block(number).pieces(first, end).document[0])

    def problem_of(self, block: "DocumentBlock", document: int) -> str:
        """A bad document, with its place and its problem."""
        place = self.corpus.sources[block.source[document]].place_of(int(block.row[document]))
        return f"{place} ({printable(block.table['problem'][document].as_py() or '')})"

    def findings(self, sequences: int) -> Findings:
        """What became of the documents, in a run of the first `sequences`."""
        index = self.up_to(sequences) if sequences < len(self) else self
        corpus = self.corpus
        sequences_left = sequences
        fates: dict[str, Counter[str]] = defaultdict(Counter)
        bad_run = BadRun()
        problems: list[str] = []
        for number in range(len(index.ends)):
            block = index.block(number)
            # For each document the position of its fate in `FATES`. Later lines overrule earlier
            # ones: an empty document between two used ones is empty.
            n_tokens = block.n_tokens
            fate = np.full(len(block), FATES.index("not needed"))
            if corpus.packing == "document":
                fate[n_tokens < block.length] = FATES.index("too short")
                fate[block.long_documents[:sequences_left]] = FATES.index("used")
            else:
                used_end = min(sequences_left, block.sequences) * block.length
                fate[block.begins_of(np.arange(len(block))) < used_end] = FATES.index("used")
            fate[n_tokens == 0] = FATES.index("empty")
            fate[n_tokens == BAD] = FATES.index("bad")
            fate[n_tokens == SKIPPED] = FATES.index("skipped")
            sequences_left = max(0, sequences_left - block.sequences)
            # Documents that do not say their part count under the empty name.
            parts = block.table[PART].fill_null("").combine_chunks().dictionary_encode()
            counts = np.zeros((len(parts.dictionary), len(FATES)), np.int64)
            np.add.at(counts, (parts.indices.to_numpy(), fate), 1)
            for name, of_part in zip(parts.dictionary.to_pylist(), counts.tolist(), strict=True):
                fates[name] += Counter(dict(zip(FATES, of_part, strict=True)))
            for name, count in block.others.items():
                fates[name][OTHER] += count
            # In the order of the files, even if the documents are shuffled.
            bad_documents = np.flatnonzero(n_tokens == BAD)
            bad_documents = bad_documents[np.argsort(block.position[bad_documents])]
            bad_run.add(block.position[bad_documents])
            room = NAMED_PROBLEMS - len(problems)
            problems += [index.problem_of(block, i) for i in bad_documents[:room].tolist()]
        carried, carried_of = index.carried()
        return Findings(
            Fates.of_parts(fates), bad_run.longest, tuple(problems), carried, carried_of
        )

    def carried(self) -> tuple[tuple[bool, ...], int]:
        """Whether any document of the portions has each carried field, and how many they are.

        A field may be in later documents alone, or be null everywhere, as JSON says it.
        """
        columns = self.corpus.choice.columns
        has_field, documents = np.zeros(len(columns), bool), 0
        for portion in self.portions if columns else ():
            table = open_portion(self.store, portion).documents()
            documents += len(table)
            has_field |= [table[field_column(c)].null_count < len(table) for c in columns]
        return tuple(has_field.tolist()), documents


class BadRun:
    """The largest number of bad documents one after the other."""

    def __init__(self) -> None:
        self.longest = 0
        self._current = 0
        self._last_position = -1

    def add(self, positions: np.ndarray) -> None:
        """Count bad documents by their positions, in order."""
        for position in positions.tolist():
            follows = position == self._last_position + 1
            self._current = self._current + 1 if follows else 1
            self._last_position = position
            self.longest = max(self.longest, self._current)


class Pieces(NamedTuple):
    """Parts of documents that make some sequences, in order: each of one document and one sequence.

    The separator behind a document counts as its last token.
    """

    sequence: np.ndarray  # counted from the first one that is asked for
    document: np.ndarray  # its number in the block
    offset: np.ndarray  # the token of the document that the piece begins with
    length: np.ndarray


class DocumentBlock:
    """Documents that a scan takes, in the order in which they become sequences.

    With packing by document a sequence is the first tokens of one document. Joined documents, each
    followed by a separator, make one long text, which is cut every `length` tokens; what is left at
    its end is not measured. So the lengths of the documents alone say where a sequence lies.
    """

    def __init__(self, index: SequenceIndex, table: pa.Table, others: Counter[str]) -> None:
        """`table` has a row for each document: the arrays below, and what else is kept of it."""
        self.store = index.store
        self.portions = index.portions
        self.is_joined = index.corpus.packing == "concat"
        self.length = index.length  # text tokens of a sequence
        self.table = table
        self.others = others  # by part: how many documents of the portions `where` does not select
        # The number of its portion; its own among all documents of the corpus, in the order of the
        # files; where its tokens begin in its portion.
        self.portion = table["portion"].to_numpy()
        self.position = table["position"].to_numpy()
        self.first_token = table["first_token"].to_numpy()
        # The number of its source in the corpus, and its row there.
        self.source = table["source"].to_numpy()
        self.row = table["row"].to_numpy()
        # `BAD` if the row cannot be read, `SKIPPED` if it is left out, 0 if the text is empty.
        self.n_tokens = table["n_tokens"].to_numpy()

    def __len__(self) -> int:
        return len(self.row)

    @cached_property
    def long_documents(self) -> np.ndarray:
        """The documents that are long enough for a sequence."""
        return np.flatnonzero(self.n_tokens >= self.length)

    @cached_property
    def joined_ends(self) -> np.ndarray:
        """Where documents end in the joined text; each with tokens is followed by one separator."""
        return np.cumsum(np.where(self.n_tokens > 0, self.n_tokens.astype(np.int64) + 1, 0))

    @property
    def sequences(self) -> int:
        """How many sequences the block has."""
        if not self.is_joined:
            return len(self.long_documents)
        return int(self.joined_ends[-1]) // self.length if len(self) else 0

    @property
    def unmeasured(self) -> int:
        """Tokens and separators at the end of joined documents that make no sequence."""
        if not self.is_joined or not len(self):
            return 0
        return int(self.joined_ends[-1]) % self.length

    def begins_of(self, documents: np.ndarray) -> np.ndarray:
        """Where documents with tokens begin in the joined text."""
        return self.joined_ends[documents] - self.n_tokens[documents] - 1

    def pieces(self, first: int, end: int) -> Pieces:
        """Where the sequences `first .. end-1` lie."""
        if not self.is_joined:
            documents = self.long_documents[first:end]
            numbers = np.arange(len(documents))
            lengths = np.full(len(documents), self.length)
            return Pieces(numbers, documents, np.zeros_like(numbers), lengths)
        start, stop = first * self.length, end * self.length
        # side="right" finds the first document that ends behind a token, which is the one that
        # holds it, never one without tokens.
        ends = np.searchsorted(self.joined_ends, [start, stop - 1], side="right")
        documents = np.arange(ends[0], ends[1] + 1)
        documents = documents[self.n_tokens[documents] > 0]
        begins = self.begins_of(documents)
        # Cut where a document or a sequence begins.
        starts = np.arange(start, stop, self.length)
        cuts = np.union1d(np.maximum(begins, start), starts)  # sorted, each once
        of_cut = np.searchsorted(begins, cuts, side="right") - 1
        return Pieces(
            sequence=(cuts - start) // self.length,
            document=documents[of_cut],
            offset=cuts - begins[of_cut],
            length=np.diff(cuts, append=stop),
        )

    def tokens(self, pieces: Pieces, separator: int | None) -> np.ndarray:
        """The tokens of some pieces, one after the other."""
        stops = pieces.offset + pieces.length
        has_separator = stops > self.n_tokens[pieces.document]
        begins = self.first_token[pieces.document] + pieces.offset
        ends = begins + pieces.length - has_separator
        tokens = self._tokens_between(pieces.document, begins, ends)
        if not has_separator.any():
            return tokens
        assert separator is not None
        # Numbers of `insert` count in the array before it, so each separator lands behind its
        # document.
        return np.insert(tokens, np.cumsum(ends - begins)[has_separator], separator)

    def token_counts(self, d_vocab: int) -> np.ndarray:
        """How often the documents of the block hold each token: `[token]`."""
        documents = np.flatnonzero(self.n_tokens > 0)
        begins = self.first_token[documents]
        tokens = self._tokens_between(documents, begins, begins + self.n_tokens[documents])
        return np.bincount(tokens, minlength=d_vocab)

    def _tokens_between(
        self, documents: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> np.ndarray:
        """Ranges of tokens in the portions of some documents, one after the other."""
        portions = self.portion[documents]
        stops = np.cumsum(ends - begins)
        tokens = np.empty(stops[-1] if len(stops) else 0, np.int32)
        # Tokens that follow one another are read at once.
        is_first = np.ones(len(documents), bool)
        is_first[1:] = (begins[1:] != ends[:-1]) | (portions[1:] != portions[:-1])
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(documents)) - 1
        # In the order of the files, so that each is opened, and each of its parts decoded, once.
        order = np.lexsort((begins[firsts], portions[firsts]))
        for first, last in zip(firsts[order].tolist(), lasts[order].tolist(), strict=True):
            file = open_portion(self.store, self.portions[portions[first]])
            begin, end, stop = int(begins[first]), int(ends[last]), int(stops[last])
            tokens[stop - (end - begin) : stop] = file.tokens(begin, end)
        return tokens


def _with_skipped(n_tokens: np.ndarray, is_skipped: np.ndarray) -> np.ndarray:
    """Lengths of documents, those of skipped ones replaced. Bad documents stay bad."""
    return np.where(is_skipped & (n_tokens != BAD), SKIPPED, n_tokens).astype(np.int32)
