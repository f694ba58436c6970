"""What a plan of a cache is worth: other plans of the same bytes, on texts that chose nothing.

    python -m benchmarks.real_models.cache_plans MODEL PLAN.json SEQUENCES FILE…

PLAN.json is that of `headcount cache-plan` for MODEL. Each FILE is a text that the plan has not
seen, and SEQUENCES of each half of them are read, each with a needle in it. The rivals:

* a window in all heads, as long as the same bytes allow;
* formats for all heads, those of the fewest bytes that are as many or more, and those below;
* the caches of the plan, given to other heads: the larger ones to the first and the last layers,
  or at random.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from headcount.exports.cache_plan.plans import WHOLE, CachePlan, CacheShape, HeadCache
from headcount.exports.formats.windows.window_choice import cost
from headcount.workers.cache_trial import HALVES, CacheTrial

RANDOM_PLANS = 3
LARGER = 1.05  # a rival may take so many times the bytes


def read_plan(heads: dict[str, str], shape: CacheShape) -> CachePlan:
    """The plan of which plan.json has the heads that keep less than all."""
    caches: list[HeadCache] = []
    for layer, head in shape.kv_heads:
        words = heads.get(f"{layer}-{head}", "").split(", ")
        named = dict(word.split(" ") for word in words if " " in word)
        caches.append(HeadCache(window="window" in words, **named))
    return CachePlan(tuple(caches))


def rivals(plan: CachePlan, shape: CacheShape) -> Iterator[tuple[str, CachePlan, CacheShape]]:
    """Other plans of about the same bytes, and the shape that says how long their windows are."""
    size = plan.bytes_per_token(shape)
    share = size / CachePlan.untouched(shape).bytes_per_token(shape)
    n_heads = len(shape.kv_heads)
    window = replace(shape, recent=round(share * shape.n_ctx) - shape.sink)
    yield f"the last {window.recent} keys", CachePlan((HeadCache(window=True),) * n_heads), window
    formats = [
        CachePlan((HeadCache(keys=keys, values=values),) * n_heads)
        for keys, values in product((WHOLE, "affine8", "affine4", "affine2"), repeat=2)
    ]
    by_size = sorted(formats, key=lambda each: each.bytes_per_token(shape))
    fits = [each for each in by_size if each.bytes_per_token(shape) <= LARGER * size]
    larger = [each for each in by_size if each.bytes_per_token(shape) > LARGER * size]
    for each in (*fits[-1:], *larger[:1]):
        yield f"all {each.caches[0]}", each, shape
    sizes = [
        shape.bytes_of(layer, cache)
        for (layer, _), cache in zip(shape.kv_heads, plan.caches, strict=True)
    ]
    largest_first = [plan.caches[index] for index in np.argsort(-np.array(sizes), kind="stable")]
    middle = max(layer for layer, _ in shape.kv_heads) / 2
    from_ends = np.argsort([-abs(layer - middle) for layer, _ in shape.kv_heads], kind="stable")
    caches = dict(zip(from_ends.tolist(), largest_first, strict=True))
    in_order = tuple(caches[index] for index in range(n_heads))
    yield "whole in first and last layers", CachePlan(in_order), shape
    for seed in range(RANDOM_PLANS):
        order = np.random.default_rng(seed).permutation(n_heads)
        yield f"random heads {seed}", CachePlan(tuple(plan.caches[i] for i in order)), shape


def main(model: str, file: Path, sequences: int, texts: list[str]) -> None:
    """Print what each plan costs."""
    content = json.loads(file.read_text())
    trial = CacheTrial(model, texts, n_ctx=content["n_ctx"], sequences=sequences)
    info = trial.info
    n_kv_heads = info.n_kv_heads or info.n_heads
    shape = CacheShape(
        kv_heads=tuple(
            (layer, head) for layer in info.attention_layers_or_all for head in range(n_kv_heads)
        ),
        n_kv_heads=n_kv_heads,
        d_head=info.d_head,
        n_ctx=trial.n_ctx,
        own_windows=trial.own_windows(),
        **content["window"],
    )
    plan = read_plan(content["heads"], shape)
    full = CachePlan.untouched(shape).bytes_per_token(shape)
    documents = np.concatenate([trial.pieces[half].documents for half in HALVES])
    print(f"{len(documents)} sequences of {trial.n_ctx} tokens, {len({*documents})} documents")
    predicted = content["plan"]
    print(
        f"the plan by itself says {predicted['delta_nll']:+.4f} ± "
        f"{predicted['standard_error']:.4f}, recall {predicted['recall']:.2f}"
    )

    def read(text: str) -> tuple[np.ndarray, np.ndarray]:
        both = [trial.measure(half, text) for half in HALVES]
        return np.concatenate([each.text for each in both]), np.concatenate(
            [each.recall for each in both]
        )

    untouched, recall = read("none")
    print(f"{'nothing':32} 100.0 %  {'':16} recall {recall.mean():.2f}", flush=True)
    for name, other, of_shape in (("the plan", plan, shape), *rivals(plan, shape)):
        losses, recall = read(other.intervention(of_shape))
        change, found = cost(losses - untouched, documents), cost(recall, documents)
        print(
            f"{name:32} {100 * other.bytes_per_token(of_shape) / full:5.1f} %  "
            f"{change['delta_nll']:+.4f} ± {change['standard_error']:.4f} "
            f"recall {found['delta_nll']:.2f} ± {found['standard_error']:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
