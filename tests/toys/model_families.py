"""A tiny random model of every family of causal language models that transformers knows.

Configurations are derived from a family's defaults: its own layer types and switches, with small
sizes. A window is shorter than the sequences.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils import logging

from headcount.schemas.errors import HeadcountError
from headcount.schemas.reasons import reason
from headcount.schemas.scans.scan import Scan
from headcount.workers.model.info.description import describe
from headcount.workers.model.model import Model
from headcount.workers.replica import Replica
from tests import ROOT
from tests.toys.toy_models import draw_weights, toy_scan

N_LAYERS, N_HEADS = 2, 4
WINDOW, N_CTX, D_VOCAB = 8, 24, 64

LARGEST_SIZE = 7_000_000
"""Parameters of a tiny model. More mean that a size is not set."""

NAMES_OF_SIZES = """
32: hidden_size d_model n_embd dim word_embed_proj_dim embedding_size emb_dim input_embedding_size
  lru_width hidden_size_per_layer_input ple_embed_dim pronunciation_embed_dim shape_embed_dim
  backbone_hidden_size
48: intermediate_size ffn_dim n_inner d_inner ffn_hidden_size dff dim_ff decoder_ffn_dim
  encoder_ffn_dim shared_intermediate_size expert_ffn_hidden_size shared_experts_intermediate_size
  feed_forward_size
16: moe_intermediate_size shared_expert_intermediate_size kv_lora_rank q_lora_rank laurel_rank
  hc_lowrank mamba_d_state mamba_d_ssm ssm_state_size state_size
2: num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers
1: encoder_layers num_encoder_layers n_group topk_group num_expert_group zero_expert_num
  bos_token_id
4: num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
  num_decoder_attention_heads num_encoder_attention_heads
2: num_key_value_heads
8: head_dim global_head_dim d_kv attention_head_dim
4: qk_rope_head_dim rotary_dim num_experts num_local_experts n_routed_experts moe_num_experts
8: qk_nope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim
12: v_head_dim
2: linear_num_key_heads linear_num_value_heads linear_num_heads num_experts_per_tok moe_k moe_topk
  num_experts_per_token eos_token_id
64: max_position_embeddings n_positions max_seq_len max_target_positions max_source_positions
  model_max_length pronunciation_vocab_size shape_vocab_size ngram_vocab_size_base
