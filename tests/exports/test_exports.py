"""`headcount export`: the registry, the choice of a run, destinations, and the files to the digit.

Runs are toys whose numbers are fractions of two, so what is expected here is what files hold.
"""

import json
import re
import shutil
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import numpy as np
import pytest
import yaml
from safetensors import safe_open

from headcount.exports.formats import export_formats
from headcount.exports.formats.duo import block_length
from headcount.queries.ask.asking import open_runs
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.registry import REQUIRED
from headcount.schemas.scans.scan_file import parse_scan
from headcount.schemas.values import range_of
from headcount.workers.model.info.bundled_models import BUNDLED_MODELS
from tests.toys.commands import error_of, printed
from tests.toys.toy_models import change_weights
from tests.toys.toy_runs import Cell, Row, local, read_manifest, write_run

KV_HEADS, HEADS, LAYERS = 2, 4, 2
ECHO = [[0, 0.125, 0.25, 0.375], [0.5, 0.875, 0.625, 0.75]]
INDUCTION = [[0.75, 0.125, 0.125, 0.125], [0.25, 0.375, 0.125, 0.125]]


def of_heads(values: Sequence[Sequence[float]]) -> Cell:
    return lambda row: values[row.layer][row.head]


SCORES = {"duplicate_score": of_heads(ECHO), "induction_score": of_heads(INDUCTION)}


def write_toy(home: Path, name: str, columns: dict[str, Cell], **facts: Any) -> RunDirectory:
    """A run of two layers of four query heads that share two KV heads."""
    options = facts.pop("options", {})
    facts = {"layers": LAYERS, "heads": HEADS, "family": "repeated_random"} | facts
    run = write_run(home, name, columns, **facts)
    manifest = read_manifest(run)
    manifest["model"]["n_kv_heads"] = KV_HEADS
    manifest["identity"]["scan"]["input"] |= options
    local(run.manifest_file).write_text(json.dumps(manifest))
    return run


run = partial(printed, "export")


