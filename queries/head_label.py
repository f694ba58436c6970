"""A head by its label, `L5H1`, as users write it and answers show it."""

from __future__ import annotations

import re
from typing import NamedTuple

LABEL = re.compile(r"\s*[Ll](\d{1,6})[Hh](\d{1,6})\s*")


class Head(NamedTuple):
    """One head of a model."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"

    @classmethod
    def labelled(cls, label: str) -> Head | None:
        """The head with a label; None if the text is no label.

        >>> Head.labelled("L5H1"), Head.labelled(" l10h0 "), Head.labelled("5.1")
        (Head(layer=5, head=1), Head(layer=10, head=0), None)
        """
        match = LABEL.fullmatch(label)
        return cls(int(match[1]), int(match[2])) if match else None
