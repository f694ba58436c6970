"""The models that one command reads: each is described once, and loaded once."""

from collections import OrderedDict

import torch

from headcount.workers.loading import load_model
from headcount.workers.model.info.description import describe, find_model, find_tokenizer
from headcount.workers.model.info.model_files import AdapterChoice
from headcount.workers.model.model import Model
from headcount.workers.model.model_info import ModelInfo

MOST_LOADED = 2  # models in memory: the raw and the folded weights of one


class KnownModels:
    """Models by name, described and loaded once for a command with many scans."""

    def __init__(self, most_loaded: int = MOST_LOADED) -> None:
        self.most_loaded = most_loaded  # models that are in memory at once
        self._descriptions: dict[tuple[str, str | None, AdapterChoice, str | None], ModelInfo] = {}
        self._loaded: OrderedDict[tuple[object, ...], Model] = OrderedDict()

    def describe(
        self,
        model: str,
        revision: str | None = None,
        adapter: AdapterChoice = "refuse",
        tokenizer: str | None = None,
    ) -> ModelInfo:
        """What a model is: a Hub id, at a revision if one is given, a directory or bundled:NAME."""
        key = model, revision, adapter, tokenizer
        if key not in self._descriptions:
            path, tokenizer_path = find_model(model, revision), find_tokenizer(tokenizer)
            self._descriptions[key] = describe(path, None, adapter, tokenizer_path)
        return self._descriptions[key]

    def load(
        self, info: ModelInfo, weights: str, device: str, dtype: torch.dtype = torch.float32
    ) -> Model:
        """A loaded model. The one that was used longest ago makes room for a new one."""
        key = (info.path, info.sha256, weights, device, dtype)
        if key not in self._loaded:
            while len(self._loaded) >= self.most_loaded:
                self._loaded.popitem(last=False)
            self._loaded[key] = load_model(info, weights, device, dtype)
        self._loaded.move_to_end(key)
        return self._loaded[key]
