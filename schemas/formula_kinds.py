"""The kinds of formulas, each with its decorator, and what their formulas may read."""

from headcount.schemas import filled_tables
from headcount.schemas.formulas import Kind

LAYER_VALUES: dict[str, str] = {
    "pattern": "attention pattern, which answers questions (headcount.schemas.pattern)",
    "q": "queries [batch pos head d_head], after any rotation",
    "unrotated_q": "queries [batch pos head d_head], before any rotation and after any norm",
    "k": "keys [batch pos head d_head], repeated where query heads share them",
    "v": "values [batch pos head d_head], repeated where query heads share them",
    "z": "Σ_k A[q,k] v[k], before W_O [batch pos head d_head]",
    "resid_pre": "residual stream before the layer [batch pos d_model]",
    "resid_post": "residual stream after the layer [batch pos d_model]",
    "b_Q": "query bias [head d_head], zero if the model has none",
    "b_K": "key bias [head d_head], zero if the model has none, repeated where query heads share "
    "it",
    "W_K": "key projection [head d_model d_head], repeated where query heads share it",
    "W_O": "output projection [head d_head d_model]",
    "effective": "effective positions EPE[j] = W_pos[j] + MLP_0(W_pos[j]) [pos d_model], NaN if "
    "they are not known",
    "rotary": "whether the model rotates q and k by their positions",
    "tokens": "token ids [batch pos]",
    "labels": "positions that the input family labels, a mask [batch pos] by label",
    "copies": "for every query, the earlier keys that hold the same token",
    "successors": "for every query, the keys that follow an earlier copy of its token",
    "dz": "∂L/∂z, L the mean next-token loss of the sequence in nats [batch pos head d_head]",
    "dv": "∂L/∂v, of all query heads that share the values, repeated for each of them [batch pos "
    "head d_head]",
    "direct_dz": "the part of ∂L/∂z that goes straight to the last norm, whose scale is frozen "
    "[batch pos head d_head]",
    "logit_dz": "∂C/∂z along the same way, C the mean centred logit of the next token [batch pos "
    "head d_head]",
    "logit_parts": "what the parts of a layer add to C, five in number [batch part]",
}
"""Every name a statistic may take as a parameter, with its TransformerLens axes."""

GRADIENTS = ("dz", "dv", "direct_dz", "logit_dz", "logit_parts")
"""Those of them that only a backward pass knows."""

DIRECT_GRADIENTS = ("direct_dz", "logit_dz", "logit_parts")
"""Those that no layer is gone back through for."""

LOGIT_PARTS = 5
"""How many `logit_parts` there are: the embeddings, all heads, what else the attention adds, the
rest of the layer, and what lies behind the stream.
"""

PREDICTION_INPUTS: dict[str, str] = {
    "tokens": "token ids [batch pos]",
    "positions_known": "whether the model adds positions and its first MLP is a module of its own",
    "token_loss": "-ln p(t[i] | t[<i]) of every token, NaN for the first [batch pos]",
    "final_logit": "logit after the last token of every token of the sequence [batch pos]",
    "final_logprob": "ln p after the last token of every token of the sequence [batch pos]",
    "divergence": "Σ_w p(w) ln(p(w) / p'(w)) over the vocabulary after the last token, p of the "
    "untouched model, p' as measured [batch]",
    "final_candidates": "the five most probable tokens after the last token, the first one first; "
    "of tokens that tie, the first [batch 5]",
    "untouched_candidates": "the same of the untouched model [batch 5]",
    "effective": "effective positions EPE[i] = W_pos[i] + MLP_0(W_pos[i]), without a norm [pos "
    "d_model]",
    "position_after_mlp": "what positions change in e + MLP_0(e), without a norm, of token "
    "embeddings e [batch pos d_model]",
    "position_after_layer": "what positions change in the stream after the first layer [batch pos "
    "d_model]",
    "first_mlp_out": "what the first MLP adds to the stream at position 0 [batch d_model]",
}
"""Every name that a prediction may take as a parameter.

The last four use the untouched weights, without any intervention. They are NaN unless
`positions_known`.
"""

FROM_UNTOUCHED = ("divergence", "untouched_candidates")
"""Those that hold a pass against one of the untouched model on the same sequences."""

