"""What bundled models show, that nothing is computed beside the formulas, and that columns give the
scores of other tools, as the pages say.
"""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from headcount.schemas.statistics import STATISTICS
from headcount.workers.engine.number_formats import LinearProducts
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.model.info.description import describe, find_model
from headcount.workers.replica import Replica
from tests.toys import toy_models as toy

AGAINST_UNTOUCHED = ("final_divergence", "final_top1_agreement", "final_top5_agreement")


def tokens_of(n_ctx: int, sequences: int = 3) -> np.ndarray:
    return np.random.default_rng(n_ctx).integers(97, 123, (sequences, n_ctx)).astype(np.int32)


def test_formulas_make_no_call_through_the_mode_that_directs_linear_layers(
    shelf: toy.Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    direct = LinearProducts.__torch_function__

    def counted(self: LinearProducts, func: Any, *others: Any) -> object:
        calls.append(func)
        return direct(self, func, *others)

    monkeypatch.setattr(LinearProducts, "__torch_function__", counted)
    counts: list[int] = []
    for statistics in (["sink_mass", "resid_post_norm"], ["all"]):
        calls.clear()
        fields = {"n_ctx": 9, "precision": "tf32", "statistics": statistics}
        shelf.replica("gpt2-mini", **fields).measure(tokens_of(9))
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


def test_values_are_float32_in_the_registered_range(shelf: toy.Shelf) -> None:
    tokens = tokens_of(131)
    labels = [["trigger" if token % 3 == 0 else "" for token in row] for row in tokens.tolist()]
    measured = shelf.replica("gpt2-mini", n_ctx=256).measure(tokens, labels=labels)
    for name, values in measured.heads.items():
        low, high = STATISTICS[name].range
        defined = values[~np.isnan(values)]
        assert ((low - 1e-6 <= defined) & (defined <= high + 1e-6)).all(), name
        assert (values.shape, values.dtype) == ((len(tokens), 3, 8), np.float32), name


def test_predictions_are_held_against_the_untouched_model_on_the_same_tokens(
    shelf: toy.Shelf,
) -> None:
    tokens, others = tokens_of(20, sequences=5), tokens_of(20, sequences=5)[::-1].copy()
    fields: dict[str, Any] = {"statistics": ["sink_mass"], "predictions": list(AGAINST_UNTOUCHED)}

    def measured(replica: toy.TextReplica, tokens: np.ndarray, intervention: str) -> np.ndarray:
        columns = replica.measure(tokens, intervention).sequences
        return np.stack([columns[name] for name in AGAINST_UNTOUCHED])

    # The second one takes other batches, and is not asked for the untouched model.
    replica, alone = (
        toy.replica(shelf.path("gpt2-mini"), batch_size=size, **fields) for size in (2, 5)
    )
    assert (measured(replica, tokens, "none") == [[0], [1], [1]]).all()
    for intervention in ("zero_head(0,1)", "zero_query_bias", "zero_mlp(2)+mask_keys(0,1)"):
        changed = measured(replica, tokens, intervention)
        assert (changed[0] > 1e-4).all()
        assert (changed[1:] <= 1).all()
        # The untouched model is measured then, and other tokens are not taken for these.
        reversed_order = measured(replica, others, intervention)[:, ::-1]
        np.testing.assert_allclose(reversed_order, changed, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(
            measured(alone, tokens, intervention), changed, rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize(
    "model", ["attn-only-2l-mini", "backcopy-3l-mini", "gpt2-mini", "llama-mini"]
)
def test_bundled_models_show_what_their_cards_say(model: str) -> None:
    info = describe(find_model(f"bundled:{model}"))
    ranges = {"backcopy-3l-mini": (65, 192), "llama-mini": (32, 127)}
    ids = dict(zip(("low", "high"), ranges.get(model, ()), strict=False))

    def measure(**options: Any) -> dict[str, np.ndarray]:
        fields = {"model": f"bundled:{model}", "n_ctx": 51, "sequences": 64, "seed": 7}
        columns = ["previous_token_score", "induction_score"]
        columns += ["sink_mass", "value_norm", "sink_value_norm"]
        family = options | ids | {"distinct": True}
        scan = toy.toy_scan(**fields, statistics=columns, input=family)
        measured = Replica(info, scan).measure(Sequences(scan, info).shard(0).tokens)
        return {name: values.mean(0) for name, values in measured.heads.items()}

    repeated = measure(family="repeated_random", period=25)
    unrepeated = measure(family="uniform_random")
    assert unrepeated["previous_token_score"][0].max() > 0.9
    inducing, sinks = repeated["induction_score"] > 0.6, unrepeated["sink_mass"] > 0.9
    if model == "llama-mini":
        assert np.argwhere(inducing).tolist() == [[1, 0], [1, 1]]
        assert np.argwhere(sinks).tolist() == [[3, 5]]
        return
    resting = inducing & sinks
    assert resting[1].any()
    if model != "attn-only-2l-mini":
        other_norms = (51 * unrepeated["value_norm"] - unrepeated["sink_value_norm"]) / 50
        assert (unrepeated["sink_value_norm"] / other_norms)[resting].min() < 0.3


def test_formulas_of_the_catalogue_follow_from_columns(shelf: toy.Shelf) -> None:
    """TransformerLens's detector scores, from the docs' formulas: `mul` = Σ A∘D / ΣA, `abs` = 1 - T
    mean |A - D|.
    """
    tokens, path = toy.repeating_tokens(21, batch=1), shelf.path("gpt2")
    model: Any = GPT2LMHeadModel.from_pretrained(path, attn_implementation="eager").double().eval()
    with torch.no_grad():
        output = model(torch.from_numpy(tokens).long(), output_attentions=True)
        a = torch.stack(output.attentions, 1)[0].numpy()
    t = tokens[0]
    duplicate = np.tril(t[:, None] == t[None], -1).astype(float)
    induction = np.tril(np.concatenate([np.zeros((21, 1)), duplicate[:, :-1]], axis=1))
    measured = toy.measure(path, tokens).heads
    heads = {name: values[0].astype(float) for name, values in measured.items()}
    for detection, column in ((duplicate, "duplicate_score"), (induction, "induction_score")):
        mul = heads[column] * heads["match_coverage"]
        np.testing.assert_allclose(mul, (a * detection).sum((-2, -1)) / a.sum((-2, -1)), atol=1e-6)
        wanted = 1 - 21 * np.abs(a - detection).mean((-2, -1))
        np.testing.assert_allclose(2 * mul - heads["match_count"], wanted, atol=1e-5)
    previous = heads["previous_token_score"] * 20 / 21
    wanted = 1 - 21 * np.abs(a - np.eye(21, k=-1)).mean((-2, -1))
    np.testing.assert_allclose(2 * previous - 20 / 21, wanted, atol=1e-5)
    late = a[:, :, 10:]
    rest = 1 - heads["sink_mass_late"] - heads["next4_mass_late"]
    np.testing.assert_allclose(rest, late[..., 5:].sum(-1).mean(-1), atol=1e-6)
