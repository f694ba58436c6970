"""Corpus families: text in files, or in a data set on the Hub."""

import glob
import os
from pathlib import Path
from typing import Literal

from headcount.schemas.errors import CorpusError, ScanError, printable
from headcount.schemas.files.input_files import check_real_path, check_regular
from headcount.schemas.object_stores import matching
from headcount.schemas.places import StorePath, place
from headcount.schemas.reasons import reason
from headcount.schemas.values import Count, Index, TokenId
from headcount.workers.inputs.corpus.corpus import Corpus, CountedTokens, ReplacedToken
from headcount.workers.inputs.corpus.documents import COMPRESSED, Source, open_hub
from headcount.workers.inputs.corpus.text_files import BUNDLED_LICENSE, kind_of, located
from headcount.workers.inputs.input_registry import input_family

Packing = Literal["document", "concat"]

PILE = {".jsonl": "jsonl", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
CSV = {".csv": "csv"}
TEXT = {"": "text"}
ANY_TEXT = PILE | CSV | TEXT
"""Kind of a file by its ending, without one of `COMPRESSED`. The empty ending fits every file, so
it stands last.
"""


@input_family
def pile(
    *,
    files: str | list[str] | None = None,
    dataset: str | None = None,
    split: str = "train",
    packing: Packing = "document",
) -> Corpus:
    """Documents with fields, as the Pile has them (`text`, `meta.pile_set_name`): .jsonl, .json,
    .parquet or .arrow files, or a Hub data set.

    * `dataset`: a data set of the Hub, for example `NeelNanda/pile-10k`, instead of `files`.
    * `split`: the part of the data set that is read.
    """
    if (files is None) == (dataset is None):
        raise ScanError(
            "input: the family pile needs either files (paths or globs) or dataset (a Hub name)"
        )
    if dataset is not None:
        # The library datasets names a data set by the last part of its path, which "." has not.
        if not Path(dataset).name:
            raise ScanError(
                "input.dataset: expected a data set of the Hub or a directory by its name, got "
                f"{dataset!r}; write for instance '../{Path(dataset).resolve().name}'"
            )
        parts = open_hub(dataset, split).num_shards
        return Corpus(
            tuple(Source("hub", dataset, 0, split, part, parts) for part in range(parts)), packing
        )
    if split != "train":
        raise ScanError("input.split: expected with a dataset only, got files; leave it out")
    return Corpus(_sources(files or [], PILE), packing)


@input_family
def csv_texts(*, files: str | list[str], packing: Packing = "document") -> Corpus:
    """Rows of .csv files with a column text; a column dataset, if there is one, becomes
    `pile_set_name`.

    Made for the 300 texts of Ran-Milo et al. 2026 (n_ctx = 40, bos = false).
    """
    return Corpus(_sources(files, CSV), packing)


@input_family
def shuffled_text(
    *, files: str | list[str], kept: Count | None = None, packing: Packing = "document"
) -> Corpus:
    """Text whose tokens are permuted within each sequence, by the seed and the sequence (after
    Mahmood's reproduction of Ran-Milo et al. 2026).

    * `kept`: so many of the permuted tokens are kept, and repeated to the end. With 1, it is one
      random token of its text, over and over.
    """
    return Corpus(_sources(files, ANY_TEXT), packing, tokens_shuffled=True, kept=kept)


@input_family
def repeated_text(
    *,
    files: str | list[str],
    chunk: Count,
    repeat_bos: bool = False,
    after_space: bool = False,
    packing: Packing = "document",
) -> Corpus:
    """The first `chunk` tokens of a text, repeated to the end of the sequence (Scheuer,
    attention-sink-profiler).

    With packing by document, each text gives one chunk.

    * `chunk`: tokens, the beginning-of-sequence token not counted.
    * `repeat_bos`: whether that token stands before every copy.
    * `after_space`: whether the text is read with a space before it.
    """
    before = " " if after_space else ""
    return Corpus(
        _sources(files, ANY_TEXT), packing, chunk=chunk, repeat_bos=repeat_bos, before=before
    )


@input_family
def text_with_token(
    *,
    files: str | list[str],
    token: TokenId | None = None,
    position: Index = 0,
    packing: Packing = "document",
) -> Corpus:
    """Text in which one position of every sequence has another token: `token`, or a random one for
    each sequence (after Gu et al. 2024).

    * `token`: a token id, which may be a special one; a random ordinary one if it is left out.
    * `position`: counted from 0, the beginning-of-sequence token included, which stays.
    """
    return Corpus(_sources(files, ANY_TEXT), packing, replaced=ReplacedToken(position, token))


@input_family(stream="unigram_random", is_endless=True)
def unigram_text(*, files: str | list[str], low: TokenId = 0, high: Count | None = None) -> Corpus:
    """Independent tokens, each as frequent as in a corpus.

    p(id) ∝ occurrences of id in all documents that `where` selects (after Mahmood's reproduction of
    Ran-Milo et al. 2026). There are as many sequences as the scan asks for.
    """
    # One token makes a document count as used.
    return Corpus(_sources(files, ANY_TEXT), "document", chunk=1, counted=CountedTokens(low, high))


@input_family
def text(*, files: str | list[str], packing: Packing = "document") -> Corpus:
    """Plain UTF-8 text files, each one document.

    The white space of `bundled:LICENSE` is joined to single spaces: to GPT-2 it has 2,066 tokens.
    With `packing = "concat"`, sequence i of a long text is its window number i, without gaps.
    """
    return Corpus(_sources(files, TEXT), packing)


def _sources(files: str | list[str], kinds: dict[str, str]) -> tuple[Source, ...]:
    """The files of paths and globs, each once, in the order of their names."""
    patterns = [files] if isinstance(files, str) else files
    if not patterns:
        raise ScanError("input.files: expected at least one path or glob, got []")
    size_of: dict[str, int] = {}
    path_of_real_file: dict[str, str] = {}
    flowing_path = ""
    for pattern in patterns:
        path = place(located(pattern))
        if isinstance(path, StorePath):
            try:
                objects = matching(path)
            except OSError as error:
                raise CorpusError(
                    f"input.files: {path} cannot be listed ({reason(error)})"
                ) from None
            if not objects:
                raise CorpusError(
                    f"input.files: no object matches {str(path)!r}; the objects in a directory are "
                    f"{str(path / '*')!r}"
                )
            size_of |= {str(key): size for key, size in objects}
            continue
        for file in _matching_files(str(path), pattern):
            # Two patterns, or two links, may lead to one file. The path that comes first counts.
            real_path = os.path.realpath(file)
            check_real_path(file, real_path)
            first_path = path_of_real_file.setdefault(real_path, file)
            size_of[first_path] = os.path.getsize(first_path)
            if pattern == BUNDLED_LICENSE:
                flowing_path = first_path
    # Names count before directories: the order is the same wherever the files lie.
    in_order = sorted(size_of, key=lambda path: (Path(path).name, path))
    sources: list[Source] = []
    for path in in_order:
        kind = "flowing text" if path == flowing_path else kind_of(path, kinds)
        if kind is None:
            raise CorpusError(
                f"{printable(path)}: expected a file that ends in {', '.join(kinds)}; those of "
                f"text may also be packed ({', '.join(COMPRESSED)})"
            )
        sources.append(Source(kind, path, size_of[path]))
    return tuple(sources)


def _matching_files(path: str, pattern: str) -> list[str]:
    """The files of a local path or glob; `pattern` is how the scan names it."""
    if os.path.isdir(path):
        raise CorpusError(
            f"input.files: {pattern!r} is a directory; expected files, for instance "
            f"{pattern.rstrip('/')}/*"
        )
    # A file comes before a glob, because its name may hold signs such as [ or *.
    if os.path.lexists(path):
        try:
            check_regular(path, os.stat(path).st_mode)
        except OSError as error:
            target = f", a link to {os.readlink(path)}" if os.path.islink(path) else ""
            raise CorpusError(
                f"input.files: {printable(path + target)}: cannot be read ({reason(error)})"
            ) from None
        return [path]
    files = [match for match in glob.glob(path, recursive=True) if os.path.isfile(match)]
    if not files:
        raise CorpusError(f"input.files: no file matches {pattern!r} (in {Path.cwd()})")
    return files