LAYER_WEIGHTS: dict[str, str] = {
    "W_Q": "query projection [head d_model d_head]",
    "W_K": "key projection [head d_model d_head], repeated where query heads share it",
    "b_Q": "query bias [head d_head]",
    "b_K": "key bias [head d_head], repeated where query heads share it",
    "W_O": "output projection [head d_head d_model]",
    "read_Q": "W_Q as the stream meets it, with the norm before it [head d_model d_head]",
    "read_K": "W_K as the stream meets it, repeated where query heads share it",
    "read_V": "W_V as the stream meets it, repeated where query heads share it",
    "earlier_read_V": "read_V of an earlier layer",
    "earlier_W_O": "W_O of an earlier layer",
    "copying_eigenvalues": "eigenvalues of W_E read_V W_O read_U that are not 0, read_U with the "
    "last norm: real parts and sizes [head d_head 2]",
}
"""Weights that each layer has, and what is made of them.

A norm multiplies each coordinate by a gain, and LayerNorm subtracts the mean of the coordinates
before. Both are linear, so a matrix that reads the stream takes them over: read = N W, with
N = (I - 11ᵀ/D) diag(gain), or diag(gain) if the norm keeps the mean. The division by the length of
the stream remains.
"""

MODEL_WEIGHTS: dict[str, str] = {
    "W_pos": "position embeddings [pos d_model]",
    "components": "W_pos, centred over coordinates and positions, along its three largest "
    "principal components [pos component]",
    "effective": "effective positions EPE[j] = W_pos[j] + MLP_0(W_pos[j]), without a norm [pos "
    "d_model]",
}
"""Weights that a model has once. A statistic is undefined if the model lacks a weight it reads."""

PROFILE_AXES = (
    "key", "query", "lag", "pair", "dimension", "component", "pair of components", "candidate",
    "part",
)  # fmt: skip
"""What a profile runs over.

Keys, queries, lags d = q-k, pairs of a query and a key k ≤ q, coordinates of the residual stream,
components of a head's queries, pairs of components i ≤ j, the candidates of a search, or the parts
of a sum.
"""

PAIRED_AXES = ("pair", "pair of components")
"""Axes along which a profile is a matrix, of which one triangle is stored."""

WEIGHT_AXES = ("dimension", "position", "earlier head", "none")
"""What a weight statistic runs over: coordinates of the residual stream, positions, the heads of
earlier layers, or nothing.
"""

STATISTICS = Kind(
    **vars(filled_tables.STATISTICS),
    meaning="Columns of the heads table: standard, all that a forward pass gives, effects (all "
    "that need a backward pass), or a list of names, in which these words and options may stand, "
    "as in distant_mass(4,64).",
    computed="in every layer",
    reads=LAYER_VALUES,
    gradients=GRADIENTS,
    facts=("range", "uniform_baseline"),
    may_have_options=True,
    sets=("standard", "all", "effects"),
    default="standard",
    page="statistics.md",
)
"""They return `[batch head]`, or `[batch]` if all heads of a layer share the value."""

PROFILES = Kind(
    **vars(filled_tables.PROFILES),
    meaning="Profiles (means by key, query, lag, pair, dimension or component) of the profiles "
    "table: a list of names. Default: none.",
    computed="in every layer",
    reads=LAYER_VALUES,
    gradients=GRADIENTS,
    facts=("axis",),
    axes=PROFILE_AXES,
    averaged=True,
    page="profiles.md",
)
"""They return `[batch head index]`, or `[batch index]` if all heads of a layer share the values.

Along axis "pair" they return `[batch head query key]`, of which the pairs k ≤ q are stored, along
"pair of components" `[batch head i j]`, of which i ≤ j are stored. Every entry of every sequence
must be a number. An entry that would have no value (a query with no such lag) must not be in the
array.
"""

CURVES = Kind(
    **vars(filled_tables.CURVES),
    meaning="Profiles stored for each sequence instead of averaged, list columns of the curves "
    "table: a list of names. Default: none. Pair profiles are not allowed.",
    computed="in every layer",
    reads=LAYER_VALUES,
    gradients=GRADIENTS,
    facts=("axis",),
    page="profiles.md",
)
"""They are the profiles, which register themselves as such."""

PREDICTIONS = Kind(
    **vars(filled_tables.PREDICTIONS),
    meaning="What the model predicts, columns of the sequences table: a list of names. Default: "
    "none.",
    computed="after the pass",
    reads=PREDICTION_INPUTS,
    facts=("range", "per_token"),
    page="predictions.md",
)
"""They return `[batch]`, or `[batch pos]` if they are `per_token`."""

WEIGHT_STATISTICS = Kind(
    **vars(filled_tables.WEIGHT_STATISTICS),
    meaning="Statistics of the weights alone, in the weights table: a list of names. Default: "
    "none.",
    computed="from the weights",
    reads=LAYER_WEIGHTS | MODEL_WEIGHTS,
    facts=("axis",),
    axes=WEIGHT_AXES,
    page="weights.md",
)
"""They take weights in float64, and return `[head index]`, or `[head]` along axis "none". If heads
share the values, the axis of heads is left out.
"""

statistic = STATISTICS.formula
profile = PROFILES.formula
prediction = PREDICTIONS.formula
weight = WEIGHT_STATISTICS.formula
