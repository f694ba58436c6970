"""Number formats of a cache: how many bits a stored number takes, its scale among them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheFormat:
    """A format in which keys or values are stored."""

    name: str
    bits: int  # of a stored number
    block: int | None = None  # numbers that share a scale; None: there is no scale
    bits_of_block: int = 0  # of what a block stores besides, such as its scale and its smallest
    rotates: bool = False  # whether heads of a multiple of 64 numbers are rotated first
    like: str = ""  # what stores numbers so

    def bits_per_number(self, d_head: int) -> float:
        """What a number takes in a head of this size. A block has no more numbers than a head.

        >>> CACHE_FORMATS["q4_0"].bits_per_number(64), CACHE_FORMATS["affine4"].bits_per_number(16)
        (4.5, 6.0)
        """
        if self.block is None:
            return float(self.bits)
        return self.bits + self.bits_of_block / min(self.block, d_head)


FLOAT16 = CacheFormat("float16", 16, like="the cache as it is")

CACHE_FORMATS = {
    each.name: each
    for each in (
        CacheFormat("fp8", 8, like="float8_e4m3fn with a scale of 1, as vLLM has it by default"),
        CacheFormat(
            "q8_0", 8, 32, 16, True, "whole numbers times a scale, as llama.cpp's cache has them"
        ),
        CacheFormat("q4_0", 4, 32, 16, True, "the same in 4 bits"),
        CacheFormat("affine8", 8, 64, 32, like="levels from the smallest to the largest"),
        CacheFormat("affine4", 4, 64, 32, like="the same in 4 bits"),
        CacheFormat("affine2", 2, 64, 32, like="the same in 2 bits"),
        CacheFormat("mlx8", 8, 64, 32, like="levels of which one is 0, as in MLX's cache"),
        CacheFormat("mlx4", 4, 64, 32, like="the same in 4 bits"),
        CacheFormat("mlx2", 2, 64, 32, like="the same in 2 bits"),
    )
}
"""The formats by name. Scales and smallest numbers have 16 bits."""
