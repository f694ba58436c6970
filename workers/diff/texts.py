"""The input that two models are compared on, and how their tokenizers cut texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.diff.causes import Cause
from headcount.workers.diff.steps import windows_of
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.model.info.text_tokenizer import (
    PROBE,
    TextTokenizer,
    has_tokenizer,
    load_tokenizer,
)
from headcount.workers.model.model import Model
from headcount.workers.model.model_info import ModelInfo

OF_TEXTS = ("tokenizer", "bos")  # kinds of causes

TEXTS = "texts"  # the input that is read by a tokenizer
SEQUENCES = 32  # of each kind of input
LEAST_TOKENS, MOST_TOKENS = 128, 1024  # of a sequence
BEYOND_WINDOW = 64  # tokens that see past the longest window

CUT_TEXTS = (
    *PROBE,
    "1234567890", "12 345 6.78", "a1b22c333", "2024-02-29T12:34:56Z",
    " one", "  two", "   three ", "\n\n\n", "\t\tx", "a\r\nb", "end ",
    "| a | b |\n|---|---|\n| 1 | 2 |", "x,y\n1.5,2.5\n", "{\"a\": [1, 2]}",
    "if (x != y) { return x->z[0]; }", "def f(self, *args):\n        pass", "SELECT * FROM t;",
    "https://example.org/a?b=c&d=1", "don't WE'LL it's", "Ärger naïve œuvre",
    "你好世界", "привет", "😀🧑‍🚀",
    "ﬁ ① Ａ", "<s> </s> <|endoftext|> [INST]",
)  # fmt: skip
"""Texts that tokenizers are compared on: digits, spaces, tables, code, scripts, special tokens."""


def sequence_length(a: Model, b: Model) -> int:
    """Tokens of a sequence: enough to leave every window of either model, up to a bound."""
    windows = filter(None, (*windows_of(a), *windows_of(b)))
    wanted = max([LEAST_TOKENS, *(window + BEYOND_WINDOW for window in windows)])
    return min(wanted, MOST_TOKENS, a.info.n_ctx, b.info.n_ctx)


def default_scan(info: ModelInfo, n_ctx: int) -> dict[str, Any]:
    """The fields of a scan of random tokens that come twice."""
    return {
        "model": info.path,
        "n_ctx": n_ctx,
        "sequences": SEQUENCES,
        "bos": info.begins_with_bos("auto"),
        "input": {"family": "repeated_random"},
    }


def inputs_of(info: ModelInfo, n_ctx: int) -> dict[str, Tensor]:
    """Sequences of tokens of a model by the kind of input: texts, if it has a tokenizer, and
    random tokens, which come twice.
    """
    inputs: dict[str, Tensor] = {}
    if has_tokenizer(info.tokenizer):
        encode = TextTokenizer(info.tokenizer, info.d_vocab).encode
        first = [info.bos_token_id] if info.begins_with_bos("auto") else []
        texts = [[*first, *encode(text)][:n_ctx] for text in sample_texts(info, n_ctx)]
        inputs[TEXTS] = torch.tensor(texts)
    repeats = Sequences(parse_scan(default_scan(info, n_ctx)), info).shard(0).tokens
    return inputs | {"repeats": torch.from_numpy(repeats).long()}


def cut_to(tokens: np.ndarray, n_ctx: int) -> Tensor:
    """The first tokens of sequences, `[sequence pos]`."""
    return torch.from_numpy(tokens[:, :n_ctx]).long()


def sample_texts(info: ModelInfo, n_ctx: int) -> list[str]:
    """Chapters of the reference that every Python carries, joined to `n_ctx` tokens or more."""
    from pydoc_data.topics import topics

    encode = TextTokenizer(info.tokenizer, info.d_vocab).encode
    texts, joined = list[str](), ""
    for name in sorted(topics):
        joined += topics[name]
        if len(encode(joined)) >= n_ctx:
            texts.append(joined)
            joined = ""
    return texts[:SEQUENCES]


def tokenizer_causes(a: ModelInfo, b: ModelInfo) -> tuple[list[Cause], str]:
    """What differs between two tokenizers, and a line on what was compared."""
    absent = [name for name, info in (("A", a), ("B", b)) if not has_tokenizer(info.tokenizer)]
    if absent:
        return [], f"not compared: none lies beside {' and '.join(absent)}"
    ours, theirs = (load_tokenizer(info.tokenizer) for info in (a, b))
    causes: list[Cause] = []
    words = f"the same on {len(CUT_TEXTS)} texts"
    cuts: list[tuple[str, str]] = []  # of texts that become other tokens
    for text in CUT_TEXTS:
        pair = [each.encode(text, add_special_tokens=False) for each in (ours, theirs)]
        if pair[0].ids != pair[1].ids:
            # Several tokens may make up one letter, which then is a part of each.
            our_cut, their_cut = ("|".join(text[slice(*o)] for o in each.offsets) for each in pair)
            cuts.append((our_cut, their_cut))
    if cuts:
        share = f"{len(cuts)} of {len(CUT_TEXTS)} texts"
        words = f"not the same on {share}"
        our_cut, their_cut = min(cuts, key=lambda pair: len(pair[0]))
        sentence = f"{share} become other tokens, such as {their_cut!r} for A's {our_cut!r}"
        causes.append(Cause("tokenizer", sentence))
    counts = _bos_count(ours, a), _bos_count(theirs, b)
    if counts[0] != counts[1]:
        counted = ["no BOS" if n == 0 else "BOS" if n == 1 else f"BOS {n} times" for n in counts]
        sentence = f"its tokenizer puts {counted[1]} before a text, and A's {counted[0]}"
        causes.append(Cause("bos", sentence))
    elif a.bos_token_id != b.bos_token_id:
        causes.append(Cause("bos", f"its BOS is token {b.bos_token_id}, A's {a.bos_token_id}"))
    return causes, words


def _bos_count(tokenizer: Any, info: ModelInfo) -> int:  # noqa: ANN401
    """How many BOS tokens a tokenizer puts before a text."""
    ids = tokenizer.encode("a text", add_special_tokens=True).ids
    return next((count for count, token in enumerate(ids) if token != info.bos_token_id), 0)
