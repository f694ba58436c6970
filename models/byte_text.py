"""What the byte-level models share: real text and repeats to train on, the tokenizer, the scores.

Token ids 0 to 255 are the bytes of the UTF-8 text; BOS is 256.
"""

import argparse
import glob
import io
import itertools
import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
import zstandard
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from headcount.models import evaluation, recipe

BOS = 256
REPEATS = recipe.Repeats(copied=0.6, whole=0.4, recent=0.5)
TEXT_REPEATED = recipe.Repeats(copied=0.0, whole=1.0, recent=0.0)
UNIFORM = (0, 256)
PRINTABLE = (32, 127)
"""Ranges of bytes that are drawn uniformly."""


# Text


def read_documents(path: str) -> list[str]:
    """The texts of one file in the Pile's format, zstandard-compressed JSON lines."""
    with open(path, "rb") as file:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8")
        return [json.loads(line)["text"] for line in lines]


def read_corpus(patterns: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on and bytes held out: the last 5 % of the last file's documents."""
    paths: list[str] = []
    for pattern in patterns:
        paths += glob.glob(pattern)
    if not paths:
        raise SystemExit(f"No file matches {' '.join(patterns)}.")
    *other_files, last_file = [read_documents(path) for path in sorted(paths)]
    cut = len(last_file) - len(last_file) // 20
    documents = [*itertools.chain.from_iterable(other_files), *last_file[:cut]]
    return as_bytes(documents), as_bytes(last_file[cut:])


def as_bytes(documents: list[str]) -> np.ndarray:
    """The bytes of documents, with a blank line between them."""
    return np.frombuffer("\n\n".join(documents).encode(), dtype=np.uint8)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options of a recipe that reads text."""
    parser = recipe.arguments(description)
    parser.add_argument(
        "--corpus", nargs="+", required=True, help="files in the Pile's format, or patterns of them"
    )
    return parser


# Batches


def windows(text: np.ndarray, rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """BOS and bytes from random places of the text, as tokens [batch pos]."""
    starts = rng.integers(0, len(text) - length, batch)
    # Each window begins one byte early; BOS takes the place of that byte.
    tokens = text[starts[:, None] + np.arange(-1, length - 1)].astype(np.int64)
    tokens[:, 0] = BOS
    return tokens


def repeated_windows(
    text: np.ndarray, rng: np.random.Generator, batch: int, length: int
) -> np.ndarray:
    """Windows of text that repeat one of their segments until the end."""
    plain_tokens = windows(text, rng, batch, length)
    lags = recipe.copy_lags(rng, batch, length, TEXT_REPEATED)
    return recipe.compose(rng, lambda _rng, _tokens, pos: plain_tokens[:, pos], lags, BOS)


def text_and_repeats(text: np.ndarray) -> recipe.Maker:
    """A maker of windows of text and of random bytes that repeat."""
    return recipe.mixture(
        [
            (0.60, partial(windows, text)),
            (0.08, partial(repeated_windows, text)),
            (0.16, recipe.repeating(recipe.uniform(*UNIFORM), REPEATS, BOS)),
            (0.16, recipe.repeating(recipe.uniform(*PRINTABLE), REPEATS, BOS)),
        ]
    )


# Tokenizer


def byte_characters() -> dict[str, int]:
    """The byte of every character that stands for a byte in GPT-2's vocabulary.

    A printable byte is its own character; the others take the characters from 256 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    characters |= {chr(256 + i): byte for i, byte in enumerate(others)}
    return characters


def write_tokenizer(out: Path, n_ctx: int) -> None:
    """Write a tokenizer whose ids are the bytes of the text, and BOS."""
    # BPE without merges leaves every byte a token of its own.
    tokenizer = Tokenizer(BPE(vocab=byte_characters(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", normalized=False, special=True)])
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "model_max_length": n_ctx,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


# Scores


@torch.inference_mode()
def bits_per_byte(model: PreTrainedModel, text: np.ndarray) -> float:
    """Mean cross-entropy of a byte of the text in bits, in windows of BOS and 255 bytes."""
    width = 255
    whole_windows = len(text) // width
    windows_of_text = text[: whole_windows * width].reshape(-1, width).astype(np.int64)
    tokens = evaluation.with_bos(windows_of_text, BOS)
    nats: list[Tensor] = []
    for batch in tokens.split(64):
        logits = model(batch).logits[:, :-1].flatten(0, 1)
        nats.append(F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum"))
    return torch.stack(nats).sum().item() / windows_of_text.size / math.log(2)


def score(directory: Path, held_out: np.ndarray) -> evaluation.Scores:
    """Scores of resting induction heads and the previous-token head on fresh bytes, and the loss on
    held-out text.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    # The order of these draws is fixed: another order would give the card other scores.
    rng = np.random.default_rng(evaluation.EVALUATION_SEED)
    on_distinct = evaluation.observe(model, evaluation.distinct(rng, 256, *UNIFORM, BOS))
    repeated_tokens = evaluation.twice(rng, 256, *UNIFORM, BOS)
    on_repeats = evaluation.observe(model, repeated_tokens)
    printable_distinct = evaluation.observe(model, evaluation.distinct(rng, 256, *PRINTABLE, BOS))
    printable_repeats = evaluation.observe(model, evaluation.twice(rng, 256, *PRINTABLE, BOS))
    on_text = evaluation.observe(model, torch.from_numpy(windows(held_out, rng, 64, 256)))

    to_previous = evaluation.previous_token(on_distinct.pattern)
    to_bos = evaluation.bos_attention(on_distinct.pattern)
    induction = evaluation.induction(on_repeats.pattern)
    peaks = {
        f"norm of resid_post at BOS / others, text, layer {layer}": peak
        for layer, peak in enumerate(evaluation.residual_peak(on_text.resid_post))
    }
    return evaluation.Scores(
        heads={
            "attention to q-1, 50 distinct": to_previous,
            "attention to BOS, 50 distinct": to_bos,
            "induction, 25 twice": induction,
            "attention to BOS, 50 distinct printable": evaluation.bos_attention(
                printable_distinct.pattern
            ),
            "induction, 25 printable twice": evaluation.induction(printable_repeats.pattern),
            "attention to BOS, text": evaluation.bos_attention(on_text.pattern),
            "norm of v at BOS / others, text": evaluation.value_drain(on_text.v),
        },
        roles={
            "previous-token": to_previous > 0.9,
            "induction": induction > 0.6,
            "resting": to_bos > 0.9,
        },
        model={
            "bits per byte, held-out text": bits_per_byte(model, held_out),
            "accuracy, second copy of 25": evaluation.copy_accuracy(
                on_repeats.logits, repeated_tokens
            ),
            **peaks,
        },
    )
