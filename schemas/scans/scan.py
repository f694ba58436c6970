"""What a user asks for: one TOML file, validated into one frozen `Scan`."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from headcount.schemas.formulas import Computed, Formula, Kind
from headcount.schemas.kinds import KINDS
from headcount.schemas.measured_heads import Head, MeasuredHeads, ModelSize, find_heads
from headcount.schemas.plugins import Plugin, activate
from headcount.schemas.scans.intervention import NONE, Intervention
from headcount.schemas.values import (
    LARGEST_INTEGER,
    Count,
    Seed,
    Share,
)

# Layers and heads are sorted, so that one choice is one run in whatever order a scan names it.
LayerNumber = Annotated[int, Field(ge=0)]
Layers = Annotated[tuple[LayerNumber, ...], AfterValidator(lambda layers: tuple(sorted(layers)))]
Heads = Annotated[tuple[Head, ...], AfterValidator(lambda heads: tuple(sorted(heads)))]
Text = Annotated[str, Field(min_length=1)]

MOST_IN_A_SHARD = 1_000_000
"""Sequences in a shard. They are held in memory at once."""

LONGEST_NAME = 100
"""Longest name of a scan. With a fingerprint it names a directory, a job and a part of URLs."""

CHANGES_NO_ROW = ("batch_size", "sequences", "out", "corpora", "bad_rows", "bad_rows_in_a_row")
"""Fields that say how, how much and where. A run is found again if only these differ."""

UNORDERED = ("files", "columns", "where")
"""Options of inputs whose lists mean the same in any order."""

WITHOUT_IDENTITY = (*CHANGES_NO_ROW, "plugins")
"""Fields that are no part of what rows mean. What a plug-in computes is, by its fingerprints."""

LEFT_OUT: dict[str, object] = {
    "layers": "all", "heads": "all", "unused_weights": "refuse", "adapter": "refuse",
    "tokenizer": None,
}  # fmt: skip
"""Values with which a field is no part of what rows mean."""


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


class Input(BaseModel):
    """Where sequences come from: a family, and that family's own options."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)
    family: str

    @property
    def options(self) -> dict[str, Any]:
        """The options as the scan writes them; the family checks them later."""
        return dict(self.model_extra or {})