8: sliding_window window_size attention_window_size attention_chunk_size local_attention
64: vocab_size vocab_size_per_layer_input
0: pad_token_id
"""
"""Sizes of a tiny model, and the names that configurations have for them."""

SIZES = {
    name: int(size)
    for size, names in re.findall(r"(\d+): ([a-z_\s]+)", NAMES_OF_SIZES)
    for name in names.split()
}

WINDOWS = ("sliding_window", "window_size", "attention_window_size", "attention_chunk_size")
"""Sizes that a family has only if its default has them."""

OPTIONAL = ("head_dim", "q_lora_rank", "num_experts", "n_routed_experts", "rotary_dim", "d_kv")
"""Sizes that mean another kind of model if the default leaves them out."""

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8}
HALF_MAMBA = {**MAMBA, "mamba_expand": 2}

EXTRA: dict[str, dict[str, Any]] = {
    "axk1": {"num_key_value_heads": 4, "head_dim": 4},
    "bailing_hybrid": {"num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 16},
    "bamba": {**HALF_MAMBA, "attn_layer_indices": [1]},
    "bloom": {"seq_length": 64},
    "codegen": {"rotary_dim": 4},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "falcon_h1": {**HALF_MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {
        **HALF_MAMBA,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_key_value_heads": 2,
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
    | {"mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "ministral": {"head_dim": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "hidden_size": 32},
    "recurrent_gemma": {"num_hidden_layers": 3, "max_position_embeddings": 64},
    "youtu": {"num_key_value_heads": 4, "head_dim": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_headdim": 8}
    | {"n_mamba_heads": 8, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip
"""What a family needs beside the sizes, because its fields depend on each other."""


def families() -> list[str]:
    """Every family, by its `model_type`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str) -> Any:
    """The configuration of a tiny model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _tiny(CONFIG_MAPPING[family], EXTRA.get(family, {}))


def _tiny(config_class: Any, extra: dict[str, Any]) -> Any:
    try:
        default = config_class()
    except Exception:
        # Some families refuse their own defaults.
        default = config_class(**extra)
    fields = _sizes(config_class, default) | _layer_types(config_class, default)
    for name in getattr(config_class, "sub_configs", {}):
        part = getattr(default, name, None)
        if part is not None and name not in extra:
            fields[name] = _tiny(type(part), EXTRA.get(part.model_type, {}))
    # A decoder that was made from an encoder's classes.
    if "is_decoder" in vars(default):
        fields["is_decoder"] = True
    fields |= extra
    # A family has as many layers as its list of types says.
    for types in ("layer_types", "layers_block_type"):
        if types in fields:
            fields["num_hidden_layers"] = len(fields[types])
    return config_class(**fields)


def _sizes(config_class: Any, default: Any) -> dict[str, Any]:
    """The sizes of the fields that a configuration has."""
    aliases = config_class.attribute_map
    names = {*vars(default), *getattr(config_class, "__dataclass_fields__", {})}
    sizes: dict[str, Any] = {}
    for name in names & SIZES.keys() - aliases.keys():
        value = _value(default, name)
        if isinstance(value, list | tuple) or (value is None and name in WINDOWS + OPTIONAL):
            continue
        sizes[name] = SIZES[name]
    n_heads = _value(default, "num_attention_heads")
    if _value(default, "num_key_value_heads") == n_heads and "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = N_HEADS
    return sizes


def _value(config: Any, name: str) -> Any:
    """A field; None if it differs by layer."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def _layer_types(config_class: Any, default: Any) -> dict[str, list[str]]:
    """A few layers in which every type of layer of the family occurs, in its own order."""
    name = config_class.attribute_map.get("layer_types", "layer_types")
    if isinstance(getattr(config_class, name, None), property):
        return {}  # It follows from other fields.
    types = _value(default, name)
    if not isinstance(types, list) or not types:
        return {}
    first = types[:N_LAYERS]
    distinct = list(dict.fromkeys(types))
    if set(first) == set(distinct):
        return {name: first}
    repeated = distinct * N_LAYERS
    return {name: repeated[: max(N_LAYERS, len(distinct))]}


