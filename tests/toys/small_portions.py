"""Small portions of corpora, so that a small corpus has many."""

import pytest

from headcount.jobs.corpus import preparation as jobs_preparation
from headcount.workers.inputs.store import extents, preparation, token_store

SIZES = {
    "letters": ("PORTION_LETTERS", (preparation, jobs_preparation)),
    "documents": ("PORTION_DOCUMENTS", (preparation,)),
    "letters_at_once": ("BATCH_LETTERS", (preparation,)),
    "file_bytes": ("PORTION_BYTES", (extents,)),
    "files": ("FILES_IN_EXTENT", (extents,)),
    "group_tokens": ("TOKENS_PER_GROUP", (token_store,)),
}
"""What can be small: the constant, and the modules that read it."""


def cut_portions(patch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Let corpora be cut into portions of these sizes (`SIZES`)."""
    for name, size in sizes.items():
        constant, modules = SIZES[name]
        for module in modules:
            patch.setattr(module, constant, size)