class Setting(BaseModel):
    """The fields of a scan that come before those of `KINDS`: the model and the input."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    model: Text
    """A Hub id, a local directory, a GGUF file, or bundled:NAME. Of several checkpoints a list, or
    a pattern of directories such as steps/step-*: a run each.
    """
    revision: Text | None = None
    """Branch, tag or commit on the Hub; a list of them makes a run each. Default: the default
    branch.
    """
    tokenizer: Text | None = None
    """A directory, GGUF file or Hub id of another tokenizer than the one that lies beside the
    weights. Default: that one.
    """
    weight_processing: Literal["raw", "folded"] = "raw"
    """raw: as trained. folded: LayerNorm folded in and weights centred, as older TransformerLens
    did; norms differ.
    """
    unused_weights: Literal["refuse", "ignore"] = "refuse"
    """What to do about tensors in the model's files that its config.json has no use for, such as
    those of a further layer.
    """
    adapter: Literal["refuse", "apply", "ignore"] = "refuse"
    """What to do about an adapter (adapter_config.json) that lies beside full weights. apply:
    measure the weights with it. ignore: measure the weights alone.
    """
    precision: str = "auto"
    """Number formats of the model's products. auto: the fastest with acceptable drift
    (docs/internals/precision.md).
    """
    engine: Literal["fused", "dense"] = "fused"
    """fused: never builds an attention pattern. dense: the reference, which builds every pattern
    through TransformerLens's hooks.
    """
    n_ctx: Count
    """Tokens in every sequence, the beginning-of-sequence token included."""
    bos: bool | Literal["auto"] = "auto"
    """Whether every sequence begins with the model's beginning-of-sequence token. auto: as in its
    training, as far as its tokenizer shows it.
    """
    input: Input
    """Where sequences come from: a family and its options."""
    interventions: tuple[Intervention, ...] = (NONE,)
    """Interventions of the model, each measured on the same sequences. none is the untouched model.
    """
    layers: Literal["all"] | Layers = "all"
    """Layers that are measured and stored, from 0: all, or a list such as [0, 3]. A forward pass
    ends after the last layer that is needed.
    """
    heads: Literal["all"] | Heads = "all"
    """Heads that are measured and stored: all heads of these layers, or a list such as
    ["L0H1", "L3H7"], which implies its layers.
    """
    plugins: tuple[Plugin, ...] = ()
    """Python files with statistics, inputs and interventions of one's own, or names of installed
    ones. Default: none.
    """


def _with_kinds(base: type[Setting]) -> type[Setting]:
    """`base` with a field for each kind of measurement, which holds the names of its formulas."""
    names = tuple[str, ...]
    fields: dict[str, Any] = {}
    for kind in KINDS:
        # A kind may also take a word for some of its formulas, such as "standard".
        written = Literal[kind.sets] | names if kind.sets else names
        annotation = Annotated[written, AfterValidator(kind.canonical)]
        fields[kind.field] = (annotation, Field(kind.default, description=kind.meaning))
    return create_model("Measured", __base__=base, __module__=__name__, **fields)


Measured: type[Setting] = _with_kinds(Setting)


class Scan(Measured):
    """A scan. `headcount plan` prints the text under each field beside its value.

    The formulas that it measures are in one field for each of `KINDS`, such as `statistics`.
    """

    sequences: Annotated[int, Field(ge=1, le=LARGEST_INTEGER)] | Literal["all"]
    """How many sequences; all means as many as the corpus holds."""
    sequences_per_shard: Annotated[int, Field(ge=1, le=MOST_IN_A_SHARD)] = 256
    """Sequences in one shard: the unit of work, of retry and of commit. If the scan leaves it out,
    a CPU gets fewer of a large model: about a minute's work.
    """
    batch_size: Count | Literal["auto"] = "auto"
    """Sequences in one forward pass. auto: the scan finds the fastest while it runs."""
    seed: Seed = 0
    """Seed of synthetic input. Sequence i depends only on the seed and i."""
    bad_rows: Share = 0.01
    """Largest share of a corpus's documents that may be bad. Bad documents are left out."""
    bad_rows_in_a_row: Count = 100
    """Largest number of bad documents in a row; a damaged file has many."""
    out: Text = "runs"
    """Directory that holds the runs: a path, s3://… or gs://…"""
    corpora: Text | None = None
    """Directory that holds the tokens of corpora: a path, s3://… or gs://… Default: corpora in out.
    """

    def names(self, kind: Kind) -> str | tuple[str, ...]:
        """The value of the field of a kind: names of formulas, or a word for some of them."""
        return getattr(self, kind.field)

    def formulas(self, kind: Kind) -> tuple[Formula, ...]:
        """The formulas of a kind that the scan measures, in registry order."""
        activate(self.plugins)
        return kind.select(self.names(kind))

    def kinds(self, computed: Computed | None = None) -> list[Kind]:
        """The kinds with a formula that the scan measures: all, or those computed at a time."""
        used = [kind for kind in KINDS if self.names(kind)]
        return [kind for kind in used if computed in (None, kind.computed)]

    @property
    def gradients(self) -> frozenset[str]:
        """What its formulas read that only a backward pass knows."""
        formulas = (formula for kind in self.kinds() for formula in self.formulas(kind))
        return frozenset[str]().union(*(formula.gradients for formula in formulas))

    def measured_heads(self, model: ModelSize) -> MeasuredHeads:
        """The heads that the scan measures; raises `ScanError` if the model lacks one of them."""
        return find_heads(self.layers, self.heads, model)

    def depth(self, model: ModelSize) -> int:
        """Number of layers in a forward pass. Predictions and effects on the loss need all."""
        if self.kinds("after the pass") or self.gradients:
            return model.n_layers
        return self.measured_heads(model).layers[-1] + 1

    def for_model(self, model: ModelSize) -> Self:
        """The same scan with its layers and heads in short: a list of all layers becomes "all"."""
        measured = self.measured_heads(model)
        shortest: dict[str, Any] = {"layers": "all", "heads": "all"}
        if any(measured.part(layer) is not None for layer in measured.layers):
            shortest["heads"] = measured.heads
        elif len(measured.layers) < len(model.attention_layers_or_all):
            shortest["layers"] = measured.layers
        return self.model_copy(update=shortest)

    @property
    def record(self) -> dict[str, Any]:
        """What rows mean, as a run's manifest keeps it.

        Kinds without a formula, and what `LEFT_OUT` names, are left out. So scans from before these
        fields existed keep their fingerprint. Lists are sorted where the order means nothing.
        """
        unused = {kind.field for kind in KINDS if not self.names(kind)}
        unused |= {field for field, value in LEFT_OUT.items() if getattr(self, field) == value}
        record = self.model_dump(mode="json", exclude={*WITHOUT_IDENTITY, *unused})
        for kind in KINDS:
            if isinstance(record.get(kind.field), list):
                record[kind.field].sort()
        # The untouched model comes first, as nearly every scan has it.
        texts = sorted(map(str, self.interventions))
        record["interventions"] = sorted(texts, key=str(NONE).__ne__)
        return record | {"input": in_one_order(record["input"])}

    @property
    def fingerprint(self) -> str:
        """Identifies what the scan measures; it does not depend on where the run is written."""
        return self.fingerprint_for(has_bos=True)

    def fingerprint_for(self, has_bos: bool) -> str:
        """The fingerprint where `bos = "auto"` means `has_bos`.

        It is that of `true` wherever nobody has read the model, as where a job is submitted. So it
        is for every model, and `true` has one of its own where auto means false.
        """
        bos: object = True if self.bos == "auto" else self.bos
        if self.bos is True and not has_bos:
            bos = "true, and auto is false"
        # Sorted, because the order of fields in a file must not matter.
        content = json.dumps(self.record | {"bos": bos}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:8]

    @property
    def names_shards(self) -> bool:
        """Whether the scan says itself how many sequences a shard has."""
        return "sequences_per_shard" in self.model_fields_set

    def run_id(self, name: str) -> str:
        """The id of the run of this scan. The same scan has the same id and finds its run again."""
        return run_id(name, self.fingerprint)


