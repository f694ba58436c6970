"""The bundled Llama with wider heads, for engines that take no narrow ones."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from headcount.workers.model.info.bundled_models import BUNDLED


def wide_llama(folder: Path, times: int, keys: float = 1) -> Path:
    """The same function with heads so many times as wide, and with keys larger and queries smaller
    by a factor.
    """
    bundled = BUNDLED["llama-mini"]
    config = json.loads((bundled / "config.json").read_text())
    d_head, tensors = config["head_dim"], load_file(bundled / "model.safetensors")
    # Rotary pair j of 8 becomes pair j × times, which turns as fast; the others are zero. Scores
    # are divided by the root of the width.
    factors = {"q": np.sqrt(times) / keys, "k": keys, "v": 1.0}
    for name, weight in tensors.items():
        projection = name.split(".")[-2]
        if projection in ("q_proj", "k_proj", "v_proj"):
            heads = len(weight) // d_head
            wide = np.zeros((heads, times * d_head, weight.shape[1]), np.float32)
            wide[:, ::times] = weight.reshape(heads, d_head, -1) * factors[projection[0]]
            tensors[name] = wide.reshape(-1, weight.shape[1])
        elif projection == "o_proj":
            tensors[name] = np.zeros((len(weight), times * weight.shape[1]), np.float32)
            tensors[name][:, ::times] = weight
    shutil.copytree(bundled, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": times * d_head}))
    return folder
