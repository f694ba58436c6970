"""The tokenizer in a GGUF file, as transformers makes it, and what is lost on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headcount.workers.model.info.gguf_file import gguf_alone, read_gguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROUND_TRIPS = {
    "digits": "On 2024-02-29 it was 1,024.50, then 007 and 3.14159.",
    "spaces": "two  spaces,   three\n\n\ta tab  \r\n    four",
    "tables": "| a | bc |\n|---|---:|\n| 1 |   2 |",
    "code": "def f(x):\n    return x**2 != 0  # why\n",
    "unicode": "Straße, naïve e\u0301, 東京 “quoted” — 👩‍👩‍👧",
}
"""Texts that come back from their tokens as they were, if a tokenizer is whole."""

NUMBER = "1234567890"

DIGIT_BY_DIGIT = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
"""Names in GGUF files of ways to split a text that have a step which splits numbers into digits."""

AS_GPT2 = ("default", "gpt-2", "gpt2", "jina-de", "jina-es", "jina-v2-de", "jina-v2-es", "olmo")
"""Names of the way of GPT-2, in which transformers splits whatever it does not know."""


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a GGUF file."""
    from transformers import PreTrainedTokenizerFast

    read_gguf(path)
    with gguf_alone(path, "its tokenizer") as words:
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(**words)
    return cast("Tokenizer", tokenizer.backend_tokenizer)


def losses(path: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """What the tokenizer of a GGUF file has lost, as far as a few texts show it."""
    fields = read_gguf(path).fields
    # SentencePiece's vocabularies are not split before they are applied.
    name = str(fields.get("tokenizer.ggml.pre", "default"))
    if fields.get("tokenizer.ggml.model") != "gpt2":
        name = "default"
    advice = "set tokenizer to the directory or Hub id of the original"
    if name in DIGIT_BY_DIGIT:
        whole = _with_digits(tokenizer)
        for text in (NUMBER, *ROUND_TRIPS.values()):
            tokens, expected = (_ids(each, text) for each in (tokenizer, whole))
            if tokens != expected:
                yield (
                    f"its tokenizer ({name}) has lost the step that splits off digits: {text!r} is "
                    f"{len(tokens)} tokens, expected {len(expected)}; {advice}"
                )
                break
    elif name not in (*AS_GPT2, *_known_splits()):
        yield (
            f"its tokenizer splits texts in a way ({name}) that transformers does not know, and so "
            f"as GPT-2's does; {advice}"
        )
    for what, text in ROUND_TRIPS.items():
        back = tokenizer.decode(_ids(tokenizer, text), skip_special_tokens=False)
        if back != text:
            yield f"its tokenizer loses {what}: {text!r} comes back as {back!r}; {advice}"


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def _with_digits(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer that splits off every digit, then as GPT-2's."""
    from tokenizers import Tokenizer, pre_tokenizers

    whole = Tokenizer.from_str(tokenizer.to_str())
    steps: Any = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    whole.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    return whole


def _known_splits() -> frozenset[str]:
    """Names of the ways to split a text that transformers knows."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    return frozenset(gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS)