def tiny_model(family: str, seed: int = 0) -> nn.Module:
    """A tiny model with random weights of sensible scale."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    size = sum(parameter.numel() for parameter in empty.parameters())
    if size > LARGEST_SIZE:
        raise ValueError(f"its tiny model has more than {LARGEST_SIZE:,} parameters")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    draw_weights(model, seed)
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class FamilyRow:
    """What became of one family."""

    family: str
    engine: str  # `fused`, `dense`, `refused`, or `not tried`
    facts: str = ""  # what the tiny model's attention has, in words
    reason: str = ""  # why it is not fused, or what it goes without
    difference: float = 0.0  # the largest from what the model's own patterns say

    @property
    def answer(self) -> str:
        """The beginning of its row in models.md, which families with one answer share."""
        return f"| {self.engine} | {self.facts} | {short(self.reason)} |"


def short(reason: str) -> str:
    """A reason without advice, and without what is true of one family alone.

    >>> short("a mamba model names no heads: it has none to measure; choose another model")
    'it names no heads: it has none to measure'
    >>> short("transformers cannot run it (Language unknown. Please set it); no bridge")
    'transformers cannot run it (Language unknown)'
    """
    text = re.split(r"; |\. | <class", reason)[0]
    text = re.sub(r"^a \S+ model names", "it names", text)
    text = text.removesuffix(", which the fused engine does not know")
    return text + ")" * (text.count("(") > text.count(")"))


def family_row(family: str, folder: Path) -> FamilyRow:
    """Measure a tiny model of a family from files, and compare with its own attention."""
    # The files have a short name of their own, which no place of theirs makes longer in a message.
    with chdir(folder):
        return _row(family, Path(family))


def _row(family: str, path: Path) -> FamilyRow:
    try:
        model = tiny_model(family)
        model.save_pretrained(path)  # pyright: ignore[reportCallIssue]
    except Exception as error:
        # Libraries that are not installed, and configurations that need more than sizes.
        problem = f"{type(error).__name__}: {_one_line(error, path)}"
        return FamilyRow(family, "not tried", reason=problem)
    try:
        info = describe(path)
        replica = Replica(info, _scan(path, "fused"), "cpu")
        measured = replica.measure(_tokens()).heads
    except HeadcountError as error:
        return _dense_row(family, path, _one_line(error, path))
    finally:
        shutil.rmtree(path)
    facts = _facts_in_words(replica.model, model)
    note = "no bridge" if replica.model.bridge().problem else ""
    layers = info.attention_layers_or_all
    patterns = _own_patterns(model, len(layers))
    if patterns is None:
        return FamilyRow(family, "fused", facts, (note + ", compared by its stream").strip(", "))
    # How many keys a query of a layer sees at most.
    layer_facts = map(replica.model.facts, layers)
    windows = [N_CTX if each is None else each.window or N_CTX for each in layer_facts]
    own = _own_statistics(patterns, windows)
    difference = max(float(np.abs(measured[name] - own[name]).max()) for name in own)
    return FamilyRow(family, "fused", facts, note, difference)


def _dense_row(family: str, path: Path, problem: str) -> FamilyRow:
    """The row of a family that the fused engine refuses."""
    reason_of_refusal = problem.removesuffix("; use engine = 'dense'")
    # Nothing is tried where not even the description exists: both engines need it.
    if reason_of_refusal == problem:
        return FamilyRow(family, "refused", reason=problem)
    try:
        tiny_model(family).save_pretrained(path)  # pyright: ignore[reportCallIssue]
        Replica(describe(path), _scan(path, "dense"), "cpu").measure(_tokens())
    except HeadcountError:
        return FamilyRow(family, "refused", reason=reason_of_refusal)
    return FamilyRow(family, "dense", reason=reason_of_refusal)


def _scan(path: Path, engine: str) -> Scan:
    statistics = ["sink_mass", "previous_token_score", "self_attention", "entropy"]
    return toy_scan(model=str(path), n_ctx=N_CTX, engine=engine, statistics=statistics)


def _tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(3, D_VOCAB, size=(2, N_CTX)).astype(np.int32)


def _own_patterns(model: Any, n_layers: int) -> Tensor | None:
    """The patterns `[batch layer head query key]` that transformers computes; None if it gives
    none, or those of other layers.
    """
    tokens = torch.from_numpy(_tokens()).long()
    with torch.inference_mode(), _with_sinks(model):
        outputs = model(tokens, output_attentions=True, use_cache=False)
    shape = (len(tokens), N_HEADS, N_CTX, N_CTX)
    patterns = [
        pattern
        for pattern in getattr(outputs, "attentions", None) or ()
        if isinstance(pattern, Tensor) and pattern.shape == shape
    ]
    return torch.stack(patterns, 1).double() if len(patterns) == n_layers else None


SINK_AFTER_SOFTMAX = ("granite_swa", "granitemoe_swa")
"""Families whose eager attention takes the sink's share from its output, and shows patterns without
it.
"""


@contextmanager
def _with_sinks(model: Any) -> Iterator[None]:
    """Within this context, the patterns that a model shows are those that made its output."""
    if model.config.model_type not in SINK_AFTER_SOFTMAX:
        yield
        return
    library: Any = sys.modules[type(model).__module__]
    eager = library.eager_attention_forward

    def scaled_patterns(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        output, pattern = eager(module, query, key, value, *args, **options)
        values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        without_sink = pattern @ values
        with_sink = output.transpose(1, 2)
        share = (with_sink * without_sink).sum(-1) / without_sink.square().sum(-1)
        return output, pattern * share[..., None]

    library.eager_attention_forward = scaled_patterns
    try:
        yield
    finally:
        library.eager_attention_forward = eager


def _own_statistics(patterns: Tensor, windows: list[int]) -> dict[str, np.ndarray]:
    """The statistics `[batch layer head]` by their definitions."""
    # Key 0 is seen by the queries of one window; query 0 has no choice.
    first_key = patterns[..., 0]
    sinks = [first_key[:, i, :, 1:window].mean(-1) for i, window in enumerate(windows)]
    return {
        "sink_mass": torch.stack(sinks, 1).numpy(),
        "previous_token_score": patterns.diagonal(-1, -2, -1).mean(-1).numpy(),
        "self_attention": patterns.diagonal(0, -2, -1).mean(-1).numpy(),
        "entropy": -torch.special.xlogy(patterns, patterns).sum(-1).mean(-1).numpy(),
    }


def _facts_in_words(model: Model, own: nn.Module) -> str:
    """What the attention of a model has beside softmax, causal mask and scale."""
    facts = [model.facts(layer) for layer in model.info.attention_layers_or_all]
    names = {"window": "window", "sink": "sinks", "soft_cap": "cap", "slopes": "ALiBi"}
    words = [
        word
        for name, word in names.items()
        if any(getattr(fact, name, None) is not None for fact in facts)
    ]
    parts = [name for name, _ in own.named_modules()]
    words += ["MLA"] * any("kv_a_proj" in name for name in parts)
    words += ["MoE"] * any("expert" in name for name in parts)
    attending, layers = len(facts), model.info.n_layers
    if attending < layers:
        words.append(f"{attending} of {layers} layers attend")
    return ", ".join(words)


def _one_line(error: Exception, path: Path) -> str:
    """A reason in one line, without the name of the model."""
    text = reason(error)
    for prefix in (f"{path}/config.json: ", f"{path}: "):
        text = text.removeprefix(prefix)
    return text.replace("|", "/")


def expected_answers() -> dict[str, str]:
    """What docs/reference/models.md says of each family, `FamilyRow.answer`."""
    table = GENERATED.findall(MODELS_PAGE.read_text(encoding="utf-8"))[0]
    expected: dict[str, str] = {}
    for match in re.finditer(r"^(\| (?:.* )?\|) ([^|]+) \|$", table, re.MULTILINE):
        expected |= dict.fromkeys(match[2].split(", "), match[1])
    del expected["families"]
    return dict(sorted(expected.items()))


def table_of_families() -> str:
    """The table of docs/reference/models.md."""
    with TemporaryDirectory() as folder:
        rows = [family_row(family, Path(folder)) for family in families()]
    counts = {engine: sum(row.engine == engine for row in rows) for engine in ENGINES}
    summary = ", ".join(f"{counts[engine]} {engine}" for engine in ENGINES)
    rows.sort(key=lambda row: (ENGINES.index(row.engine), row.answer, row.family))
    names = {
        answer: ", ".join(row.family for row in alike)
        for answer, alike in groupby(rows, lambda row: row.answer)
    }
    lines = [
        f"transformers {version('transformers')} knows {len(rows)} families: {summary}.",
        "",
        "| engine | attention | remark | families |",
        "|---|---|---|---|",
        *(f"{answer} {families} |" for answer, families in names.items()),
    ]
    return "\n".join(lines) + "\n"


ENGINES = ("fused", "dense", "refused", "not tried")

MODELS_PAGE = ROOT / "docs" / "reference" / "models.md"

GENERATED = re.compile(
    r"(?<=<!-- generated by python -m tests.toys.model_families -->\n).*(?=<!-- end -->)", re.DOTALL
)
"""The part of the page that is written here."""


def write_page() -> None:
    """Write the table of docs/reference/models.md."""
    prepare_libraries()
    table = table_of_families()
    text = MODELS_PAGE.read_text(encoding="utf-8")
    MODELS_PAGE.write_text(GENERATED.sub(lambda _: table, text), encoding="utf-8")


def prepare_libraries() -> None:
    """Keep transformers from printing about every tiny model."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    write_page()
