"""The number formats in which a forward pass multiplies."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """Formats of the factors of products.

    Sums, norms, softmax, the residual stream and every statistic stay float32. In float64
    everything is float64. float16x2 multiplies float16 activations with weights that are the sum of
    two float16 numbers.
    """

    linears: str  # format of products with weights
    scores: str  # format of the products q·k and A·v


PRECISIONS: dict[str, Precision] = {
    "float64": Precision("float64", "float64"),
    "float32": Precision("float32", "float32"),
    "tf32": Precision("tf32", "tf32"),
    "float16": Precision("float16", "float16"),
    "bfloat16": Precision("bfloat16", "bfloat16"),
    "tf32_linears": Precision("tf32", "float32"),
    "float16_linears": Precision("float16", "float32"),
    "float16x2_linears": Precision("float16x2", "float32"),
    "bfloat16_linears": Precision("bfloat16", "float32"),
}
"""Every value of a scan's `precision`, besides auto."""

BRIDGE_PRECISIONS = ("auto", "float32", "float64")
"""What the dense engine accepts: its scores, softmax and changes have the format of the model."""

ACCEPTABLE = 1e-3
"""A precision is acceptable if 99 of 100 values are this close to float64.

The difference is absolute for probabilities and relative for other values.
"""

FASTEST_ACCEPTABLE = {"cpu": "float32", "cuda": "float16x2_linears"}
"""What `precision = "auto"` means on each device; measured in docs/internals/precision.md."""
