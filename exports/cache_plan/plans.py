"""Plans of a cache: what each KV head keeps, what that takes, and the intervention that does it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from headcount.schemas.scans.cache_formats import CACHE_FORMATS, FLOAT16
from headcount.schemas.scans.head_groups import groups_text

KVHead = tuple[int, int]  # a layer, and one of its heads of keys and values

WHOLE = FLOAT16.name
"""The format of keys and values that stay as they are."""

FORMATS = {WHOLE: FLOAT16, **CACHE_FORMATS}


@dataclass(frozen=True)
class HeadCache:
    """What a KV head keeps."""

    window: bool = False  # whether it keeps the first keys and the last ones alone
    keys: str = WHOLE  # the number format of its keys
    values: str = WHOLE

    def __str__(self) -> str:
        parts = ["window"] * self.window
        parts += [f"keys {self.keys}"] * (self.keys != WHOLE)
        parts += [f"values {self.values}"] * (self.values != WHOLE)
        return ", ".join(parts) or "whole"


@dataclass(frozen=True)
class Choice:
    """What some KV heads may get: a window, or other number formats."""

    kind: str  # what they get, in words: choices of one kind differ in the heads alone
    heads: tuple[KVHead, ...]
    window: bool = False
    keys: str | None = None
    values: str | None = None


@dataclass(frozen=True)
class CacheShape:
    """A model's cache at a length, and what windows and formats leave of it."""

    kv_heads: tuple[KVHead, ...]
    n_kv_heads: int  # in a layer
    d_head: int
    n_ctx: int  # the length at which bytes are counted
    sink: int  # first keys that a window keeps
    recent: int  # last keys that it keeps
    whole: int  # first positions that no format rounds
    end: int  # the position from which on none does, where plans are measured
    own_windows: Mapping[int, int]  # the window that a layer has anyway, by layer

    def bytes_of(self, layer: int, cache: HeadCache) -> float:
        """Bytes of a KV head's keys and values in a sequence of `n_ctx` tokens.

        Σ (16 d_head w + b(n - w)) / 8 over keys and values: n positions are kept, w of them whole,
        and the others take b bits, their scales among these.
        """
        kept = min(self.n_ctx, self.own_windows.get(layer, self.n_ctx))
        if cache.window:
            kept = min(kept, self.sink + self.recent)
        whole = min(kept, self.whole)
        total = 0.0
        for name in (cache.keys, cache.values):
            rounded = FORMATS[name].bits_of(self.d_head, kept - whole)
            total += (FLOAT16.bits_of(self.d_head, whole) + rounded) / 8
        return total


@dataclass(frozen=True)
class CachePlan:
    """What every KV head keeps, in the order of `CacheShape.kv_heads`."""

    caches: tuple[HeadCache, ...]

    @classmethod
    def untouched(cls, shape: CacheShape) -> "CachePlan":
        """All of the cache, as it is."""
        return cls((HeadCache(),) * len(shape.kv_heads))

    def with_choices(self, shape: CacheShape, choices: Iterable[Choice]) -> "CachePlan":
        """The same with some choices more; a format never takes the place of a smaller one."""
        caches = dict(zip(shape.kv_heads, self.caches, strict=True))
        for choice in choices:
            for head in choice.heads:
                cache = caches[head]
                caches[head] = replace(
                    cache,
                    window=cache.window or choice.window,
                    keys=_smaller(cache.keys, choice.keys, shape.d_head),
                    values=_smaller(cache.values, choice.values, shape.d_head),
                )
        return CachePlan(tuple(caches.values()))

    def keeps_part_of(self, other: "CachePlan", shape: CacheShape) -> bool:
        """Whether each KV head keeps what it does in another plan, or a part of that."""

        def is_part(mine: HeadCache, its: HeadCache) -> bool:
            formats = ((mine.keys, its.keys), (mine.values, its.values))
            are_smaller = all(_smaller(a, b, shape.d_head) == a for a, b in formats)
            return are_smaller and mine.window >= its.window

        return all(map(is_part, self.caches, other.caches))

    def bytes_per_token(self, shape: CacheShape) -> float:
        """Bytes of the whole cache for each token of a sequence of `n_ctx` tokens."""
        heads = zip(shape.kv_heads, self.caches, strict=True)
        return sum(shape.bytes_of(layer, cache) for (layer, _), cache in heads) / shape.n_ctx

    def intervention(self, shape: CacheShape) -> str:
        """The intervention that does it: windows, then formats of keys, then of values."""
        heads = list(zip(shape.kv_heads, self.caches, strict=True))

        def text_of(members: Sequence[KVHead]) -> str:
            return f"{shape.n_kv_heads},{groups_text(shape.n_kv_heads, members)}"

        parts: list[str] = []
        if windows := [head for head, cache in heads if cache.window]:
            parts.append(f"stream_groups({shape.sink},{shape.recent},{text_of(windows)})")
        for stored in ("keys", "values"):
            of_format: dict[str, list[KVHead]] = {name: [] for name in (*CACHE_FORMATS, WHOLE)}
            for head, cache in heads:
                of_format[getattr(cache, stored)].append(head)
            del of_format[WHOLE]
            parts += [
                f"store_{stored}({name},{shape.whole},{shape.end},{text_of(members)})"
                for name, members in of_format.items()
                if members
            ]
        return "+".join(parts) or "none"

    def facts(self, shape: CacheShape) -> dict[str, str]:
        """What each KV head keeps, for a file; those that keep all are left out."""
        heads = zip(shape.kv_heads, self.caches, strict=True)
        return {f"{layer}-{head}": str(c) for (layer, head), c in heads if c != HeadCache()}


def _smaller(name: str, other: str | None, d_head: int) -> str:
    """The one of two formats that takes fewer bits."""
    if other is None:
        return name
    return min(name, other, key=lambda each: FORMATS[each].bits_per_number(d_head))