def refused(message: str, *words: object) -> None:
    """The command says this, and no more."""
    told = error_of("export", *words)
    assert re.search(message, told), told
    assert "\n" not in told


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one run over repeated tokens."""
    home = tmp_path_factory.mktemp("copies")
    write_toy(home, "a-1", SCORES)
    return home


PROVENANCE: dict[str, Any] = {
    "made_by": "headcount", "model": "toy", "run_id": "a-1", "model_fingerprint": "c21233b7d5ba",
    "weight_processing": "raw", "precision": "float32", "code": "c0de",
    "input": {"family": "repeated_random", "period": 2}, "n_ctx": 5, "sequences_done": 4,
    "tokens": 20,
}  # fmt: skip


CERTAIN: dict[str, Any] = {
    "stability": {
        # Of four documents there are only three splits.
        "verdict": "unknown", "median": 1, "lowest": 1, "highest": 1, "splits": 20, "parts": 4,
        "of": "documents",
    }
}  # fmt: skip


# KV heads


def test_kv_heads_sum_up_the_query_heads_that_share_keys(copies: Path):
    database = open_runs(copies)
    assert database.rows("SELECT n_heads, n_kv_heads FROM runs") == [(HEADS, KV_HEADS)]
    columns = "label, mean, highest, lowest, minimum, maximum, count, heads, group_size"
    query = f"SELECT {columns} FROM kv_heads WHERE statistic = 'duplicate_score'"
    assert database.rows(f"{query} ORDER BY label") == [
        ("L0KV0", 0.0625, 0.125, 0, 0, 0.125, 8, 2, 2),
        ("L0KV1", 0.3125, 0.375, 0.25, 0.25, 0.375, 8, 2, 2),
        ("L1KV0", 0.6875, 0.875, 0.5, 0.5, 0.875, 8, 2, 2),
        ("L1KV1", 0.6875, 0.75, 0.625, 0.625, 0.75, 8, 2, 2),
    ]


# The registry


@pytest.mark.parametrize("name", export_formats())
def test_every_format_is_listed_and_explains_itself(name: str):
    export = export_formats()[name]
    assert f"{name}: {export.title}\n    {export.read_by}\n" in run("--list")
    output = run(name, "--help")
    assert export.meaning in output
    for option in export.options.values():
        assert option.meaning
        assert option.default is not REQUIRED
        assert f"  {option.flag}  {option.meaning}" in output
        # Every number has a range.
        assert range_of(option.annotation) or not re.search("int|float", str(option.annotation))
    # The scan of the defaults is a scan.
    assert parse_scan(export.needs(export.parsed_options({})).scan_fields("bundled:gpt2-mini"))
    assert export.source.startswith("https://")


# razor


def test_razor_has_the_heads_with_the_highest_scores(copies: Path, tmp_path: Path):
    file = tmp_path / "new folder" / "razor.json"
    file.parent.mkdir()
    file.write_text("older")
    words = ("razor", copies, "-o", file, "--induction", "0.25", "--echo=0.13", "--sink", "2")
    run(*words, "--replace")
    options = {"echo": 0.13, "induction": 0.25, "sink": 2, "recent": 4000, "compression": 5}
    statistics = ["duplicate_score", "induction_score"]
    facts = {"format": "razor", "statistics": statistics, "options": options, **CERTAIN}
    assert json.loads(file.read_text()) == {
        "echo_heads": [[1, 1, 0.875]],
        "induction_heads": [[0, 0, 0.75], [1, 1, 0.375]],
        "retrieval_kv_heads": [[0, 0], [1, 0]],
        "sink_size": 2,
        "recent_size": 4000,
        "compression": 5,
        # All four documents say the same.
        "headcount": PROVENANCE | facts | {"q": {"1-0": 0, "0-0": 0}},
    }
    assert [path.name for path in file.parent.iterdir()] == ["razor.json"]


def test_one_document_says_nothing_of_how_sure_a_list_is(tmp_path: Path):
    write_toy(tmp_path / "runs", "a-1", SCORES, documents=(7,))
    message = "the 4 sequences of run a-1 are of one document; expected"
    refused(message, "razor", tmp_path / "runs", "-o", tmp_path / "razor.json")


# duo


COPIED = [[0.5, 0.25, 0, 0], [0.125, 0.125, 0, 0]]
DISTANT = [[0.75, 0.5, 0.5, 0.25], [0.5, 0.25, 0.5, 0.25]]
DISTANT_WITHOUT_REPEAT = [[0.75, 0.5, 0.25, 0.5], [0, 0.25, 0.5, 0.25]]
"""L1H0 attends to few copies, and to the first key where nothing repeats."""


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run over repeated tokens, and two over others."""
    home = tmp_path_factory.mktemp("paired")
    half = of_heads([[value / 2 for value in layer] for layer in COPIED])
    measured = {"duplicate_score": half, "induction_score": half}
    distant = {"distant_mass(1,1)": of_heads(DISTANT)}
    write_toy(home, "a-1", measured | distant, uniform_baseline=1 / 32)
    without = {"distant_mass(1,1)": of_heads(DISTANT_WITHOUT_REPEAT)}
    for name in ("b-1", "b-2"):
        write_toy(home, name, without, family="uniform_random")
    return home


TO_DUO = ("--sink", 1, "--recent", 1)


def test_a_block_is_half_of_what_follows_bos_unless_there_is_a_period():
    for n_ctx, bos, options, block in [
        (64, True, {}, 32), (65, True, {}, 32), (65, False, {}, 33), (64, True, {"period": 10}, 10),
    ]:  # fmt: skip
        source: Any = SimpleNamespace(run={"n_ctx": n_ctx, "bos": bos}, input_options=options)
        assert block_length(source) == block


