"""The subcommands `corpus prepare`, `corpus list`, `corpus show` and `corpus remove`."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headcount.jobs.commands.options import ClusterAddress, Overrides, VerifyCorpus, Yes
from headcount.jobs.console import check_can_ask, duration, in_bytes, print_table, say, tell
from headcount.schemas.errors import CorpusError, ScanError, counted, printable

Corpora = Annotated[
    str,
    typer.Argument(
        metavar="CORPORA",
        help="A directory of token stores: a path, or an address in a store of objects.",
    ),
]
CorporaOption = Annotated[
    str,
    typer.Option("--corpora", metavar="CORPORA", help="The directory of token stores."),
]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The store's key; its beginning will do.")]

DEFAULT = "runs/corpora"  # where token stores lie unless a scan says something else


commands = typer.Typer(
    name="corpus",
    help="The tokens of corpora, which scans read: prepare, list, show and remove them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@commands.command()
def prepare(
    scan_file: Annotated[Path, typer.Argument(metavar="SCAN", help="A scan file (TOML).")],
    overrides: Overrides = None,
    replicas: Annotated[
        int,
        typer.Option(
            min=0, max=1, help="0 prepares in this process. 1 prepares in Ray tasks, one a core."
        ),
    ] = 1,
    cores: Annotated[
        int, typer.Option(min=0, help="CPU cores of this machine that Ray takes. 0 means all.")
    ] = 0,
    address: ClusterAddress = None,
    verify_corpus: VerifyCorpus = False,
) -> None:
    """Prepare the tokens that a scan reads, so that it can begin to measure at once.

    Nothing is measured, and no GPU is needed. If it is stopped or killed, the same command goes on.
    """
    from headcount.jobs.plan.scan_files import scans_of

    # Checkpoints of one model read the same tokens.
    scan = scans_of(scan_file, overrides or ())[0].scan
    from headcount.jobs.corpus.preparation import (
        Preparation,
        amounts,
        corpora_of,
        special_tokens_line,
    )
    from headcount.jobs.resources import Resources
    from headcount.workers.inputs.sequences import Sequences
    from headcount.workers.model.info.description import described
    from headcount.workers.process import prepare_process

    prepare_process()
    resources = Resources(replicas, cores, "cpu", address)
    info = described(scan)
    sequences = Sequences(scan.for_model(info), info)
    if sequences.corpus is None:
        raise ScanError(
            f"input.family: {sequences.family.name} reads no corpus, so there is nothing to "
            "prepare; headcount scan measures it at once"
        )
    console = Console(highlight=False, stderr=True)
    began = time.monotonic()
    preparation = Preparation(resources, console, verify_corpus)
    index = preparation.prepared(sequences, corpora_of(scan))
    sequences.use_index(index)
    # As a scan would refuse it.
    sequences.check_index()
    parts = [counted(len(sequences), "sequence"), *amounts(index)]
    if index.unmeasured:
        parts.append(f"{counted(index.unmeasured, 'token')} at portions' ends not measured")
    say(console, f"{', '.join(parts)}, in {duration(time.monotonic() - began)}")
    if line := special_tokens_line(index):
        say(console, line)
    # A script reads the place from stdout; people read the line on stderr.
    print(index.store.folder)


@commands.command("list")
def list_stores(corpora: Corpora = DEFAULT) -> None:
    """List the token stores in a directory: which tokenizer reads what, and how much is there."""
    from headcount.schemas.places import absolute
    from headcount.workers.inputs.store.stored_corpora import stored_corpora

    # A directory of runs has them in a directory of its own.
    all_stored = stored_corpora(absolute(corpora)) or stored_corpora(absolute(corpora) / "corpora")
    if not all_stored:
        raise CorpusError(
            f"{absolute(corpora)}: no token store here; expected the directory `corpora` of a scan "
            "(beside its runs, if the scan names no other), as headcount corpus prepare fills it"
        )
    rows: list[tuple[str, ...]] = [
        ("corpus", "tokenizer", "text", "documents", "tokens", "bad", "size", "changed")
    ]
    for stored in all_stored:
        # A store whose own record cannot be read still takes space, so it is listed.
        tokenizer = text = "?"
        if stored.store is not None:
            tokenizer = f"{stored.store.tokenizer[:8]}, {stored.store.library}"
            reading = stored.store.reading
            text = reading.text_field
            text += f" behind {reading.before!r}" if reading.before else ""
            text += f", with {', '.join(reading.fields)}" if reading.fields else ""
        counts = [f"{count:,}" for count in (stored.documents, stored.tokens, stored.bad)]
        changed = "" if stored.changed is None else f"{stored.changed:%Y-%m-%d %H:%M}"
        size = in_bytes(stored.bytes)
        rows.append((stored.key, tokenizer, printable(text), *counts, size, changed))
    print_table(rows)
    for problem in filter(None, (stored.problem for stored in all_stored)):
        tell(problem)


@commands.command()
def show(key: Key, corpora: CorporaOption = DEFAULT) -> None:
    """Print what a token store holds of each file, and the bad rows that were found."""
    from headcount.schemas.places import absolute
    from headcount.workers.inputs.store.stored_corpora import store_folder, stored_files

    files = stored_files(store_folder(absolute(corpora), key))
    rows: list[tuple[str, ...]] = [
        ("file", "size", "documents", "tokens", "bad", "empty", "prepared")
    ]
    for file in files:
        size = in_bytes(file.bytes) if file.bytes else "?"
        counts = [f"{n:,}" for n in (file.documents, file.tokens, file.bad, file.empty)]
        rows.append((printable(file.name), size, *counts, "whole" if file.whole else "in part"))
    print_table(rows)
    for file in files:
        for problem in file.problems:
            print(problem)


@commands.command()
def remove(
    key: Key,
    corpora: CorporaOption = DEFAULT,
    yes: Yes = False,
) -> None:
    """Delete a token store. Scans that read it prepare their tokens again."""
    from headcount.schemas.places import absolute
    from headcount.workers.inputs.store.stored_corpora import (
        remove_corpus,
        store_folder,
        stored_corpus,
    )

    folder = store_folder(absolute(corpora), key)
    check_can_ask("headcount corpus remove", [key, "--corpora", corpora], yes)
    if not yes:
        stored = stored_corpus(folder)
        tokens = counted(stored.tokens, "token")
        if not typer.confirm(f"Delete {folder} ({tokens}, {in_bytes(stored.bytes)})?", err=True):
            return
    remove_corpus(folder)
    tell(f"deleted {folder}")
