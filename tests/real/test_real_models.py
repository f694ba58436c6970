"""Two public models: what their files say, and their patterns as transformers builds them.

`make real` fetches them; where they are not, there is nothing to compare.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headcount.queries.ask.asking import open_runs
from headcount.workers.model.info.description import describe
from tests.toys.commands import printed

FOLDER = Path(os.environ.get("HEADCOUNT_REAL", "."))
SEQUENCES, N_CTX, PERIOD = 2, 81, 40
STATISTICS = ["sink_mass", "previous_token_score", "induction_score", "entropy", "value_norm"]

SMOLLM2, GEMMA = "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m.Q4_K_M.gguf"

pytestmark = pytest.mark.long


@pytest.fixture(params=[SMOLLM2, GEMMA])
def name(request: pytest.FixtureRequest) -> str:
    """A public model that lies there."""
    if not (FOLDER / request.param).exists():
        pytest.skip(f"{FOLDER / request.param} is not there; make real fetches it")
    return request.param


def test_a_public_model_begins_as_in_its_training_and_says_what_its_file_has_lost(name: str):
    info = describe(FOLDER / name)
    evidence = {
        SMOLLM2: "its tokenizer puts none before a text, and it does not end texts",
        GEMMA: "its tokenizer puts it before every text",
    }
    assert info.bos.evidence == evidence[name]
    assert info.begins_with_bos("auto") == (name == GEMMA)
    formats = {SMOLLM2: "Q4_1 (tensors: 210 Q4_1, 61 F32, 1 Q8_0)", GEMMA: "Q4_K_M (tensors: "}
    assert f"the weights are those of a GGUF file, {formats[name]}" in info.notes[0]
    lost = "its tokenizer (smollm) has lost the step that splits off digits: "
    assert [note.startswith(lost) for note in info.notes[1:]] == [True] * (name == SMOLLM2)


def test_rows_of_a_public_model_are_its_own_patterns(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    scan = tmp_path / "real.toml"
    scan.write_text('[input]\nfamily = "repeated_random"\ndistinct = true\n')
    fields = {
        "model": FOLDER / name, "out": tmp_path, "n_ctx": N_CTX, "sequences": SEQUENCES,
        "input.period": PERIOD, "statistics": STATISTICS, "predictions": ["loss"],
    }  # fmt: skip
    words = (word for field, value in fields.items() for word in ("--set", f"{field}={value}"))
    printed("scan", scan, *words, "--replicas", 0)

    model = AutoModelForCausalLM.from_pretrained(
        FOLDER, gguf_file=name, dtype=torch.float64, attn_implementation="eager"
    )
    database = open_runs(tmp_path)
    for sequence in range(SEQUENCES):
        of_sequence = f"WHERE sequence = {sequence}"
        ((tokens, loss),) = database.rows(f"SELECT tokens, loss FROM sequences {of_sequence}")
        columns, expected_loss = definitions(model, torch.tensor(tokens))
        assert loss == pytest.approx(expected_loss, abs=1e-4)
        for statistic, expected in columns.items():
            sql = f"SELECT {statistic} FROM heads {of_sequence} ORDER BY layer, head"
            measured = np.reshape([value for (value,) in database.rows(sql)], expected.shape)
            np.testing.assert_allclose(measured, expected, rtol=3e-5, atol=3e-5, err_msg=statistic)


@torch.inference_mode()
def definitions(model: Any, tokens: torch.Tensor) -> tuple[dict[str, np.ndarray], float]:
    """Values [layer head] of one sequence by statistic, each by its definition; and the loss."""
    values: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda _, __, v: values.append(v[0]))
    output = model(tokens[None], output_attentions=True, labels=tokens[None])
    patterns = torch.stack(output.attentions)[:, 0]  # layer, head, query, key
    n_layers, n_heads, n_ctx, _ = patterns.shape
    later = range(1, n_ctx)
    behind_copies = {
        query: [key + 1 for key in range(query) if tokens[key] == tokens[query]]
        for query in range(n_ctx)
    }
    value_norms = torch.stack(values).view(n_layers, n_ctx, -1, model.config.head_dim).norm(dim=-1)
    by_kv_head = value_norms.mean(1)
    columns = {
        "sink_mass": [patterns[:, :, query, 0] for query in later],
        "previous_token_score": [patterns[:, :, query, query - 1] for query in later],
        "induction_score": [
            patterns[:, :, query, keys].sum(-1) for query, keys in behind_copies.items() if keys
        ],
        "entropy": [torch.special.entr(patterns[:, :, query]).sum(-1) for query in range(n_ctx)],
        "value_norm": [by_kv_head.repeat_interleave(n_heads // by_kv_head.shape[1], 1)],
    }
    means = {name: torch.stack(of_queries).mean(0).numpy() for name, of_queries in columns.items()}
    return means, float(output.loss)
