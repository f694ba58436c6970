"""What holds for every format: an export of a finished run needs no model, and says of the model
that it read no more than the name.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headcount.exports.formats import export_formats
from headcount.exports.shared.registry import Needs
from headcount.schemas.profiles.columns_and_diagonals import CANDIDATES
from tests.exports.test_exports import HEADS, KV_HEADS, LAYERS, write_toy
from tests.toys.toy_runs import Cell, Entry, local, read_manifest

HEAVY = ("ray", "torch", "transformers")
D_HEAD = 4

EXPORTS = f"""
import json, sys
from headcount import commands
app = commands.command_line()
for name, *words in json.load(sys.stdin):
    app(["export", name, *words], standalone_mode=False)
    print("loaded:", name, *sorted({{*{HEAVY}}} & {{*sys.modules}}))
"""

NAMING = ["expected-attention", "fp8-kv-checkpoint", "important-heads", "qrhead"]
"""Formats with a field for the model, or with its files."""

OTHERS = [name for name in export_formats() if name not in NAMING]

MODEL = "private/llama"
"""As a user types it, from the directory that holds the models."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, and finished runs of it for every format."""
    directory = tmp_path_factory.mktemp("formats")
    _write_checkpoint(directory / MODEL)
    for name, export in export_formats().items():
        needs = export.needs(export.parsed_options(_small(name)))
        _write_run(directory / name, "a-1", needs)
        if needs.baseline is not None:
            _write_run(directory / name, "b-1", needs.baseline)
    return directory


def _small(name: str) -> dict[str, str]:
    """Options of a format that fit sixteen tokens: fewer are first and last ones by default."""
    options = export_formats()[name].options
    return {option: "1" for option in ("sink", "recent") if option in options}


@pytest.mark.parametrize("names", [
    NAMING,
    pytest.param(OTHERS, marks=pytest.mark.long),
])  # fmt: skip
def test_an_export_loads_no_model_and_does_not_say_where_it_lies(names: Sequence[str], home: Path):
    exports: list[list[str]] = []
    for name in names:
        # A card lies above the files that it names.
        out = f"{name}/README.md" if name == "card" else f"out/{name}"
        exports.append([name, name, "-o", out, *(f"--{k}={v}" for k, v in _small(name).items())])
    ended = subprocess.run(
        [sys.executable, "-c", EXPORTS], input=json.dumps(exports), capture_output=True, text=True,
        cwd=home,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line for line in lines if line.startswith("loaded:")] == [
        f"loaded: {name}" for name in names
    ]
    assert sum(" of llama, from run a-1 (" in line for line in lines) == len(names)
    files = [path for path in home.glob("out/**/*") if path.is_file()]
    files += home.glob("card/README.md")
    assert len(files) >= len(names)
    assert [path for path in files if b"private" in path.read_bytes()] == []


def _write_run(runs: Path, name: str, needs: Needs) -> None:
    """A finished run that measured what is needed. Its model was named by a relative path."""
    columns: dict[str, Cell] = {each: lambda row: 0.5 for each in needs.statistics or ("entropy",)}

    def profiles(shard: int) -> list[Entry]:
        return [
            {"intervention": "none", "layer": layer, "head": head, "profile": profile, "count": 2,
             "mean": 0.25, **place}
            for profile in needs.profiles
            for layer in range(LAYERS)
            for head in range(HEADS)
            for place in _places(profile)
        ]  # fmt: skip

    facts: dict[str, Any] = {"model": MODEL, "profiles": profiles if needs.profiles else None}
    if needs.families:
        facts["family"] = needs.families[0]
    facts["options"] = {"passages": 3} | dict(needs.input_options)
    run = write_toy(runs, name, columns, n_ctx=16, **facts)
    manifest = read_manifest(run)
    manifest["model"]["name"] = Path(MODEL).name
    manifest |= {"begun_in": str(runs.parent), "places": {"model": MODEL}}
    local(run.manifest_file).write_text(json.dumps(manifest))


def _places(profile: str) -> list[dict[str, int]]:
    """The entries of a profile."""
    if profile.endswith("second_moment"):
        pairs = combinations_with_replacement(range(D_HEAD), 2)
        return [{"component": first, "other_component": second} for first, second in pairs]
    if profile.endswith("mean"):
        return [{"component": component} for component in range(D_HEAD)]
    return [{"candidate": candidate} for candidate in range(len(CANDIDATES))]


def _write_checkpoint(directory: Path) -> None:
    directory.mkdir(parents=True)
    fields = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    (directory / "config.json").write_text(json.dumps(fields))
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(LAYERS)]
    tensors = {name: np.zeros(1, np.float32) for name in names}
    save_file(tensors, directory / "model.safetensors")
