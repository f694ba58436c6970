"""The dense engine in families that TransformerLens shows in other ways, against the fused engine;
what it refuses.
"""

from pathlib import Path

import numpy as np
import pytest

from headcount.schemas.errors import ModelError
from headcount.workers.bridge.bridge import bridge_of
from headcount.workers.loading import load_model
from headcount.workers.model.info.description import describe
from tests.toys import model_families
from tests.toys import toy_models as toy

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "family",
    [
        "bamba",  # has a layer that does not attend
        "bitnet",  # norms what its attention writes
        # Rotates in a function of its own, and TransformerLens shows nothing of it.
        "codegen",
        pytest.param("gptj", marks=pytest.mark.long),
        # TransformerLens shows scores that are not those behind its pattern.
        "modernbert-decoder",
    ],
)
def test_both_engines_agree_on_other_families(tmp_path: Path, family: str) -> None:
    path = tmp_path / family
    model_families.tiny_model(family).save_pretrained(path)  # pyright: ignore[reportCallIssue]
    tokens = toy.repeating_tokens(19)
    fused, dense = (
        toy.replica(path, engine=engine).measure(tokens) for engine in ("fused", "dense")
    )
    assert fused.heads.keys() == dense.heads.keys()
    for name, values in fused.heads.items():
        np.testing.assert_allclose(dense.heads[name], values, rtol=1e-5, atol=1e-5, err_msg=name)
    if family == "bitnet":
        refusal = "shows z of layer 0 only after the layer has changed it"
        with pytest.raises(ModelError, match=refusal):
            toy.replica(path, engine="dense").measure(tokens, "zero_head(0,1)")


def test_what_transformerlens_hides_is_named(tmp_path: Path) -> None:
    model_families.tiny_model("nanochat").save_pretrained(tmp_path / "m")  # pyright: ignore[reportCallIssue]
    model = load_model(describe(tmp_path / "m"), "raw", "cpu")
    with pytest.raises(ModelError) as caught:
        bridge_of(model).shown_facts(0)
    assert str(caught.value).startswith(
        "m: the scores of layer 0 could not be made as 0.3536 · q·k"
    )
    assert str(caught.value).endswith("; TransformerLens hides the q and k that are multiplied")
