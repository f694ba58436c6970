"""MLPs that work in pieces: the same numbers from smaller tensors, and only where that is sure."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from headcount.workers.model import bare_modules
from headcount.workers.model.bare_modules import mlps_in_pieces

LLAMA = LlamaMLP(LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2))
GPT2 = GPT2MLP(40, GPT2Config(n_embd=16))


@pytest.mark.parametrize("mlp", [LLAMA, GPT2.eval()], ids=lambda mlp: type(mlp).__name__)
@pytest.mark.parametrize("strided", [False, True])
@torch.inference_mode()
def test_pieces_are_small_and_make_the_same_numbers(
    mlp: nn.Module, strided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bare_modules, "ROWS_OF_PIECE", 10)
    stream = torch.randn(3, 9, 16)
    if strided:
        stream = stream.transpose(0, 1).contiguous().transpose(0, 1)
    whole = mlp(stream.contiguous())
    calls: list[int] = []
    shown: list[object] = []
    linear = next(child for child in mlp.children() if next(child.parameters(), None) is not None)
    hooks = [
        linear.register_forward_hook(lambda _module, args, _output: calls.append(args[0].shape[1])),
        mlp.register_forward_hook(lambda _module, _args, output: shown.append(output)),
    ]
    # Layers may share a module.
    with mlps_in_pieces([mlp, mlp]):
        output = mlp(stream)
    assert "forward" not in vars(mlp)
    for hook in hooks:
        hook.remove()
    assert calls == [10, 10, 7]
    # A hook of the module sees the whole output, as without pieces.
    assert len(shown) == 1
    assert shown[0] is output
    torch.testing.assert_close(output, whole, rtol=1e-6, atol=1e-7)


def test_what_may_mix_positions_is_left_whole() -> None:
    config = MixtralConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=2, num_local_experts=2
    )
    with_own_weights = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    modules = [MixtralSparseMoeBlock(config), with_own_weights, nn.Conv1d(9, 9, 3), nn.Identity()]
    with mlps_in_pieces(modules):
        assert not any("forward" in vars(module) for module in modules)
