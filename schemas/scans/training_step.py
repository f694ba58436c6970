"""The step of training that a model's name tells."""

import re
from pathlib import PurePosixPath

STEP = re.compile(r"(?:step|checkpoint|ckpt|iter)s?[-_]?(\d+)", re.IGNORECASE)
"""How the names of checkpoints tell their step, in the libraries that write them."""

LONGEST_STEP = 15  # digits of the largest number that is taken for a step


def training_step(model: str, revision: str | None) -> int | None:
    """The step of training that a checkpoint's name tells.

    >>> [training_step(*names) for names in (("EleutherAI/pythia-70m", "step143000"),
    ...     ("runs/checkpoint-500/", None), ("runs/stage1-step001000-tokens5B", None))]
    [143000, 500, 1000]
    >>> training_step("openai-community/gpt2", None) is None
    True
    """
    name = revision or PurePosixPath(model).name
    match = STEP.search(name)
    # More digits are no step, and no column holds them.
    return int(match[1]) if match and len(match[1]) <= LONGEST_STEP else None
