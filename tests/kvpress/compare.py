"""What a model loses behind caches that kvpress cuts by our files, and by random ones.

compare.py MODEL EXPORTS PAGE prints a list of rows as JSON. EXPORTS has the folders `duo`,
`expected-attention` and `nthngdy/NAME_qfilt`; PAGE is the guide with the subclass for `duo`.
kvpress needs an environment of its own, so nothing of ours is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import pydoc_data.topics
import re
import shutil
import string
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvpress import (  # pyright: ignore
    ExpectedAttentionStatsPress,  # pyright: ignore
    QFilterPress,  # pyright: ignore
    RandomPress,  # pyright: ignore
)
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

BOS = 256
SEQUENCES, CONTEXT, ANSWER = 32, 128, 24
SEEDS = range(5)
REMOVED = 0.25
"""Share of the keys that the presses which score keys remove from every head."""


# Tasks: a context whose cache is cut, and what comes after it


def held_out_text() -> np.ndarray:
    """Bytes of the manual that comes with Python."""
    topics = pydoc_data.topics.topics
    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def tasks(rng: np.random.Generator) -> dict[str, tuple[torch.Tensor, slice]]:
    """Tokens [sequence position], and which positions are asked for.

    * `text`: the text goes on.
    * `repeat`: 24 bytes of the first half of the context come again; the last 16 are asked for.
    * `needle`: 12 random letters of the first half come again; the last 6 are asked for.
    """
    text = held_out_text()
    starts = rng.integers(0, len(text) - CONTEXT - ANSWER, SEQUENCES)
    tokens = text[starts[:, None] + np.arange(CONTEXT + ANSWER)].astype(np.int64)
    tokens[:, 0] = BOS
    repeat, needle = tokens.copy(), tokens.copy()
    letters = np.frombuffer(string.ascii_letters.encode(), np.uint8)
    for i in range(SEQUENCES):
        start = rng.integers(8, CONTEXT // 2)
        repeat[i, CONTEXT:] = repeat[i, start : start + ANSWER]
        needle[i, start : start + 12] = rng.choice(letters, 12)
        needle[i, CONTEXT : CONTEXT + 12] = needle[i, start : start + 12]
    return {
        "text": (torch.from_numpy(tokens), slice(CONTEXT + 1, CONTEXT + ANSWER)),
        "repeat": (torch.from_numpy(repeat), slice(CONTEXT + 8, CONTEXT + ANSWER)),
        "needle": (torch.from_numpy(needle[:, : CONTEXT + 12]), slice(CONTEXT + 6, CONTEXT + 12)),
    }


@torch.inference_mode()
def logits_behind(model: Any, press: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [sequence position d_vocab] of the tokens after the context, one by one."""
    cache = DynamicCache()
    with press(model) if press else contextlib.nullcontext():
        model(tokens[:, :CONTEXT], past_key_values=cache)
    # The cache is shorter than the text, so each token says where it stands.
    steps = [
        model(tokens[:, [i]], past_key_values=cache, position_ids=torch.tensor([[i]])).logits
        for i in range(CONTEXT, tokens.shape[1])
    ]
    return torch.cat(steps, dim=1)


def scores(model: Any, press: Any) -> dict[str, float]:
    """Losses in nats and the recall of needles behind a cache that a press cuts."""
    measured: dict[str, float] = {}
    for name, (tokens, asked) in tasks(np.random.default_rng(2026)).items():
        logits = logits_behind(model, press, tokens)
        logits = logits[:, asked.start - CONTEXT - 1 : asked.stop - CONTEXT - 1].flatten(0, 1)
        wanted = tokens[:, asked].flatten()
        if name == "needle":
            measured["recall"] = (logits.argmax(-1) == wanted).double().mean().item()
        else:
            loss = torch.nn.functional.cross_entropy(logits, wanted)
            measured[f"loss_{name}"] = loss.item()
    return measured


# Presses that read our files, and random ones of the same size


