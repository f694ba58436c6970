"""What a model is, as its files say it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SHAPE = ("n_layers", "n_heads", "d_model", "d_head", "n_ctx", "d_vocab")
"""Fields of a config of TransformerLens, also of a legacy config.json, that say a model's shape."""


NO_IDENTITY = ("files", "bos", "quantisation")
"""Fields of its record that only explain others."""


@dataclass(frozen=True)
class TrainedBos:
    """Whether sequences begin with the token, and why."""

    is_first: bool
    evidence: str  # a clause
    is_strong: bool = True  # whether sequences of the other kind are unlike any of the training


UNKNOWN_BOS = TrainedBos(True, "", is_strong=False)
"""Of a model that nothing is known of: with the token, if it has one."""


@dataclass(frozen=True)
class ModelInfo:
    """What a model's files say about it, in TransformerLens's words."""

    path: str
    name: str
    layout: str
    sha256: str
    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    n_ctx: int
    d_vocab: int
    bos_token_id: int | None
    eos_token_id: int | None
    files: tuple[tuple[str, str], ...] = ()  # name and fingerprint of those that `sha256` covers
    attention_layers: tuple[int, ...] | None = None  # that attend; None if all do
    n_kv_heads: int | None = None  # heads with keys and values of their own, which others share
    family: str = ""  # of models of transformers, as their config.json names it
    has_adapter: bool = False  # whether the adapter beside the weights is applied to them
    bos: TrainedBos = UNKNOWN_BOS  # whether sequences begin with that token as in its training
    quantisation: str = ""  # formats of the weights in a GGUF file
    tokenizer_path: str = ""  # where a tokenizer lies that is not the model's own
    notes: tuple[str, ...] = ()  # what a user should know of the files

    @property
    def tokenizer(self) -> Path:
        """Where its tokenizer lies."""
        return Path(self.tokenizer_path or self.path)

    @property
    def attention_layers_or_all(self) -> tuple[int, ...]:
        """The layers that attend."""
        return (
            tuple(range(self.n_layers)) if self.attention_layers is None else self.attention_layers
        )

    @property
    def kv_heads(self) -> tuple[tuple[int, int], ...]:
        """Its heads of keys and values: a layer, and one of its heads."""
        of_layer = range(self.n_kv_heads or self.n_heads)
        return tuple((layer, head) for layer in self.attention_layers_or_all for head in of_layer)

    @property
    def is_of_transformers(self) -> bool:
        """Whether its modules are those of transformers."""
        return self.layout in ("huggingface", "gguf")

    def begins_with_bos(self, bos: bool | Literal["auto"]) -> bool:
        """Whether sequences begin with `bos_token_id`, by the field `bos` of a scan."""
        if bos == "auto":
            return self.bos.is_first and self.bos_token_id is not None
        return bos

    def bos_line(self, is_first: bool) -> str:
        """Whether sequences begin with that token, and what speaks for it or against it."""
        token = "" if self.bos_token_id is None else f", token {self.bos_token_id}"
        line = f"sequences begin with{'' if is_first else 'out'} BOS{token}"
        evidence = self.bos.evidence
        if is_first != self.begins_with_bos("auto"):
            return f"{line}, although {evidence}"
        return f"{line}: {evidence}" if evidence else line

    @property
    def record(self) -> dict[str, Any]:
        """The description for a run's manifest, without the place it was loaded from."""
        fields = asdict(self)
        # What `files` covers needs no word of its own.
        for name in ("path", "tokenizer_path", "family", "has_adapter", "notes"):
            del fields[name]
        if not self.quantisation:
            del fields["quantisation"]
        fields["files"] = dict(self.files)
        # Left out where it says nothing, so that runs from before keep their identity.
        if self.attention_layers is None:
            del fields["attention_layers"]
        else:
            fields["attention_layers"] = list(self.attention_layers)
        return fields

    @property
    def identity(self) -> dict[str, Any]:
        """What makes it the same model; `sha256` stands for its files."""
        return {key: value for key, value in self.record.items() if key not in NO_IDENTITY}


def text_config(config: Any) -> PretrainedConfig:  # noqa: ANN401 (whatever a model has)
    """The part of a config that describes the language model, which a model that also sees images
    or hears keeps apart.
    """
    return config.get_text_config(decoder=True)
