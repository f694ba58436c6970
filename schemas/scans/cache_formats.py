"""Number formats of a cache: how many bits a stored number takes, its scale among them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CacheFormat:
    """A format in which keys or values are stored."""

    name: str
    bits: int  # of a stored number
    block: int | None = None  # numbers that share a scale; None: there is no scale
    bits_of_block: int = 0  # of what a block stores besides, such as its scale and its smallest
    along: Literal["head", "positions"] = "head"
    """What a block has: numbers of one head at one position, or one of them at many positions, in a
    row. Blocks of positions are stored when they are complete: until then, numbers have 16 bits.
    """
    rotates: Literal["llama.cpp", "all"] | None = None  # whose heads, before they are rounded
    like: str = ""  # what stores numbers so

    def bits_per_number(self, d_head: int) -> float:
        """What a number takes in a head of this size. A block has no more numbers than a head.

        >>> CACHE_FORMATS["q4_0"].bits_per_number(64), CACHE_FORMATS["mlx4"].bits_per_number(16)
        (4.5, 6.0)
        """
        if self.block is None:
            return float(self.bits)
        numbers = min(self.block, d_head) if self.along == "head" else self.block
        return self.bits + self.bits_of_block / numbers

    def bits_of(self, d_head: int, positions: int) -> float:
        """What so many positions of a head take, on an average over the places where a last block
        ends.

        >>> CACHE_FORMATS["q4_0"].bits_of(64, 10), CACHE_FORMATS["channel4"].bits_of(64, 100)
        (2880.0, 42912.0)
        """
        incomplete = 0.0
        if self.along == "positions" and self.block is not None:
            incomplete = min(positions, (self.block - 1) / 2)
        rounded = positions - incomplete
        return d_head * (16 * incomplete + self.bits_per_number(d_head) * rounded)


FLOAT16 = CacheFormat("float16", 16, like="the cache as it is")


def _by_channel(bits: int, like: str) -> CacheFormat:
    return CacheFormat(f"channel{bits}", bits, 32, 32, along="positions", like=like)


def _rotated(bits: int, like: str) -> CacheFormat:
    return CacheFormat(f"rotated{bits}", bits, 64, 32, rotates="all", like=like)


def _mlx(bits: int, like: str) -> CacheFormat:
    return CacheFormat(f"mlx{bits}", bits, 64, 32, like=like)


CACHE_FORMATS = {
    each.name: each
    for each in (
        CacheFormat("fp8", 8, like="float8_e4m3fn with a scale of 1, as vLLM has it by default"),
        CacheFormat(
            "q8_0",
            bits=8,
            block=32,
            bits_of_block=16,
            rotates="llama.cpp",
            like="whole numbers times a scale, of 32 numbers of a head that is rotated first if it "
            "has a multiple of 64 numbers, as llama.cpp has them",
        ),
        CacheFormat(
            "q4_0",
            bits=4,
            block=32,
            bits_of_block=16,
            rotates="llama.cpp",
            like="the same, as llama.cpp has 4 bits",
        ),
        CacheFormat(
            "affine8",
            bits=8,
            block=64,
            bits_of_block=32,
            like="2^8 levels from the smallest to the largest of 64 numbers of a head",
        ),
        _by_channel(
            bits=4,
            like="2^4 levels from the smallest to the largest of one number of a head at 32 "
            "positions in a row, as KIVI has keys; positions whose 32 are not complete stay whole",
        ),
        _by_channel(bits=3, like="the same with 2^3 levels"),
        _rotated(
            bits=4,
            like="2^4 levels from the smallest to the largest of 64 numbers of a head that is "
            "multiplied before and after by H[i, j] = (-1)^b / √n, where b is how many binary 1s i "
            "and j have in common, and n the largest power of two that divides the head",
        ),
        _rotated(bits=3, like="the same with 2^3 levels"),
        _rotated(bits=2, like="the same with 2^2 levels"),
        _mlx(bits=8, like="2^8 levels of 64 numbers, of which one is 0, as MLX has them"),
        _mlx(bits=4, like="the same with 2^4 levels"),
        _mlx(bits=2, like="the same with 2^2 levels"),
    )
}
"""The formats by name. Scales and smallest numbers have 16 bits."""
