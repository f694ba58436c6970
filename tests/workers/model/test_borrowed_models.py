"""Models in memory that are not what their library made: adapters, foreign layers, threads."""

import copy
import gc
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import peft
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import TrainerControl, TrainerState, TrainingArguments

import headcount
from headcount.workers.bridge.booting import stub_tokenizer
from headcount.workers.model.rotations import IS_NOTED
from tests.tools.pairwise import sampled
from tests.toys.toy_models import CONFIGS, D_VOCAB

TOKENS = torch.randint(D_VOCAB, (3, 12), generator=torch.Generator().manual_seed(1))
FAMILIES = {"gpt2": "gpt2", "gpt_neox": "neox", "llama": "llama-gqa"}
ENGINES = ("fused", "dense")
FEW = ["sink_mass", "entropy", "value_norm", "head_result_norm", "sink_value_result_norm"]


def model_of(name: str) -> Any:
    """A model of a family, with weights that no two layers share and biases that are not 0."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(CONFIGS[FAMILIES[name]]()).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model


@contextmanager
def in_words_of_its_own() -> Iterator[None]:
    """Within it, PEFT may warn of transformers' names and of how it adapts a layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def adapted(name: str, **options: Any) -> Any:
    """A model with a LoRA on every linear layer, whose factors are random."""
    lora = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"} | options
    with in_words_of_its_own():
        return peft.get_peft_model(model_of(name), peft.LoraConfig(**lora, init_lora_weights=False))


def merged(model: Any) -> Any:
    with in_words_of_its_own():
        return copy.deepcopy(model).merge_and_unload()