@pytest.mark.parametrize(("words", "expected"), [
    # Of 5 tokens, 3 queries see distant keys, and 2 of them a copy. So the change counts 1.5.
    ("", "0.5\t0.375\n0.75\t0\n"),
    pytest.param("--group mean", "0.375\t0.375\n0.4375\t0\n", marks=pytest.mark.long),
    pytest.param("--score distant", "0.75\t0.5\n0.5\t0.5\n", marks=pytest.mark.long),
    # The scores stay, so that readers can cut where they want. Equal ones are parted at the border.
    pytest.param("--sparsity 0.75", "0.5\t0.375\n0.75\t0\n", marks=pytest.mark.long),
    ("--threshold 0.375", "0.5\t0.375\n0.75\t0\n"),
    pytest.param(
        "--score distant --threshold 0.75", "0.75\t0.5\n0.5\t0.5\n", marks=pytest.mark.long
    ),
    ("--score distant --sparsity 0.5", "0.75\t0.500002\n0.5\t0.5\n"),
])  # fmt: skip
def test_duo_scores_a_kv_head_by_the_attention_that_a_repeat_moves(
    words: str, expected: str, paired: Path, tmp_path: Path
):
    folder = tmp_path / "duo"
    runs = ("--run", "a-1", *([] if "distant" in words else ["--run", "b-1"]))
    output = run("duo", paired, "-o", folder, *runs, *TO_DUO, *words.split())
    assert "note: unknown: 4 documents are too few to say how far lists of their halves" in output
    assert f"{folder}: duo of toy, from run a-1 (" in output
    assert (folder / "full_attention_heads.tsv").read_text() == expected
    config = json.loads((folder / "config.json").read_text())
    assert (config["sink_size"], config["recent_size"]) == (1, 1)
    assert config["headcount"].items() >= (PROVENANCE | CERTAIN).items()
    if len(runs) == 4:
        same = ("code", "n_ctx", "sequences_done", "tokens")
        baseline = {name: PROVENANCE[name] for name in same}
        baseline |= {"run_id": "b-1", "input": {"family": "uniform_random", "period": 2}}
        assert config["headcount"]["baseline"] == baseline
    assert [path.name for path in tmp_path.iterdir()] == ["duo"]


def test_duo_says_what_it_cannot_compare_or_replace(paired: Path, tmp_path: Path):
    words = ("duo", paired, "-o", tmp_path / "duo", *TO_DUO)
    refused("2 runs could be the baseline of run a-1", *words)
    both = (*words, "--run", "a-1", "--run", "b-1")
    (tmp_path / "duo").mkdir()
    (tmp_path / "duo" / "thesis.tex").write_text("years of work")
    refused(r"holds thesis\.tex, which is no part of this export", *both, "--replace")
    assert [path.name for path in tmp_path.rglob("*")] == ["duo", "thesis.tex"]
    # A missing baseline is named with the scan that would measure it.
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "run_id=a-1").symlink_to(paired / "run_id=a-1")
    told = error_of("export", "duo", alone, "-o", tmp_path / "other", *TO_DUO)
    line, *fields = told.splitlines()
    # The end of a command says `error:` once: what is indented goes on with the line.
    assert all(part.startswith("    ") for part in fields)
    scan = parse_scan(tomllib.loads("\n".join(fields)))
    assert "run a-1 has no baseline: run a-1 is over repeated_random, expected uni" in line
    assert (scan.input.family, scan.n_ctx) == ("uniform_random", 5)
    assert scan.statistics == ("distant_mass(1,1)",)  # pyright: ignore


