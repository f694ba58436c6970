"""How much the loss of texts rises in an engine that is told a plan, beside what the plan says.

    python -m tests.engines.in_engine MODEL PLAN.json… -- TEXT…

The same tokens are read by `headcount cache-plan` and by the engine, each with the whole cache and
with that of the plan. TEXT are the texts of the plan, in the order of its command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headcount.exports.cache_plan.engines import ENGINES
from headcount.exports.cache_plan.plans import CachePlan, CacheShape, Choice
from headcount.exports.shared.certainty import cost
from headcount.workers.cache_trial import CacheTrial, Pieces
from tests import ROOT

ENVIRONMENTS = {"mlx": ".venv-mlx", "llama.cpp": ".venv-llama_cpp", "vllm": ".venv-vllm"}

SETTINGS = {
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip


ONE_HEAD = CacheShape(
    kv_heads=((0, 0),),
    n_kv_heads=1,
    d_head=64,
    n_ctx=1,
    sink=0,
    recent=0,
    whole=0,
    end=1,
    own_windows={},
)
"""A shape for what does not depend on it."""


def losses_in(
    engine: str, model: str | Path, tokens: np.ndarray, prompt: int, flags: Sequence[str]
) -> np.ndarray:
    """Losses of the tokens behind a prompt: `[flags sequence pos]`."""
    script = Path(__file__).with_name(f"{engine.replace('.', '_')}_losses.py")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "tokens.npy")
        np.save(file, tokens)
        words = [
            ROOT / ENVIRONMENTS[engine] / "bin/python",
            script,
            model,
            file,
            str(prompt),
            *flags,
        ]
        settings = os.environ | SETTINGS | {"VLLM_CACHE_ROOT": directory}
        run = subprocess.run(words, env=settings, stdout=subprocess.PIPE, text=True)
    assert run.returncode == 0, f"{engine} refuses {flags}"
    return np.array(json.loads(run.stdout.splitlines()[-1]))


def text_losses(
    engine: str, model: str | Path, pieces: Pieces, prompt: int, flags: Sequence[str]
) -> np.ndarray:
    """Mean losses of texts behind a prompt: `[flags sequence]`."""
    losses = losses_in(engine, model, pieces.tokens, prompt, flags)
    is_text = pieces.is_text[:, prompt + 1 :]
    return (losses * is_text).sum(-1) / is_text.sum(-1)


def flags_of(engine: str, shape: CacheShape, *choices: Choice) -> str:
    """What an engine is told of some choices."""
    flags = ENGINES[engine].flags
    assert flags is not None
    return flags(CachePlan.untouched(shape).with_choices(shape, choices), shape)


def main() -> None:
    """Print the rises of both."""
    split = sys.argv.index("--")
    model, texts = sys.argv[1], sys.argv[split + 1 :]
    for file in sys.argv[2:split]:
        plan = json.loads(Path(file).read_text())
        engine, flags = plan["engine"], plan["flags"]
        reads_prompts = ENGINES[engine].reads_prompts
        sequences = max(plan["sequences"].values())
        trial = CacheTrial(
            model, texts, n_ctx=plan["n_ctx"], sequences=sequences, reads_prompts=reads_prompts
        )
        pieces = trial.pieces["reports"]
        told = [flags_of(engine, ONE_HEAD), flags]
        whole, cut = text_losses(engine, model, pieces, plan["prompt"], told)
        found = cost(cut - whole, pieces.documents)
        print(f"{engine}: {flags}; the whole cache has a loss of {whole.mean():.4f}")
        for name, row in (("the engine", found), ("the plan", plan["plan"])):
            print(
                f"  by {name:12} {row['delta_nll']:+.4f} ± {row['standard_error']:.4f}", flush=True
            )


if __name__ == "__main__":
    main()
