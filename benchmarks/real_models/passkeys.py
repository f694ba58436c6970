"""What a list of heads is worth: numbers that a model finds behind caches of one size.

    .venv-kvpress/bin/python -m benchmarks.real_models.passkeys MODEL DUO…

MODEL is a GGUF file or a directory, each DUO a folder of `headcount export duo` of it. kvpress
needs an environment of its own, tests/kvpress/requirements.txt and gguf, so nothing of ours is
imported here. Each prompt is 1,500 tokens of Python's reference with a number of five digits
somewhere, in one of two wordings. Its cache is cut before the question is known. Then the model is
asked, and answers greedily.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from kvpress import (  # pyright: ignore
    DuoAttentionPress,  # pyright: ignore
    ExpectedAttentionPress,  # pyright: ignore
    SnapKVPress,  # pyright: ignore
)
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

PROMPTS, TOKENS, DIGITS = 20, 1500, 5
STREAMING = 0.75
"""The share of KV heads that keep the first and the last keys only."""

RANDOM_LISTS = 3
NEEDLE = "\n\nThe pass key is {}. Remember it. {} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
WORDINGS = {
    "pass key": (NEEDLE, QUESTION),
    "locker": (
        "\n\nNote for later: the locker of Marta has the number {}.\n\n",
        "\n\nWhich number has the locker of Marta? The locker of Marta has the number",
    ),
}
"""What says the number, and what asks for it. The first is the harder one: in a text in which much
"is a special …", few numbers follow "is".
"""


@dataclass
class ListedHeads(DuoAttentionPress):  # pyright: ignore
    """The scores of KV heads in a folder decide which stream."""

    folder: str = ""

    def load_attention_pattern(self, model: object) -> tuple[int, int, np.ndarray]:
        """First keys, last keys, and the score of each KV head."""
        scores = np.loadtxt(f"{self.folder}/full_attention_heads.tsv", delimiter="\t", ndmin=2)
        config = json.loads(Path(self.folder, "config.json").read_text())
        return config["sink_size"], config["recent_size"], scores


def shuffled(folder: Path, seed: int, place: Path) -> Path:
    """A list with the same scores, each given to another head."""
    made = place / f"random-{seed}"
    made.mkdir()
    (made / "config.json").write_bytes((folder / "config.json").read_bytes())
    scores = np.loadtxt(folder / "full_attention_heads.tsv", delimiter="\t", ndmin=2)
    scores = np.random.default_rng(seed).permutation(scores.ravel()).reshape(scores.shape)
    np.savetxt(made / "full_attention_heads.tsv", scores, delimiter="\t")
    return made


def prompts(
    tokenizer: Any,  # noqa: ANN401
    sentence: str = NEEDLE,
) -> Iterator[tuple[torch.Tensor, str]]:
    """Tokens [1 position] of a text with a number in it, as a sentence says it, and the number."""
    text = tokenizer("\n\n".join(topics.values()), add_special_tokens=False).input_ids
    generator = np.random.default_rng(0)
    for depth in np.linspace(0.05, 0.85, PROMPTS):
        number = str(generator.integers(10 ** (DIGITS - 1), 10**DIGITS))
        words = sentence.replace("{}", number)
        needle = tokenizer(words, add_special_tokens=False).input_ids
        start = int(generator.integers(len(text) - TOKENS))
        around = text[start : start + TOKENS - len(needle)]
        place = int(depth * len(around))
        yield torch.tensor([[*around[:place], *needle, *around[place:]]]), number


@torch.inference_mode()
def answer(
    model: Any,  # noqa: ANN401
    tokenizer: Any,  # noqa: ANN401
    press: Any,  # noqa: ANN401
    tokens: torch.Tensor,
    question: str = QUESTION,
) -> str:
    """What the model says behind the cut cache, as many characters as a number has."""
    cache = DynamicCache()
    with press(model) if press else contextlib.nullcontext():
        model(tokens, past_key_values=cache, logits_to_keep=1)
    asked = tokenizer(question, add_special_tokens=False, return_tensors="pt").input_ids
    return said_behind(model, tokenizer, cache, tokens.shape[1], asked)


def said_behind(
    model: Any,  # noqa: ANN401
    tokenizer: Any,  # noqa: ANN401
    cache: DynamicCache,
    position: int,
    asked: torch.Tensor,
) -> str:
    """What the model says to a question `[1 position]` behind the cache of so many tokens: as
    many characters as a number has.
    """
    said: list[int] = []
    for _ in range(DIGITS + 1):
        # The cache may be shorter than the text, so each token says where it stands.
        positions = torch.arange(position, position + asked.shape[1])[None]
        logits = model(asked, past_key_values=cache, position_ids=positions).logits
        position += asked.shape[1]
        asked = logits[:, -1:].argmax(-1)
        said.append(int(asked))
    return tokenizer.decode(said).strip()[:DIGITS]


def loaded(path: Path) -> tuple[Any, Any]:
    """The model of a GGUF file or a directory, in float32, and its tokenizer."""
    place, file = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **file).eval()
    return model, AutoTokenizer.from_pretrained(place, **file)


def main(path: Path, folders: Sequence[Path]) -> None:
    """Print how many numbers each cache keeps."""
    model, tokenizer = loaded(path)
    config = json.loads((folders[0] / "config.json").read_text())
    kept_keys = (config["sink_size"] + config["recent_size"]) / TOKENS
    kept = 1 - STREAMING + STREAMING * kept_keys
    with tempfile.TemporaryDirectory() as scratch:
        lists = {str(folder): folder for folder in folders}
        lists |= {
            f"random list {seed}": shuffled(folders[0], seed, Path(scratch))
            for seed in range(RANDOM_LISTS)
        }
        presses: dict[str, Any] = {
            "nothing": None,
            **{name: ListedHeads(STREAMING, folder=str(each)) for name, each in lists.items()},
            "SnapKV": SnapKVPress(1 - kept),
            "ExpectedAttention": ExpectedAttentionPress(1 - kept),
        }
        print(f"{PROMPTS} numbers in {TOKENS} tokens each; {kept:.0%} of the cache kept")
        for (wording, (sentence, question)), (name, press) in product(
            WORDINGS.items(), presses.items()
        ):
            right = sum(
                answer(model, tokenizer, press, tokens, question) == number
                for tokens, number in prompts(tokenizer, sentence)
            )
            print(f"{wording:10} {name:30} {right}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [*map(Path, sys.argv[2:])])