def written(folder: Path, tensors: dict[str, np.ndarray], like: Path) -> Path:
    """A folder with other tensors and the configuration of ours."""
    shutil.copytree(like, folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def duo(folder: Path, page: Path, scratch: Path) -> Iterator[tuple[str, Any]]:
    """The subclass in the guide, with our heads and with as many random ones."""
    code = re.search(r"^```py\n(.*?)^# The share", page.read_text(), re.DOTALL | re.MULTILINE)
    assert code
    exec(compile(code[1], str(page), "exec", dont_inherit=True), names := {"__name__": __name__})
    press = names["MeasuredDuoAttentionPress"]
    ours = np.loadtxt(folder / "full_attention_heads.tsv", delimiter="\t", ndmin=2)
    streaming = 1 - ours.mean()
    yield "ours", press(head_compression_ratio=streaming, folder=str(folder))
    for seed in SEEDS:
        random = scratch / f"duo-{seed}"
        shutil.copytree(folder, random)
        heads = np.random.default_rng(seed).permutation(ours.ravel()).reshape(ours.shape)
        np.savetxt(random / "full_attention_heads.tsv", heads, fmt="%g", delimiter="\t")
        yield f"random heads {seed}", press(head_compression_ratio=streaming, folder=str(random))
    yield "no head", press(head_compression_ratio=1.0, folder=str(folder))


def expected_attention(folder: Path, scratch: Path) -> Iterator[tuple[str, Any]]:
    """Our moments, and the same given to other heads, for queries as far ahead as are asked for."""

    def press(stats: Path) -> ExpectedAttentionStatsPress:
        return ExpectedAttentionStatsPress(
            REMOVED, n_future_positions=ANSWER, stats_folder=str(stats)
        )

    ours = load_file(folder / "model.safetensors")
    yield "ours", (of_folder := press(folder))
    for tensor, name in ((of_folder.mu, "query_mean"), (of_folder.cov, "query_cov")):
        assert np.array_equal(tensor, ours[name]), f"kvpress read another {name}"
    for seed in SEEDS:
        order = np.random.default_rng(seed).permutation(ours["query_mean"][..., 0].size)
        tensors = {
            name: tensor.reshape(-1, *tensor.shape[2:])[order].reshape(tensor.shape)
            for name, tensor in ours.items()
        }
        random = written(scratch / f"expected-{seed}", tensors, folder)
        yield f"other heads {seed}", press(random)


def qfilters(exports: Path, name: str, scratch: Path) -> Iterator[tuple[str, Any]]:
    """Our filters and random directions, from the folder nthngdy/NAME_qfilt of where one stands."""
    folder = exports / "nthngdy" / f"{name}_qfilt"
    os.chdir(exports)
    ours = load_file(folder / "model.safetensors")["q_filters"]
    yield "ours", (of_folder := QFilterPress(REMOVED))
    assert np.array_equal(of_folder.q_filters.detach(), ours), "kvpress read other filters"
    for seed in SEEDS:
        drawn = np.random.default_rng(seed).standard_normal(ours.shape).astype(np.float32)
        place = scratch / f"filters-{seed}"
        written(place / "nthngdy" / folder.name, {"q_filters": drawn}, folder)
        os.chdir(place)
        # kvpress keeps the filters of a name for good.
        QFilterPress.load_q_filters.cache_clear()
        yield f"random filters {seed}", QFilterPress(REMOVED)


def main(model_path: str, exports: Path, page: Path) -> None:
    """Print the rows."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    without_file = {"whole cache": None}
    without_file |= {f"random keys {seed}": RandomPress(REMOVED, seed=seed) for seed in SEEDS}
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        presses = {
            "": without_file.items(),
            "duo": duo(exports / "duo", page, scratch),
            "expected-attention": expected_attention(exports / "expected-attention", scratch),
            "qfilters": qfilters(exports, Path(model_path).name, scratch),
        }
        for export, of_export in presses.items():
            for file, press in of_export:
                rows.append({"export": export, "file": file} | scores(model, press))
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute(), Path(sys.argv[3]).absolute())