def test_one_command_goes_from_a_model_to_the_file_and_tries_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`test_head_check.py` holds the trial itself against an independent model."""
    monkeypatch.chdir(tmp_path)
    words = ("duo", "runs", "--model", "bundled:needle-mini", "-o", "duo", "--sink", 1)
    words += ("--recent", 5, "--set", "sequences=8", "--set", "n_ctx=48")
    # The model was trained to recall with two of its twelve heads.
    assert re.search(
        r"may be kept whole by chance \(layer-KV head\): \d-\d\n", run(*words, "--sparsity", 0.75)
    )
    scores = np.loadtxt("duo/full_attention_heads.tsv")
    facts = json.loads(Path("duo/config.json").read_text())["headcount"]
    assert (scores.shape, (scores >= facts["threshold"]).sum()) == ((3, 4), 3)

    # The second time the runs are there. A file of scores leaves open how many heads keep
    # everything, so the check looks for it.
    directories = sorted(Path("runs").iterdir())
    before = [(path / "manifest.json").stat().st_mtime_ns for path in directories]
    assert len(before) == 2
    output = run(*words, "--replace", "--check", "--check-sequences", 4)
    found = re.search(r"number of heads: with (\d+) of 12 nothing is lost on other doc", output)
    assert found
    kept = int(found[1])
    rows = {line[:12]: line.split() for line in output.splitlines() if ":" not in line}
    assert rows["chosen heads"][3:5] == [str(kept), str(kept)]
    # They keep 48 keys, and the others six.
    percent = 100 * (kept * 48 + (12 - kept) * 6) / (12 * 48)
    assert float(rows["chosen heads"][-1]) == pytest.approx(percent, abs=0.01)
    assert float(rows["every head  "][-1]) == 100
    assert all(f"\n{kind} heads: " in output for kind in ("chosen", "random"))
    assert sorted(Path("runs").iterdir()) == directories
    assert [(path / "manifest.json").stat().st_mtime_ns for path in directories] == before
    # What does not repeat has no period, and that is said before the other scan runs.
    other = ("--set", "input.period=5", "--replace")
    refused("unknown option of uniform_random 'period'", *words, *other)
    assert sorted(Path("runs").iterdir()) == directories


def test_a_check_that_cannot_be_made_leaves_nothing_behind(copies: Path, tmp_path: Path):
    words = ("razor", copies, "-o", tmp_path / "razor.json", "--check")
    refused("model 'toy': neither a directory, nor ", *words)
    assert list(tmp_path.iterdir()) == []


def test_a_check_is_of_the_model_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(BUNDLED_MODELS / "needle-mini", tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    duo = ("duo", "runs", "-o", "duo", "--sink", 1, "--recent", 5, "--sparsity", 0.75)
    scan = ("--model", "bundled:gpt2-mini", "--set", "model=mine")
    scan = (*scan, "--set", "sequences=8", "--set", "n_ctx=48")
    check = ("--check", "--check-sequences", 2)
    # Of two names the last one is measured, and tried.
    assert "every head    –     12  " in run(*duo, *scan, *check)
    # A relative name is meant from where the run was begun.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "every head    –     12  " in run("duo", "../runs", *duo[2:], *check)
    change_weights(tmp_path / "mine", lambda weights: next(iter(weights.values())).add_(1))
    words = ("duo", "../runs", *duo[2:-2], "--sparsity", 0.5, "-o", "other", *check)
    refused(r"mine: its files are not those of run export-duo-\w+, so a check", *words)
    assert not Path("other").exists()


# fp8-kv-scales


def test_scales_are_the_largest_components_by_kv_head(tmp_path: Path):
    def largest(size: float, shared: int) -> Cell:
        return lambda row: size * (row.sequence + 1) * (1 + row.layer * HEADS + row.head // shared)

    columns = {"query_absmax": largest(7, 1), "key_absmax": largest(14, 2)}
    columns["value_absmax"] = largest(28, 2)
    write_toy(tmp_path / "runs", "a-1", columns)
    file = tmp_path / "scales.safetensors"

    def scales(*words: object) -> dict[str, list[float]]:
        run("fp8-kv-scales", tmp_path / "runs", "-o", file, "--replace", *words)
        with safe_open(file, "np") as opened:
            assert json.loads(opened.metadata()["headcount"])["format"] == "fp8-kv-scales"
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        assert {(t.dtype.name, t.shape[1:]) for t in tensors.values()} == {("float32", (1, 1))}
        return {name: tensor.ravel().tolist() for name, tensor in tensors.items()}

    # Of four sequences the last has the largest, four times 7, 14 and 28 for the first head.
    assert scales() == {
        "model.layers.0.self_attn.q_scale": [1 / 16, 2 / 16, 3 / 16, 4 / 16],
        "model.layers.0.self_attn.k_scale": [1 / 8, 2 / 8],
        "model.layers.0.self_attn.v_scale": [1 / 4, 2 / 4],
        "model.layers.1.self_attn.q_scale": [5 / 16, 6 / 16, 7 / 16, 8 / 16],
        "model.layers.1.self_attn.k_scale": [5 / 8, 6 / 8],
        "model.layers.1.self_attn.v_scale": [5 / 4, 6 / 4],
    }
    clipped = scales("--quantile", 0.5, "--prefix", "h.{layer}.attn")
    # The upper end of a bin is never below the value of the second sequence, and at most 4.5 %
    # above it.
    medians = {"h.0.attn.q_scale": [1 / 32, 2 / 32, 3 / 32, 4 / 32]}
    medians |= {"h.0.attn.k_scale": [1 / 16, 2 / 16], "h.1.attn.v_scale": [5 / 8, 6 / 8]}
    for name, values in medians.items():
        shares = np.array(clipped[name]) / values
        assert (shares >= 1 - 1e-6).all()
        assert (shares <= 1.045).all()
    words = ("fp8-kv-scales", tmp_path / "runs", "-o", file, "--replace", "--prefix", "attn")
    refused(r"--prefix: expected a name with \{layer\} in it", *words)


# Needles and passages


def test_scores_by_sequence_are_those_of_retrieval_heads_and_headkv(tmp_path: Path):
    # Of four needles, the heads of layer 0 see the last one alone.
    def mass(row: Row) -> float | None:
        return None if row.layer == 0 and row.sequence < 3 else row.head / 4

    columns: dict[str, Cell] = {
        "retrieval_score": lambda row: row.layer * (row.sequence + row.head) / 8,
        "labelled_key_mass(gold,answer)": mass,
    }
    write_toy(tmp_path / "runs", "a-1", columns, family="needle")
    file = tmp_path / "scores.json"

    def lines_of(*words: object) -> list[dict[str, Any]]:
        name, *options = words
        run(name, tmp_path / "runs", "-o", file, "--replace", *options)
        return [json.loads(line) for line in file.read_text().splitlines()]

    retrieval, facts = lines_of("retrieval-heads")
    assert list(retrieval) == [f"{layer}-{head}" for layer in (0, 1) for head in range(4)]
    assert retrieval["0-3"] == [0, 0, 0, 0]
    assert retrieval["1-1"] == [1 / 8, 2 / 8, 3 / 8, 4 / 8]
    assert facts["headcount"]["input"]["family"] == "needle"
    assert lines_of("retrieval-heads", "--only-scores", "true") == [retrieval]
    masses, _ = lines_of("headkv")
    assert (masses["0-2"], masses["1-3"]) == ([0, 0, 0, 0.5], [0.75] * 4)

    # What is no more than uniform attention may be chance.
    nothing: dict[str, Cell] = {"retrieval_score": lambda row: row.head / 64}
    write_run(tmp_path / "none", "a-1", nothing, family="needle")
    farthest = r"the farthest is L0H2 by retrieval_score \(\+0\.031 ± 0\.000\)"
    words = ("retrieval-heads", tmp_path / "none", "-o", tmp_path / "none.json")
    refused(f"no head of run a-1 differs from .* {farthest}; expec", *words)


def test_heads_that_find_the_passage_lead_by_more_than_chance(tmp_path: Path):
    lead = {(0, 1): 0.5, (1, 2): 0.375, (0, 0): 0.25, (1, 0): 0.125}

    def gold(row: Row) -> float:
        spread = 1 / 64 if row.head == 1 else 0.25
        return 0.25 + lead.get((row.layer, row.head), 0) + spread * (-1) ** row.sequence

    # Half of the mass on two other passages is that of one.
    columns: dict[str, Cell] = {
        "labelled_key_mass(gold,query)": gold,
        "labelled_key_mass(other,query)": lambda row: 0.5,
    }
    facts = {"sequences": 16, "family": "passages", "options": {"passages": 3}}
    write_toy(tmp_path / "runs", "a-1", columns, **facts)
    file = tmp_path / "heads"

    def made(name: str, *words: object) -> str:
        run(name, tmp_path / "runs", "-o", file, "--replace", *words)
        return file.read_text()

    # The spread of all but L0H1 is 0.258: two standard errors are 0.129.
    text = made("qrhead")
    assert json.loads(text.splitlines()[0].removeprefix("# "))["format"] == "qrhead"
    # QRHead has neither a class nor a prompt for such a model.
    model = {"model_name_or_path": "toy"}
    assert yaml.safe_load(text) == {"attn_head_set": "0-1,1-2,0-0", **model}
    assert "\n# model_base_class: QRHead's code has no class and no prompt for toy\n" in text
    named = yaml.safe_load(made("qrhead", "--model-class", "Llama-3.2-1B-Instruct"))
    assert named["model_base_class"] == "Llama-3.2-1B-Instruct"
    content = json.loads(made("important-heads"))
    assert content.pop("headcount")["run_id"] == "a-1"
    heads = [[0, 1], [1, 2]]
    assert content == {
        "model_info": {"provider": "attn-hf", "name": "toy", "model_id": "toy"},
        "params": {"temperature": 0.1, "max_output_tokens": 32, "important_heads": heads},
        "hookq": {"hookq_mode": "all_tokens"},
    }
    words = ("--deviations", 0, "--heads", 3, "--mode", "last_token")
    three = json.loads(made("important-heads", *words))
    assert three["params"]["important_heads"] == [*heads, [0, 0]]
    assert three["hookq"]["hookq_mode"] == "last_token"
    words = ("important-heads", tmp_path / "runs", "-o", file, "--replace", "--deviations", 50)
    refused("leads by 50 standard deviations; lower --deviations", *words)


# Effects on the loss


def test_an_estimate_that_was_not_calibrated_makes_no_list(tmp_path: Path):
    write_toy(tmp_path / "runs", "a-1", {"effect_mean": of_heads(ECHO)})
    words = ("important-heads", tmp_path / "runs", "-o", tmp_path / "heads", "--score", "effect")
    refused("was not calibrated; run headcount calibrate a-1 first", *words)


@pytest.mark.long
def test_calibrated_effects_make_lists(tmp_path: Path):
    runs = tmp_path / "runs"
    sizes = ("--set", "sequences=16", "--set", "n_ctx=64")
    words = ("--model", "bundled:needle-mini", "--score", "effect", "--replace", *sizes)
    run("headkv", runs, "-o", tmp_path / "headkv", "--recent", 8, *words)
    (directory,) = runs.glob("run_id=export-headkv-[!c]*")
    scores, facts = map(json.loads, (tmp_path / "headkv").read_text().splitlines())
    # From one run directory, the calibration that lies beside it is found.
    file = tmp_path / "duo" / "full_attention_heads.tsv"
    run("duo", directory, "-o", file.parent, "--recent", 8, "--score", "effect")
    query = "SELECT layer, head, mean FROM head_summaries WHERE statistic = 'effect_window_4_8'"
    means = {row[:2]: row[2] for row in open_runs(directory).rows(query)}
    chosen = {tuple(map(int, name.split("-"))) for name in facts["headcount"]["q"]}
    # The two heads that recall and continue repeats.
    assert chosen >= {(1, 2), (1, 3)}
    largest = max(means.values())
    duo = np.loadtxt(file)
    for head, mean in means.items():
        expected = mean if head in chosen else 0
        assert scores["{}-{}".format(*head)] == [pytest.approx(expected, rel=1e-6)]
        assert duo[head] == pytest.approx(max(mean, 0) / largest, rel=1e-6)
    calibration = facts["headcount"]["calibration"]["effect_window_4_8"]
    assert calibration[0]["heads"] == 12


# Other tools read the files of a run


@pytest.fixture
def changed(tmp_path: Path) -> RunDirectory:
    columns: dict[str, Cell] = {"entropy": lambda row: row.sequence + row.head / 8}
    interventions = ("none", "zero_head(0,1)")
    return write_toy(tmp_path / "runs", "a-1", columns, interventions=interventions, layers=3)


def test_a_card_names_the_files_of_every_table_and_intervention(changed: RunDirectory):
    folder = local(changed.path)

    def card(file: Path, *words: object) -> tuple[dict[str, Any], str]:
        run("card", folder, "-o", file, *words)
        _, front_matter, text = file.read_text().split("---\n", 2)
        return yaml.safe_load(front_matter), text

    front_matter, text = card(folder / "README.md", "--license", "cc-by-4.0")
    configs = [
        {"config_name": f"{table}{suffix}",
         "data_files": [f"{table}/intervention={intervention}/*.parquet"]}
        for table in ("heads", "sequences")
        for intervention, suffix in (("none", ""), ("zero_head(0,1)", "-zero_head_0_1_"))
    ]  # fmt: skip
    configs[0]["default"] = True  # pyright: ignore[reportArgumentType]
    assert front_matter == {
        "license": "cc-by-4.0",
        "pretty_name": "Attention heads of toy",
        "tags": ["attention-heads", "interpretability", "headcount"],
        "configs": configs,
    }
    assert "3 layers of 4 heads over 4 sequences of 5 tokens (repeated_random)" in text
    assert "\n| `entropy` | Mean entropy of the attention rows." in text
    assert str(folder) not in text
    assert "Lists of heads" not in text

    # If other files lie beside them, the committed ones are named.
    (folder / "heads" / "intervention=none" / "copy.parquet").write_bytes(b"")
    front_matter, _ = card(folder.parent / "README.md")
    assert front_matter["configs"][0]["data_files"] == [
        f"run_id=a-1/heads/intervention=none/shard-{shard:06d}.parquet" for shard in range(2)
    ]


def test_a_card_says_which_lists_are_stable(copies: Path):
    folder = copies / "run_id=a-1"
    run("card", folder, "-o", folder / "README.md", "--replace")
    text = (folder / "README.md").read_text()
    stability = "unknown: 4 documents are too few to say how far lists of their halves agree"
    assert f"\n| `razor` | {stability}; expected 8 or more |\n" in text
    assert "`duo`" not in text  # It needs another run.
    (folder / "README.md").unlink()


@pytest.mark.long
def test_iceberg_tables_have_the_rows_of_the_views(changed: RunDirectory, tmp_path: Path):
    pyiceberg_table = pytest.importorskip("pyiceberg.table")
    run("iceberg", changed.path, "-o", tmp_path / "tables")
    assert not list((tmp_path / "tables").rglob("*.parquet"))
    read: Callable[[str], Any] = lambda name: pyiceberg_table.StaticTable.from_metadata(  # noqa: E731
        str(tmp_path / "tables" / name)
    )
    heads = read("heads")
    names = ("run_id", "intervention", "sequence", "layer", "head", "entropy")
    query = f"SELECT {', '.join(names)} FROM heads ORDER BY ALL"
    connection = duckdb.connect()
    connection.register("heads", heads.scan(selected_fields=names).to_arrow())
    assert connection.execute(query).fetchall() == open_runs(changed.path).rows(query)
    untouched = heads.scan(row_filter="intervention = 'none' and layer = 1").to_arrow()
    assert untouched.num_rows == 4 * HEADS
    assert heads.schema().find_field("layer").doc == "Layer, from 0."
    assert len(heads.metadata.snapshots) == 1
    rows = read("sequences").scan(row_filter="intervention = 'none'").to_arrow()
    assert rows["tokens"].to_pylist() == [list(range(5))] * 4
