"""What a plan of a cache is worth: other caches of the same bytes, on texts that chose nothing.

    .venv-kvpress/bin/python -m benchmarks.real_models.cache_rivals MODEL PLAN.json… -- TEXT…

MODEL is a GGUF file or a directory, each PLAN.json is of `headcount cache-plan` of it, and each
TEXT a file that no plan has read. kvpress needs an environment of its own,
tests/kvpress/requirements.txt and gguf, so nothing of ours is imported here.

A text is read to the length of the plan. Then its cache is cut and rounded, and the model goes on:
with the tokens that follow, whose loss is compared with that behind the whole cache, or with a
question for a number of five digits that stands in the text. The rivals:

* the first 4 keys and as many last ones in every head as the bytes allow;
* keys and values of fewer bits in every head, by plain levels and by the formats of plans: of both
  the largest that fits, and the next one;
* the caches of the plan given to other heads: the larger ones to the first and the last layers, or
  at random, each of 20 times on a fifth of the texts;
* SnapKV and ExpectedAttention of kvpress, which drop keys of every head.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from kvpress import ExpectedAttentionPress, SnapKVPress  # pyright: ignore
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from benchmarks.real_models.passkeys import DIGITS, NEEDLE, QUESTION, loaded, said_behind

CONTINUED = 64  # tokens that are read behind a cut cache
PIECES = 1  # of each text
PASSKEYS = 40
RANDOM_PLANS, PARTS = 20, 5

CHANNEL = 32  # positions of a block of a format by channels

Caches = dict[tuple[int, int], tuple[bool, str, str]]
"""Of each KV head: whether it keeps a window alone, and the formats of its keys and its values."""

PLAIN = ("float16", "affine8", "affine4", "affine2")
OF_PLANS = (
    (*PLAIN[:2], "channel4", "channel3"),
    (*PLAIN[:2], "rotated4", "rotated3", "rotated2"),
)


class Prompt(NamedTuple):
    """What is cached, and what the model reads behind it."""

    cached: torch.Tensor  # tokens [1 pos]
    following: torch.Tensor  # tokens [1 pos]
    text: int  # of which text it is
    answer: str = ""  # what should be said then


@dataclass(frozen=True)
class Plan:
    """A cache that every head keeps a part of."""

    caches: Caches
    sink: int
    recent: int
    whole: int  # first positions that stay as they are

    def bytes_of(self, head: tuple[int, int], length: int, d_head: int) -> float:
        """Bytes of the keys and values of a head."""
        window, *formats = self.caches[head]
        kept = min(length, self.sink + self.recent) if window else length
        first = min(self.whole, kept)
        return sum(
            d_head * (16 * first + bits_of(name, kept - first, d_head)) / 8 for name in formats
        )

    def share(self, length: int, d_head: int) -> float:
        """Bytes of all heads, of those of the whole cache."""
        total = sum(self.bytes_of(head, length, d_head) for head in self.caches)
        return total / (len(self.caches) * 4 * d_head * length)


def bits_of(name: str, positions: int, d_head: int) -> float:
    """Bits of one number of a head at so many positions. Blocks share 32 bits of scales; a block of
    positions that is not complete, half a block on an average, has 16 bits.
    """
    if name == "float16":
        return 16 * positions
    bits = int(name[-1])
    if not name.startswith("channel"):
        return (bits + 32 / min(64, d_head)) * positions
    waiting = min(positions, (CHANNEL - 1) / 2)
    return 16 * waiting + (bits + 32 / CHANNEL) * (positions - waiting)


def rounded(numbers: torch.Tensor, name: str) -> torch.Tensor:
    """Numbers `[… pos d_head]` as a format has them."""
    if name == "float16":
        return numbers
    bits, d_head = int(name[-1]), numbers.shape[-1]
    if name.startswith("channel"):
        complete = numbers.shape[-2] // CHANNEL * CHANNEL
        blocks = numbers[..., :complete, :].unflatten(-2, (-1, CHANNEL))
        levels = at_levels(blocks.transpose(-1, -2), bits).transpose(-1, -2).flatten(-3, -2)
        return torch.cat([levels, numbers[..., complete:, :]], -2)
    turn = torch.eye(d_head)
    if name.startswith("rotated"):
        # ±1/√d: the sign is that of the number of binary 1s that row and column have in common.
        both = torch.arange(d_head)[:, None] & torch.arange(d_head)
        ones = torch.stack([(both >> place) & 1 for place in range(d_head.bit_length())]).sum(0)
        turn = (1 - 2 * (ones % 2)) / math.sqrt(d_head)
    groups = (numbers @ turn).unflatten(-1, (-1, min(64, d_head)))
    return at_levels(groups, bits).flatten(-2) @ turn


def at_levels(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest of 2^bits levels between the ends of each group."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low).clamp(min=1e-7) / (2**bits - 1)
    return ((groups - low) / step).round() * step + low


def read_plan(path: Path, heads: Sequence[tuple[int, int]]) -> tuple[Plan, int]:
    """The plan of a file, and its length."""
    content = json.loads(path.read_text())
    caches: Caches = {}
    for head in heads:
        words = content["heads"].get(f"{head[0]}-{head[1]}", "").split(", ")
        formats = dict(word.split(" ") for word in words if " " in word)
        keys, values = (formats.get(name, "float16") for name in ("keys", "values"))
        caches[head] = ("window" in words, keys, values)
    return Plan(caches, **content["window"]), content["n_ctx"]


def rivals(plan: Plan, length: int, d_head: int) -> Iterator[tuple[str, Plan, int | None]]:
    """Other plans of the same bytes. A number says on which part of the texts it is tried."""
    share, heads = plan.share(length, d_head), [*plan.caches]

    def uniform(cache: tuple[bool, str, str], recent: int) -> Plan:
        return Plan(dict.fromkeys(heads, cache), 4, recent, plan.whole)

    keys = math.floor(share * length) - 4
    window = (True, "float16", "float16")
    yield f"the first 4 and the last {keys} keys", uniform(window, keys), None
    bits: dict[str, Plan] = {}
    for of_keys, of_values in ((PLAIN, PLAIN), OF_PLANS):
        formats = [
            (f"{of_key} keys, {of_value} values", uniform((False, of_key, of_value), plan.recent))
            for of_key, of_value in product(of_keys, of_values)
            # Keys need more bits than values.
            if bits_of(of_key, length, d_head) >= bits_of(of_value, length, d_head)
        ]
        formats.sort(key=lambda each: each[1].share(length, d_head))
        fits = [each for each in formats if each[1].share(length, d_head) <= share]
        bits |= dict(formats[max(0, len(fits) - 1) :][:2])
    for name, each in bits.items():
        yield name, each, None
    largest_first = sorted(heads, key=lambda head: -plan.bytes_of(head, length, d_head))
    middle = max(layer for layer, _ in heads) / 2
    from_ends = sorted(heads, key=lambda head: -abs(head[0] - middle))
    given = {to: plan.caches[of] for to, of in zip(from_ends, largest_first, strict=True)}
    yield "the larger in first and last layers", Plan(given, *fields(plan)), None
    for seed in range(RANDOM_PLANS):
        order = np.random.default_rng(seed).permutation(len(heads))
        given = {to: plan.caches[heads[of]] for to, of in zip(heads, order, strict=True)}
        yield "at random", Plan(given, *fields(plan)), seed % PARTS


def fields(plan: Plan) -> tuple[int, int, int]:
    """What is the same in a plan of other heads."""
    return plan.sink, plan.recent, plan.whole


def texts_of(tokenizer: Any, files: Sequence[str], length: int) -> list[Prompt]:  # noqa: ANN401
    """Pieces of texts, each with the tokens that follow."""
    prompts: list[Prompt] = []
    for number, file in enumerate(files):
        tokens = tokenizer(Path(file).read_text()).input_ids
        # Each piece begins as a text does.
        first = tokens[:1] if tokens[0] == tokenizer.bos_token_id else []
        words, size = tokens[len(first) :], length + CONTINUED - len(first)
        for start in range(0, len(words) - size + 1, size)[:PIECES]:
            piece = torch.tensor([[*first, *words[start : start + size]]])
            prompts.append(Prompt(piece[:, :length], piece[:, length:], number))
    return prompts


def passkeys_of(
    tokenizer: Any,  # noqa: ANN401
    texts: Sequence[Prompt],
    length: int,
) -> list[Prompt]:
    """Pieces of texts with a number in each, and the question for it."""
    generator = np.random.default_rng(5)
    question = tokenizer(QUESTION, add_special_tokens=False, return_tensors="pt").input_ids
    prompts: list[Prompt] = []
    for row, depth in enumerate(np.linspace(0.05, 0.85, PASSKEYS)):
        number = str(generator.integers(10 ** (DIGITS - 1), 10**DIGITS))
        needle = tokenizer(NEEDLE.format(number, number), add_special_tokens=False).input_ids
        words = texts[row % len(texts)].cached[0, : length - len(needle)].tolist()
        place = int(depth * len(words))
        tokens = torch.tensor([[*words[:place], *needle, *words[place:]]])
        prompts.append(Prompt(tokens, question, row, number))
    return prompts


class Reader:
    """A model that reads behind caches."""

    def __init__(self, path: Path) -> None:
        self.model, self.tokenizer = loaded(path)
        config = self.model.config
        self.d_head = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self.attention = [layer.self_attn for layer in self.model.model.layers]
        self.heads = [
            (layer, head)
            for layer in range(config.num_hidden_layers)
            for head in range(config.num_key_value_heads)
        ]

    def cache_of(self, tokens: torch.Tensor, press: Any = None) -> DynamicCache:  # noqa: ANN401
        """The cache of some tokens, cut by a press of kvpress if there is one."""
        cache = DynamicCache()
        if press is None:
            self.model(tokens, past_key_values=cache, logits_to_keep=1)
        else:
            with press(self.model):
                self.model(tokens, past_key_values=cache, logits_to_keep=1)
        return cache

    def kept(self, cache: DynamicCache, plan: Plan | None) -> DynamicCache:
        """What a plan leaves of a cache. Keys outside a window stay in their places, unseen."""
        left = DynamicCache()
        for layer, module in enumerate(self.attention):
            stored: Any = cache.layers[layer]
            keys, values = stored.keys.clone(), stored.values.clone()
            module.masked_key_indices = None
            if plan is not None:
                unseen = torch.zeros(keys.shape[:3], dtype=torch.bool)
                for head in range(keys.shape[1]):
                    window, *formats = plan.caches[layer, head]
                    for each, name in zip((keys, values), formats, strict=True):
                        each[:, head, plan.whole :] = rounded(each[:, head, plan.whole :], name)
                    if window:
                        unseen[:, head, plan.sink : -plan.recent] = True
                if unseen.any():
                    module.masked_key_indices = unseen.nonzero(as_tuple=True)
            left.update(keys, values, layer)
        return left

    def loss(self, cache: DynamicCache, prompt: Prompt) -> float:
        """The mean loss of what follows, but its first token."""
        positions = prompt.cached.shape[1] + torch.arange(prompt.following.shape[1])[None]
        logits = self.model(prompt.following, past_key_values=cache, position_ids=positions).logits
        return float(cross_entropy(logits[0, :-1], prompt.following[0, 1:]))

    def finds(self, cache: DynamicCache, prompt: Prompt) -> float:
        """1 if the model says the number that it is asked for, 0 if not."""
        length = prompt.cached.shape[1]
        said = said_behind(self.model, self.tokenizer, cache, length, prompt.following)
        return float(said == prompt.answer)


def runnable(reader: Reader, presses: Mapping[str, Any], prompt: Prompt) -> dict[str, Any]:
    """The presses that kvpress can run on this model, of which not all know layers with rotations
    of their own.
    """
    able: dict[str, Any] = {}
    for name, press in presses.items():
        try:
            reader.cache_of(prompt.cached, press)
            able[name] = press
        except AttributeError as error:
            print(f"{name}: kvpress cannot run it on this model ({error})", flush=True)
    return able


Results = dict[str, list[tuple[int, float]]]
"""Of each cache: the number of a prompt, and what the model makes of it."""


def results(
    reader: Reader,
    prompts: Sequence[Prompt],
    plans: Sequence[tuple[str, Plan | None, int | None]],
    presses: Mapping[str, Any],
    read: Callable[[DynamicCache, Prompt], float],
) -> Results:
    """What the model makes of each prompt behind each cache."""
    found: Results = {}
    for row, prompt in enumerate(prompts):
        cache = reader.cache_of(prompt.cached)
        for name, plan, part in plans:
            if part is None or row % PARTS == part:
                result = read(reader.kept(cache, plan), prompt)
                found.setdefault(name, []).append((row, result))
        for name, press in presses.items():
            result = read(reader.cache_of(prompt.cached, press), prompt)
            found.setdefault(name, []).append((row, result))
    return found


@torch.inference_mode()
def main(path: Path, files: Sequence[Path], text_files: Sequence[str]) -> None:
    """Print what each cache costs, and how much more than that of the plan."""
    reader = Reader(path)
    for file in files:
        plan, length = read_plan(file, reader.heads)
        share = plan.share(length, reader.d_head)
        texts = texts_of(reader.tokenizer, text_files, length)
        passkeys = passkeys_of(reader.tokenizer, texts, length)
        plans: list[tuple[str, Plan | None, int | None]] = [
            ("the whole cache", None, None),
            ("the plan", plan, None),
            *rivals(plan, length, reader.d_head),
        ]
        presses = {
            "SnapKV": SnapKVPress(1 - share),
            "ExpectedAttention": ExpectedAttentionPress(1 - share),
        }
        presses = runnable(reader, presses, texts[0])
        losses = results(reader, texts, plans, presses, reader.loss)
        found = results(reader, passkeys, plans, presses, reader.finds)
        print(
            f"{file}: {100 * share:.1f} % of the bytes of {length} tokens; {len(texts)} pieces of "
            f"{len({prompt.text for prompt in texts})} texts, {PASSKEYS} passkeys"
        )
        shares = {name: other.share(length, reader.d_head) for name, other, _ in plans if other}
        shares |= dict.fromkeys(presses, share)
        whole, of_plan = dict(losses["the whole cache"]), dict(losses["the plan"])
        for name, of_rows in losses.items():
            rise, beyond = (
                mean_and_error([(texts[row].text, loss - less[row]) for row, loss in of_rows])
                for less in (whole, of_plan)
            )
            kept = PASSKEYS * np.mean([is_found for _, is_found in found[name]])
            print(
                f"{name:36} {100 * shares.get(name, 1):5.1f} %  {rise[0]:+.4f} ± {rise[1]:.4f}  "
                f"more than the plan {beyond[0]:+.4f} ± {beyond[1]:.4f}  passkeys {kept:.1f}",
                flush=True,
            )


def mean_and_error(changes: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """The mean over texts of (text, change), and its standard error."""
    of_text: dict[int, list[float]] = {}
    for text, change in changes:
        of_text.setdefault(text, []).append(change)
    means = [np.mean(each) for each in of_text.values()]
    return float(np.mean(means)), float(np.std(means, ddof=1) / math.sqrt(len(means)))


if __name__ == "__main__":
    split = sys.argv.index("--")
    main(Path(sys.argv[1]), [*map(Path, sys.argv[2:split])], sys.argv[split + 1 :])
