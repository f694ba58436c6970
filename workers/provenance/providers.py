"""Which code computes what a formula reads, and the fingerprint of a column, which covers it.

A formula alone does not say what its column holds. For example, `loss` is the mean of `token_loss`,
so a change in the code that makes `token_loss` changes the values of `loss`.
"""

from functools import cache
from pathlib import Path
from typing import Any

from headcount.schemas.fingerprints import digest, fingerprint, module_code
from headcount.schemas.formula_kinds import GRADIENTS
from headcount.schemas.formulas import Formula
from headcount.schemas.packages import PACKAGE
from headcount.schemas.registry import Entry

MODEL_CODE = ("workers.model.model",)
ENGINE_CODE = (
    *MODEL_CODE,
    "workers.model.attention_layers",
    "workers.bridge.dense_engine",
    "workers.engine.fused_engine",
    "workers.engine.changes",
    "workers.engine.number_formats",
)
PATTERN_CODE = (
    *ENGINE_CODE,
    "workers.engine.dense_pattern",
    "workers.engine.fused_pattern",
    "workers.engine.tile_sweep",
    "workers.kernel.sweep_kernel",
)
WEIGHT_CODE = (*MODEL_CODE, "workers.model.layer_weights")
CIRCUIT_CODE = (*WEIGHT_CODE, "workers.model.circuit")
MATCH_CODE = ("workers.engine.token_pairs",)
PREDICTION_CODE = (*ENGINE_CODE, "workers.engine.prediction_inputs")

GRADIENT_CODE = (
    *PATTERN_CODE,
    "workers.engine.prediction_inputs",
    "workers.gradients.gradient_engine",
    "workers.gradients.attention_gradient",
    "workers.gradients.stream_writes",
)

PROVIDERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("tokens", "labels"), ()),
    **dict.fromkeys(("copies", "successors"), MATCH_CODE),
    **dict.fromkeys(("q", "k", "v", "resid_pre", "resid_post"), ENGINE_CODE),
    "unrotated_q": (*ENGINE_CODE, "workers.model.rotations"),
    **dict.fromkeys(("pattern", "z"), PATTERN_CODE),
    **dict.fromkeys(GRADIENTS, GRADIENT_CODE),
    **dict.fromkeys(("b_Q", "b_K", "W_Q", "W_K", "W_O"), WEIGHT_CODE),
    **dict.fromkeys(("read_Q", "read_K", "read_V", "earlier_read_V", "earlier_W_O"), MODEL_CODE),
    **dict.fromkeys(("copying_eigenvalues", "W_pos", "components", "rotary"), MODEL_CODE),
    **dict.fromkeys(("effective", "first_mlp_out"), CIRCUIT_CODE),
    **dict.fromkeys(
        ("positions_known", "token_loss", "final_logit", "final_logprob"), PREDICTION_CODE
    ),
    **dict.fromkeys(("divergence", "final_candidates", "untouched_candidates"), PREDICTION_CODE),
    **dict.fromkeys(
        ("position_after_mlp", "position_after_layer"), (*PREDICTION_CODE, *CIRCUIT_CODE)
    ),
}
"""The modules that hand over each thing that a formula reads.

What came before it in the forward pass does not count, or a change in one place would give every
column another meaning. Tokens and labels come from the input family, which has a fingerprint of its
own.
"""

REDUCED_BY: dict[str, tuple[str, ...]] = {
    "statistic": ("workers.measurements.undefined",),
    "profile": ("workers.measurements.undefined", "workers.measurements.moments"),
    "weight statistic": ("workers.measurements.weight_tables",),
}
"""The modules that stand between the formulas of a kind and their table."""


def provider_modules(formula: Formula) -> list[str]:
    """The modules that compute what a formula reads, and what its rule of definedness reads."""
    modules = set(REDUCED_BY.get(formula.kind.word, ()))
    for name in (*formula.parameters, *formula.conditions):
        modules.update(PROVIDERS[name])
    return sorted(modules)


def column_fingerprint(formula: Formula, root: Path = PACKAGE) -> str:
    """Changes if and only if the code changes that computes a column.

    That is the formula's own code and the code of what it reads. `root` holds the latter.
    """
    codes = [_module_code(root, module) for module in provider_modules(formula)]
    return digest([fingerprint(*formula.code), *codes])


def entry_record(entry: Entry, code: str) -> dict[str, Any]:
    """What a run's manifest keeps of an input or an intervention; `code` is its fingerprint."""
    return {"meaning": entry.meaning, "fingerprint": code}


def column_record(formula: Formula) -> dict[str, Any]:
    """What a run's manifest keeps of a column."""
    return formula.record | {"fingerprint": column_fingerprint(formula)}


@cache
def _module_code(root: Path, module: str) -> str:
    # Without the texts of errors: rewording one does not change what a column means.
    file = root / f"{module.replace('.', '/')}.py"
    return module_code(file.read_bytes(), with_errors=False)
