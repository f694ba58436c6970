"""`headcount reproduce --all`: what fits runs, what does not is said and skipped, the file of
results is always written, and one model is loaded and hashed once.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from headcount.jobs.run.progress import WholeProgress
from headcount.reproduce.replication import StandInText
from headcount.reproduce.reproduce_commands import SOMETHING_SKIPPED, texts_of_replications
from headcount.schemas.errors import RunError, ScanError
from headcount.schemas.packages import PACKAGE
from headcount.workers import known_models
from headcount.workers.known_models import KnownModels
from tests.toys import toy_models as toy
from tests.toys.commands import ended
from tests.toys.hub_server import MODEL, hub
from tests.toys.toy_replications import REPLICATIONS, replication_text

SCANS = """
[defaults]
n_ctx = 8
sequences = 2
statistics = ["sink_mass"]
input = { family = "uniform_random" }
[scan.random]
[scan.longer]
n_ctx = 12
"""

CHECK = """
[[check]]
published = { sink = %s }
tolerance = 1
tolerance_reason = "a toy"
sql = "SELECT 'sink', avg(sink_mass) FROM replication_heads"
"""


def replication_file(layers: int, scans: str = SCANS, published: float = 0.5) -> str:
    """A replication that was published for a model of so many layers."""
    return replication_text(scans + CHECK % published, f"n_layers = {layers}, n_heads = 4")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A GPT-2 with random weights, as the Hub lays it out."""
    return str(toy.save_model(tmp_path_factory.mktemp("models") / "gpt2", toy.gpt2()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The replications of these tests, in place of ours."""
    replications = tmp_path / "replications"
    replications.mkdir()
    monkeypatch.setattr("headcount.reproduce.replication.REPLICATIONS", replications)
    monkeypatch.chdir(tmp_path)
    return replications


def reproduce(*words: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, output with the error, and the results that were written."""
    end = ended("reproduce", *words, "--json", "results.json")
    file = Path("results.json")
    results = json.loads(file.read_text()) if file.is_file() else []
    return end.code, end.output, results


def verdicts(results: list[dict[str, Any]]) -> dict[str, str]:
    return {result["replication"]: result["verdict"] for result in results}


def test_what_does_not_fit_is_skipped_and_the_rest_is_measured(folder: Path, gpt2: str) -> None:
    no_file = SCANS.replace('"uniform_random"', '"csv_texts", files = "absent.csv"')
    no_steps = SCANS.replace("[scan.random]", '[scan.random]\ncheckpoints = "step-*"')
    for name, text in {
        "absent": replication_file(3, no_file),
        "fits": replication_file(3),
        "other": replication_file(9),
        "steps": replication_file(3, no_steps),
        "wrong": replication_file(3).replace("(sink_mass", "(sink_mas"),
    }.items():
        (folder / f"{name}.toml").write_text(text)
    exit_code, output, results = reproduce("--all", "--model", gpt2)
    assert exit_code == SOMETHING_SKIPPED
    skipped = ("absent", "other", "steps", "wrong")
    assert verdicts(results) == {"fits": "pass"} | dict.fromkeys(skipped, "skipped")
    reasons = {result["replication"]: result["reason"] for result in results}
    assert "no file matches 'absent.csv'" in reasons["absent"]
    assert reasons["other"] == (
        "published for m (n_layers 9, n_heads 4), and this model has n_layers 3, n_heads 4"
    )
    assert "no checkpoints step-*" in reasons["steps"]
    assert "unknown column 'sink_mas'" in reasons["wrong"]
    flat_output = output.replace("\n", " ")
    assert all(f"{name}: skipped: " in flat_output for name in skipped)
    assert "1 replication measured, 4 skipped" in output
    # Of one replication nothing else can be said.
    exit_code, output, results = reproduce("absent", "--model", gpt2)
    assert (exit_code, verdicts(results)) == (2, {"absent": "skipped"})
    assert "no file matches" in output


def test_a_token_that_another_tokenizer_reads_otherwise_is_refused(folder: Path) -> None:
    """A vocabulary that is large enough says nothing: the text of the token is compared."""
    model = str(PACKAGE / "models" / "gpt2-mini")

    def write(name: str, text: str) -> None:
        fields = 'input = { family = "single_token_repeat", token = 116 }\n' + text
        scans = SCANS.replace("[scan.longer]", f"[scan.longer]\n{fields}")
        sizes = "n_layers = 3, n_heads = 8"
        (folder / f"{name}.toml").write_text(replication_text(scans + CHECK % 0.5, sizes))

    write("right", 'token_text = "t"')
    write("space", 'token_text = " t"')
    write("wrong", 'token_text = "u"')
    exit_code, _, results = reproduce("--all", "--model", model)
    assert exit_code == SOMETHING_SKIPPED
    assert verdicts(results) == {"right": "pass", "space": "skipped", "wrong": "skipped"}
    assert [result["reason"] for result in results if result["verdict"] == "skipped"] == [
        f"gpt2-mini: its tokenizer reads 't' from token 116, and the scan 'longer' means {text}; "
        f"--set longer.input.token={token} names a token of this tokenizer"
        for text, token in (("' t'", "ID"), ("'u'", "117"))
    ]
    words = ("wrong", "--model", model, "--set", "longer.input.token=117")
    assert reproduce(*words)[0] == 0
    # The file of a replication cannot leave the text out.
    write("wrong", "")
    assert "token_text says which text that is" in reproduce("wrong", "--model", model)[1]


def test_a_failing_figure_and_another_model_end_differently(folder: Path, gpt2: str) -> None:
    (folder / "a.toml").write_text(replication_file(3, published=7))
    (folder / "b.toml").write_text(replication_file(3))
    (folder / "c.toml").write_text(replication_file(9))
    exit_code, output, results = reproduce("--all", "--model", gpt2)
    assert "1 of 2 results differ from what was published" in output
    # The front door makes 2 of an error of ours.
    assert exit_code == 2
    assert verdicts(results) == {"a": "fail", "b": "pass", "c": "skipped"}
    # Another model's replications are no reason for a code of their own.
    (folder / "a.toml").unlink()
    assert reproduce("--all", "--model", gpt2)[0] == 0


def test_a_model_is_read_once_and_an_override_of_one_scan_leaves_others_alone(
    folder: Path, gpt2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[str] = []
    loaded: list[str] = []
    describe, load_model = known_models.describe, known_models.load_model

    def noting_describe(name: Any, *words: Any, **more: Any) -> Any:
        described.append(str(name))
        return describe(name, *words, **more)

    def noting_load(info: Any, *words: Any, **more: Any) -> Any:
        loaded.append(info.path)
        return load_model(info, *words, **more)

    monkeypatch.setattr(known_models, "describe", noting_describe)
    monkeypatch.setattr(known_models, "load_model", noting_load)
    # Nothing else may describe the model.
    monkeypatch.setattr("headcount.jobs.plan.resolved_scan.described", None)
    (folder / "a.toml").write_text(replication_file(3))
    (folder / "b.toml").write_text(replication_file(3, SCANS.replace("longer", "own")))
    exit_code, output, _ = reproduce("--all", "--model", gpt2, "--set", "own.sequences=3")
    assert exit_code == 0, output
    assert described == loaded == [gpt2]
    manifests = [json.loads(file.read_text()) for file in Path("runs").rglob("manifest.json")]
    sequences = {each["run_id"].rpartition("-")[0]: each["sequences"] for each in manifests}
    assert sequences == {"random": 2, "longer": 2, "own": 3}


def test_the_sizes_are_those_of_the_revision_that_is_asked_for(
    folder: Path, gpt2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The weights on the branch main have no name that anything reads.
    main = toy.copy_of(Path(gpt2), tmp_path / "hub" / "main")
    (main / "model.safetensors").rename(main / "flax_model.msgpack")
    toy.save_model(tmp_path / "hub" / "older", toy.gpt2(n_layer=2))
    for layers in (2, 3):
        (folder / f"of-{layers}.toml").write_text(replication_file(layers))
    with hub(tmp_path / "hub", tmp_path / "cache", monkeypatch):
        exit_code, output, _ = reproduce("--all", "--model", MODEL)
        assert (exit_code, "expected weights as model.safetensors or" in output) == (2, True)
        words = ("--all", "--model", MODEL, "--set", 'revision="older"')
        exit_code, output, results = reproduce(*words)
    assert exit_code == 0, output
    assert verdicts(results) == {"of-2": "pass", "of-3": "skipped"}


def test_fields_of_a_family_are_for_its_models(folder: Path, gpt2: str) -> None:
    text = f"{SCANS}[family.gpt2]\nn_ctx = 10\n" + CHECK % 0.5
    file = replication_text(text, 'family = "gpt2", n_layers = 3')
    (folder / "a.toml").write_text(file)
    assert reproduce("a", "--model", gpt2)[0] == 0
    manifests = [json.loads(each.read_text()) for each in Path("runs").rglob("manifest.json")]
    assert [each["identity"]["scan"]["n_ctx"] for each in manifests] == [10, 10]
    wrong = reproduce("a", "--model", gpt2, "--set", 'revision=["x", "y"]')[1]
    assert "--set revision: expected one text, got ['x', 'y']" in wrong
    (folder / "a.toml").write_text(file.replace("[family.gpt2]", "[family.gpt3]"))
    assert "family.gpt3: unknown family 'gpt3'" in reproduce("a", "--model", gpt2)[1]


def test_few_models_stay_in_memory(gpt2: str) -> None:
    models = KnownModels()
    info = models.describe(gpt2)
    raw = models.load(info, "raw", "cpu")
    assert models.load(info, "raw", "cpu") is raw
    models.load(info, "folded", "cpu")
    assert models.load(info, "raw", "cpu") is raw
    # A third one takes the place of the one that was used longest ago.
    models.load(models.describe("bundled:gpt2-mini"), "raw", "cpu")
    assert models.load(info, "raw", "cpu") is raw


def test_a_text_is_for_its_replications(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("poem.txt", "novel.txt"):
        Path(name).write_text("a")
    replication = REPLICATIONS["first_keys"]
    whats = {"a": "a poem", "b": "a novel", "c": "a poem", "d": None}
    selection = {
        name: replication.model_copy(update={"text": StandInText(what=what) if what else None})
        for name, what in whats.items()
    }
    alone = {name: selection[name] for name in ("a", "d")}
    by_name = texts_of_replications(["c=poem.txt", "b=novel.txt"], selection)
    assert by_name == {"a": "poem.txt", "c": "poem.txt", "b": "novel.txt"}
    assert texts_of_replications(["poem.txt"], alone) == {"a": "poem.txt"}
    certain = replication.model_copy(
        update={"text": StandInText(what="a poem", fingerprint="ca97")}
    )
    with pytest.raises(
        ScanError, match="expected a poem, with the SHA-256 ca97…, got ca978112ca1b"
    ):
        texts_of_replications(["poem.txt"], {"a": certain})
    with pytest.raises(ScanError, match="different texts; expected NAME=FILE"):
        texts_of_replications(["poem.txt"], selection)
    assert texts_of_replications(["[np]o*.txt"], {"a": selection["a"]}) == {"a": "[np]o*.txt"}
    with pytest.raises(RunError, match=r"own.txt: no such file; expected a poem"):
        texts_of_replications(["own.txt"], alone)
    with pytest.raises(ScanError, match="none of these replications reads a text"):
        texts_of_replications(["poem.txt"], {"d": selection["d"]})


def test_the_time_left_is_that_of_all_scans() -> None:
    now = [100.0]
    whole = WholeProgress(1000, clock=lambda: now[0])
    assert whole.line() == ""
    now[0] += 30
    whole.add(250)
    assert whole.line() == "all scans: 25%, 1 min 30 s left"