def run_id(name: str, fingerprint: str) -> str:
    """The id of the run of a scan, by its name and its fingerprint."""
    return f"{safe_name(name)}-{fingerprint}"


def in_one_order(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an input, those of `UNORDERED` with sorted lists.

    >>> in_one_order({"where": {"lang": ["en", "de"]}, "keys": ["b", "a"]})
    {'where': {'lang': ['de', 'en']}, 'keys': ['b', 'a']}
    """

    def ordered(value: Any) -> Any:  # noqa: ANN401 - whatever TOML holds
        if isinstance(value, dict):
            return {key: ordered(item) for key, item in cast("dict[str, Any]", value).items()}
        # Numbers and texts may stand in one list.
        return (
            sorted(cast("list[Any]", value), key=json.dumps) if isinstance(value, list) else value
        )

    return {name: ordered(v) if name in UNORDERED else v for name, v in options.items()}


def safe_name(name: str) -> str:
    """A scan's name in characters that directories, addresses, jobs and SQL all take.

    Accents are left out. Other characters become '_', unless they are letters, digits, '.', '_' or
    '-'.

    >>> [safe_name(name) for name in ("lr=0.1", "a%20b", "-x", ".toml", "Größe 3")]
    ['lr_0.1', 'a_20b', '_x', '_toml', 'Gro_e_3']
    """
    # NFKD writes an accented letter as the letter and the accent, and a ligature as its letters.
    decomposed = unicodedata.normalize("NFKD", name)
    plain = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    return re.sub(r"^[.-]|[^A-Za-z0-9._-]", "_", plain)[:LONGEST_NAME]
