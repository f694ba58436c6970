"""What the files of two public models say, where they are at hand."""

import os
from pathlib import Path

import pytest

from headcount.workers.model.info.description import describe
from headcount.workers.model.info.model_info import ModelInfo
from tests import ROOT

MODELS = Path(os.environ.get("HEADCOUNT_REAL_MODELS", ROOT.parent / "real"))
"""Directory with SmolLM2-135M-Instruct and gemma-3-270m, and their GGUF files."""


def described(pattern: str) -> ModelInfo:
    """The model whose name fits a pattern."""
    paths = sorted(MODELS.glob(pattern))
    if not paths:
        pytest.skip(f"{MODELS} has no {pattern}; HEADCOUNT_REAL_MODELS names another directory")
    return describe(paths[0])


@pytest.mark.long
@pytest.mark.parametrize(("pattern", "is_first", "evidence"), [
    ("SmolLM2-135M-Instruct", False,
     "its tokenizer puts none before a text, and it does not end texts"),
    ("SmolLM2-135M-Instruct*.gguf", False,
     "its tokenizer puts none before a text, and it does not end texts"),
    ("gemma-3-270m", True, "its tokenizer puts it before every text"),
    ("gemma-3-270m*.gguf", True, "its tokenizer puts it before every text"),
])  # fmt: skip
def test_their_sequences_begin_as_in_training(pattern: str, is_first: bool, evidence: str) -> None:
    info = described(pattern)
    assert (info.begins_with_bos("auto"), info.bos.evidence) == (is_first, evidence)


@pytest.mark.long
def test_smollm2_s_file_has_lost_its_digits() -> None:
    formats, digits = described("SmolLM2-135M-Instruct*.gguf").notes
    assert formats == (
        "the weights are those of a GGUF file, Q4_1 (tensors: 210 Q4_1, 61 F32, 1 Q8_0)"
    )
    assert digits.startswith("its tokenizer (smollm) has lost the step that splits off digits: ")
