"""Weights in pickles: read without running their code."""

import pickle
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from headcount.schemas.errors import ModelError

NOT_A_TENSOR = re.compile(
    r"unsupported (?:global: )?\S+ \S*\w|TorchScript archive|legacy \.tar", re.IGNORECASE
)
"""What PyTorch says of an object in a pickle that is not read. The rest of its message advises to
read the pickle all the same.
"""


def check_pickles(files: Iterable[Path]) -> None:
    """Refuse pickles of anything else than tensors: to read them would run their code."""
    for file in files:
        if file.suffix == ".safetensors":
            continue
        try:
            # On this device no memory is taken for tensors.
            torch.load(file, "meta", weights_only=True)
        except Exception as error:
            # Whoever reads it says what else is wrong with it.
            if not isinstance(error, pickle.UnpicklingError) and "weights_only" not in str(error):
                continue
            cause = NOT_A_TENSOR.search(str(error))
            raise ModelError(
                f"{file}: not read, as it is no pickle of tensors alone"
                f"{f' ({cause[0]})' if cause else ''}; where you trust it, convert it to "
                "safetensors"
            ) from None