def assert_same_columns(first: pa.Table, second: pa.Table) -> None:
    for name in first.schema.names[7:]:
        ours, expected = (table[name].to_numpy() for table in (first, second))
        np.testing.assert_allclose(ours, expected, atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(("name", "engine"), sampled(list(product(FAMILIES, ENGINES)), enumerate))
def test_every_column_of_an_adapted_model_is_that_of_the_merged_one(name: str, engine: Any) -> None:
    model = adapted(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rows = headcount.measure(model, TOKENS, "all", engine=engine)
    assert_same_columns(rows, headcount.measure(merged(model), TOKENS, "all", engine=engine))
    base = headcount.measure(copy.deepcopy(model).unload(), TOKENS, FEW, engine=engine)
    for column in FEW:
        assert np.abs(rows[column].to_numpy() - base[column].to_numpy()).max() > 1e-3, column
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def two_adapters() -> Any:
    model = adapted("llama")
    second = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    with in_words_of_its_own():
        model.add_adapter("second", second)
    model.base_model.set_adapter(["default", "second"])
    return model


ADAPTED: dict[str, Callable[[], Any]] = {
    "DoRA": lambda: adapted("llama", use_dora=True),
    "two at once": two_adapters,
    "on embeddings": lambda: adapted("llama", target_modules=["embed_tokens"]),
    "on MLPs": lambda: adapted("gpt2", target_modules=["c_fc", "mlp.c_proj"]),
    "trained modules": lambda: adapted("llama", modules_to_save=["embed_tokens", "lm_head"]),
    "trained tokens": lambda: adapted("gpt_neox", trainable_token_indices=[1, 2]),
}


@pytest.mark.parametrize("kind", ADAPTED)
def test_every_kind_of_adapter_is_measured_merged(kind: str) -> None:
    model = ADAPTED[kind]()
    # Those that adapt W_O are asked for what reads it.
    columns = FEW if kind in ("DoRA", "two at once") else ["sink_mass", "entropy", "value_norm"]
    expected = headcount.measure(merged(model), TOKENS, columns)
    assert_same_columns(headcount.measure(model, TOKENS, columns), expected)


def test_adapters_are_measured_as_they_are_switched() -> None:
    model = adapted("llama")
    on = headcount.measure(merged(model), TOKENS, FEW)
    off = headcount.measure(copy.deepcopy(model).unload(), TOKENS, FEW)
    assert_same_columns(headcount.measure(model, TOKENS, FEW), on)
    with model.disable_adapter():
        assert_same_columns(headcount.measure(model, TOKENS, FEW), off)
    assert_same_columns(headcount.measure(model, TOKENS, FEW), on)
    model.merge_adapter()
    assert_same_columns(headcount.measure(model, TOKENS, FEW), on)
    # Switched off, a layer would take the adapter out of the user's weights when it runs.
    model.base_model.disable_adapter_layers()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert_same_columns(headcount.measure(model, TOKENS, FEW), off)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_change_of_weights_leaves_those_under_an_adapter_alone() -> None:
    model = adapted("gpt2")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    changes = ["none", "zero_query_bias", "scale_massive_keys"]
    rows = headcount.measure(model, TOKENS, FEW, interventions=changes)
    expected = headcount.measure(merged(model), TOKENS, FEW, interventions=changes)
    assert_same_columns(rows, expected)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_scale_that_is_set_between_two_measurements_counts(name: str) -> None:
    model = model_of(name)
    before = headcount.measure(model, TOKENS, ["score_max"])["score_max"].to_numpy()
    for part in model.modules():
        if hasattr(part, "scaling"):
            part.scaling *= 2
    after = headcount.measure(model, TOKENS, ["score_max"])["score_max"].to_numpy()
    expected = headcount.measure(copy.deepcopy(model), TOKENS, ["score_max"])
    np.testing.assert_array_equal(after, expected["score_max"].to_numpy())
    assert not np.allclose(before, after)


@pytest.mark.parametrize(
    "method", [peft.PrefixTuningConfig, peft.PromptTuningConfig], ids=["prefix", "prompt"]
)
def test_learned_vectors_before_a_sequence_are_refused(method: Any) -> None:
    prompts = method(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with in_words_of_its_own():
        model = peft.get_peft_model(model_of("llama"), prompts)
    with pytest.raises(headcount.Error, match="puts learned vectors before every sequence") as told:
        headcount.measure(model, TOKENS, FEW)
    assert "\n" not in str(told.value)


def test_an_adapter_that_cannot_be_merged_is_one_line() -> None:
    model = adapted("llama")
    for part in model.modules():
        if hasattr(part, "lora_A"):
            part.get_delta_weight = lambda adapter: torch.zeros(())
    with pytest.raises(headcount.Error, match=r"adapters \(Linear\) cannot be merged.*differ by"):
        headcount.measure(model, TOKENS, FEW)


class Doubled(nn.Linear):
    """A layer that computes something else than its weight says, as quantised ones do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Around(nn.Module):
    """The same around a layer, whose weight it shows as its own."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> torch.Tensor:
        return self.inner.weight

    @property
    def bias(self) -> torch.Tensor:
        return self.inner.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)


def with_foreign(name: str, ending: str, kind: Any) -> Any:
    """A model in which every module of a name is replaced by a foreign one."""
    model = model_of(name)
    for path, part in list(model.named_modules()):
        if path.endswith(ending):
            foreign = Around(part)
            if kind is Doubled:
                foreign = Doubled(part.in_features, part.out_features, part.bias is not None)
                foreign.load_state_dict(part.state_dict())
            model.set_submodule(path, foreign)
    return model


@pytest.mark.parametrize(("name", "kind"), [("o_proj", Doubled), ("q_proj", Around)])
def test_no_weight_is_read_of_a_layer_that_is_not_plain(name: str, kind: Any) -> None:
    model = with_foreign("llama", name, kind)
    told = rf"W_O of layer 0 cannot be read, because {name} \({kind.__name__}\) is no plain layer"
    for engine in ("fused", "dense"):
        with pytest.raises(headcount.Error, match=told):
            headcount.measure(model, TOKENS, ["head_result_norm"], engine=engine)
    rows = [headcount.measure(model, TOKENS, ["entropy"], engine=e) for e in ("fused", "dense")]
    assert_same_columns(*rows)


def test_position_embeddings_that_are_not_plain_are_not_read() -> None:
    model = with_foreign("gpt2", "wpe", Around)
    with pytest.raises(headcount.Error, match=r"positions cannot be read, because Around"):
        headcount.measure(model, TOKENS, ["sink_position_cosine"])


@pytest.mark.parametrize("kind", [Doubled, Around])
def test_a_bridge_with_other_logits_does_not_measure(kind: Any) -> None:
    """It splits GPT-NeoX's one projection by its weight, whatever the module computes."""
    model = with_foreign("gpt_neox", "query_key_value", kind)
    with pytest.raises(headcount.Error, match=r"does not compute the logits of GPTNeoXForCausalLM"):
        headcount.measure(model, TOKENS, ["entropy"], engine="dense")
    assert np.ptp(headcount.measure(model, TOKENS, ["entropy"])["entropy"].to_numpy()) > 0


# What a measurement leaves behind


def test_four_threads_measure_one_model_alike() -> None:
    model = model_of("llama")
    expected = headcount.measure(copy.deepcopy(model), TOKENS, FEW)
    with ThreadPoolExecutor(4) as threads:
        measured = [threads.submit(headcount.measure, model, TOKENS, FEW) for _ in range(8)]
    for rows in measured:
        assert rows.result().equals(expected)


def bridge() -> Any:
    """A bridge whose weights are TransformerLens's own."""
    from transformer_lens.model_bridge import TransformerBridge

    sizes = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_head": 8, "d_mlp": 48}
    texts = {"act_fn": "gelu", "normalization_type": "LN"}
    config = {"n_ctx": 16, "d_vocab": D_VOCAB, "positional_embedding_type": "standard"}
    boot: Any = vars(TransformerBridge)["boot_native"]
    return boot(sizes | texts | config | {"seed": 0})


def compiled(model: Any, what: str) -> Any:
    """The model with nothing, all of it, or each of its layers compiled."""
    if what == "layers":
        layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
        for index, layer in enumerate(layers):
            compiled_layer: Any = torch.compile(layer, backend="aot_eager")
            layers[index] = compiled_layer
    return torch.compile(model, backend="aot_eager") if what == "model" else model


def trained(model: Any, what: str, between_steps: Callable[[Any], object]) -> dict[str, Any]:
    """Losses, gradients, weights and the optimizer's state of three steps, and what was compiled
    after the first one, when everything has run once.
    """
    torch._dynamo.reset()
    copied = copy.deepcopy(model)
    called = compiled(copied, what)
    optimizer = torch.optim.AdamW(copied.parameters(), lr=0.01)
    kept: dict[str, Any] = {}
    torch.manual_seed(0)  # For dropout.
    for step in range(3):
        copied.train()
        output = called(TOKENS)
        logits = getattr(output, "logits", output)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept[f"loss {step}"] = loss.detach()
        if step == 0:
            counters.clear()
        between_steps(called)
    kept |= {f"gradient {name}": weight.grad for name, weight in copied.named_parameters()}
    kept |= {f"weight {name}": weight.detach() for name, weight in copied.named_parameters()}
    for number, state in optimizer.state_dict()["state"].items():
        kept |= {f"{name} {number}": value for name, value in state.items()}
    return kept | {"graphs": torch.tensor(counters["stats"]["unique_graphs"])}


def attributes_of_libraries() -> dict[tuple[str, str], Any]:
    """What every file of the libraries names, and what transformers calls as attention."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    names: dict[tuple[str, str], Any] = {}
    for name, file in list(sys.modules.items()):
        if name.partition(".")[0] in ("transformers", "transformer_lens"):
            # The compiler leaves a name of its own there, in the files that it has read.
            named = {key: value for key, value in vars(file).items() if not key.startswith("__")}
            names |= {(name, key): value for key, value in named.items()}
    for registry in (AttentionInterface, AttentionMaskInterface):
        functions = dict(registry._global_mapping)
        names |= {(registry.__name__, key): function for key, function in functions.items()}
        names[registry.__name__, ""] = len(functions)
    level = logging.getLogger("transformers").level
    return names | {("", "warnings"): list(warnings.filters), ("", "level"): level}


def by_callback(model: Any) -> None:
    callback = headcount.MeasureCallback(TOKENS, every=1, statistics=["entropy"])
    state = TrainerState(global_step=1, is_world_process_zero=True)
    callback.on_step_end(TrainingArguments(), state, TrainerControl(), model=model)


@pytest.mark.filterwarnings("ignore")  # The compiler warns of its own doing.
@pytest.mark.parametrize(
    ("kind", "what", "measure"),
    [
        ("gpt2", "nothing", lambda model: headcount.measure(model, TOKENS, FEW, engine="dense")),
        ("bridge", "nothing", lambda model: headcount.measure(model, TOKENS, FEW)),
        ("llama", "nothing", by_callback),
        *(
            pytest.param(
                kind,
                what,
                lambda model: headcount.measure(model, TOKENS, "all"),
                marks=pytest.mark.long,
            )
            for kind in ("gpt2", "llama", "bridge")
            for what in ("model", "layers")
        ),
    ],
)
def test_training_goes_on_as_if_nothing_had_been_measured(
    kind: str, what: str, measure: Callable[[Any], object]
) -> None:
    model = bridge() if kind == "bridge" else model_of(kind)
    expected = trained(model, what, lambda _: None)
    before = attributes_of_libraries()
    measured = trained(model, what, measure)
    after = attributes_of_libraries()
    changed = [
        key
        for key, value in before.items()
        if after.get(key) is not value and not (key[0] == "" and after[key] == value)
    ]
    assert changed == []
    assert measured.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(measured[key], expected[key])] == []


def hugging_face_bridge() -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    with stub_tokenizer() as tokenizer:
        return TransformerBridge.boot_transformers(
            "toy", hf_model=model_of("llama"), tokenizer=tokenizer
        )


def with_function_of_itself() -> Any:
    model = model_of("llama")
    model.model.layers[0].mlp.shown = lambda: model
    return model


@pytest.mark.parametrize(
    "make",
    [
        partial(model_of, "gpt2"),
        lambda: model_of("llama").bfloat16(),
        partial(adapted, "llama"),
        bridge,
        hugging_face_bridge,
        with_function_of_itself,
    ],
    ids=["transformers", "half precision", "PEFT", "bridge", "its bridge", "function"],
)
def test_a_model_that_was_measured_is_freed_with_its_last_name(make: Any) -> None:
    model = make()
    for _ in range(2):
        headcount.measure(model, TOKENS, ["entropy"])
        # Also where nothing could be measured.
        with pytest.raises(headcount.Error):
            headcount.measure(model, TOKENS, ["nothing"])
    model_itself = weakref.ref(model)
    weights = [StorageWeakRef(weight.untyped_storage()) for weight in model.parameters()]
    del model
    gc.collect()
    assert model_itself() is None
    assert all(weight.expired() for weight in weights)


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=pytest.mark.long) for kind in ("gpt2", "llama")), "PEFT", "bridge"],
)
def test_a_default_device_without_values_changes_no_row(kind: str) -> None:
    model = {"PEFT": partial(adapted, "llama"), "bridge": bridge}.get(kind, partial(model_of, kind))
    first = model()
    expected = headcount.measure(copy.deepcopy(first), TOKENS, FEW)
    for _ in range(2):
        with torch.device("meta"):
            assert headcount.measure(first, TOKENS, FEW).equals(expected)
            assert torch.zeros(1).is_meta


def odd_tokens() -> Iterator[Any]:
    """What somebody may take for tokens."""
    yield from (TOKENS.to("meta"), [TOKENS[0].to("meta")], TOKENS.to_sparse(), TOKENS.bfloat16())
    yield from (TOKENS.float(), TOKENS > 3, TOKENS[None], TOKENS[0, 0], TOKENS[:0], TOKENS[:, :0])
    yield torch.nested.nested_tensor([TOKENS[0], TOKENS[1, :5]], layout=torch.jagged)
    yield from ([[1, 2], [3]], [["a"]], "text", {"input_ids": TOKENS}, None, [[10**30, 1]])


def test_tokens_that_are_none_are_refused_in_a_line_and_all_integers_are_read() -> None:
    model = model_of("llama")
    for tokens in odd_tokens():
        for refuse in (partial(headcount.measure, model), headcount.MeasureCallback):
            with pytest.raises(headcount.Error, match=r"^tokens: expected") as told:
                refuse(tokens)
            assert "\n" not in str(told.value)
    expected = headcount.measure(model, TOKENS, FEW)
    for kind in (torch.uint8, torch.int16, torch.int32, torch.uint16):
        assert headcount.measure(model, TOKENS.to(kind), FEW).equals(expected)
    for tokens in (TOKENS.numpy().astype(np.uint64), TOKENS.tolist(), [*TOKENS]):
        assert headcount.measure(model, tokens, FEW).equals(expected)


def on_meta(part: str) -> Any:
    model = model_of("llama")
    (model.get_submodule(part) if part else model).to("meta")
    return model


@pytest.mark.parametrize("part", ["", "model.layers.0", "model.rotary_emb"])
def test_a_model_whose_values_are_not_all_here_is_refused_in_a_line(part: str) -> None:
    with pytest.raises(
        headcount.Error, match="expected all weights on one CPU or one CUDA"
    ) as told:
        headcount.measure(on_meta(part), TOKENS, FEW)
    assert "\n" not in str(told.value)


def test_what_is_no_causal_language_model_is_refused_in_a_line() -> None:
    from transformers.models.clip.configuration_clip import CLIPConfig
    from transformers.models.clip.modeling_clip import CLIPModel

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"intermediate_size": 16}
    text = small | {"vocab_size": D_VOCAB}
    vision = small | {"image_size": 8, "patch_size": 4}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    with torch.inference_mode():
        frozen = model_of("gpt2")
    for refused, column in ((model, "entropy"), (frozen, "effect_mean")):
        with pytest.raises(headcount.Error, match="cannot be measured") as told:
            headcount.measure(refused, TOKENS, [column])
        assert "\n" not in str(told.value)
    # The modules are to blame, and not that somebody computes without gradients.
    with torch.inference_mode():
        assert headcount.measure(model_of("llama"), TOKENS, ["entropy"]).num_rows == 3 * 8


def test_a_pass_that_fails_leaves_the_libraries_as_before() -> None:
    from transformers.models.llama import modeling_llama

    model = model_of("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.fill_(torch.nan)
    with pytest.raises(headcount.Error):
        headcount.measure(model, TOKENS, FEW)
    assert not hasattr(modeling_llama.apply_rotary_pos_emb, IS_NOTED)
