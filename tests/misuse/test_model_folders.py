"""Folders that hold more, less or other things than one model: what is measured, or refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headcount.queries.ask.asking import open_runs
from headcount.schemas.files.beginnings import LFS_POINTER
from tests.misuse.conftest import Command
from tests.toys import toy_models as toy
from tests.toys.hub_server import MODEL, hub

SCAN = """
n_ctx = 12
sequences = 3
statistics = ["sink_mass", "induction_score"]
[input]
family = "repeated_random"
"""
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def scan_file(model: str, **fields: str) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in ({"model": model} | fields).items()]
    name = "-".join([model.strip("./").replace("/", "-"), *fields.values()])
    Path(f"{name}.toml").write_text("\n".join(lines) + SCAN)
    return f"{name}.toml"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`full`, weights with an adapter beside them; `merged`, both in one; `base` and `adapter`.

    They are written without PEFT, which takes seconds to import.
    """
    home = tmp_path_factory.mktemp("adapted")
    base = toy.save_model(home / "base", toy.family("LlamaConfig"))
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    rank, alpha = 2, 8
    lora: dict[str, torch.Tensor] = {}
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight"))]:
        d_out, d_in = weights[name].shape
        # Small, so that nothing is lost where the sum is rounded.
        down = 0.1 * torch.randn(rank, d_in, generator=generator)
        up = torch.randn(d_out, rank, generator=generator)
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        lora |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
        weights[name] += alpha / rank**0.5 * up @ down
    (home / "adapter").mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha}
    config |= {"target_modules": ["q_proj", "k_proj"], "use_rslora": True}
    config |= {"base_model_name_or_path": str(base), "inference_mode": True}
    (home / "adapter" / ADAPTER[0]).write_text(json.dumps(config))
    save_file(lora, home / "adapter" / ADAPTER[1], {"format": "pt"})
    save_file(weights, toy.copy_of(base, home / "merged") / "model.safetensors", {"format": "pt"})
    toy.copy_of(base, home / "full")
    for name in ADAPTER:
        shutil.copy(home / "adapter" / name, home / "full")
    return home


def copy(home: Path, name: str, *adapter: str, to: str | None = None) -> str:
    """A folder of `adapted`, with files of the adapter; as a scan names it."""
    to = to or name
    shutil.copytree(home / name, to)
    for file in adapter:
        shutil.copy(home / "adapter" / file, to)
    return f"./{to}"


def means(run: str) -> list[float]:
    sql = "SELECT layer, head, avg(sink_mass), avg(induction_score) FROM heads GROUP BY ALL"
    return [value for row in open_runs(run).rows(f"{sql} ORDER BY ALL") for value in row]


def run_of(name: str) -> str:
    (run,) = Path("runs").glob(f"run_id={name}-*")
    return str(run)


def test_an_adapter_beside_full_weights_is_refused_if_nobody_says_what_it_is_for(
    adapted: Path, command: Command
) -> None:
    full = copy(adapted, "full")
    told = (
        "full: has an adapter (adapter_config.json and adapter_model.safetensors) beside full "
        'weights; set adapter = "apply" to measure the weights with it, or "ignore" if they are '
        "merged already, or remove it"
    )
    for words in (["plan", scan_file(full)], ["scan", scan_file(full), "--replicas", "0"]):
        assert command(*words) == (2, [f"error: {told}"])
    assert command("doctor", "--model", full) == (2, [f"error: {told}"])


@pytest.mark.long
def test_an_adapter_beside_full_weights_is_applied_or_ignored_as_the_scan_says(
    adapted: Path, command: Command
) -> None:
    for name in ("base", "merged"):
        assert command("scan", scan_file(copy(adapted, name)), "--replicas", "0")[0] == 0
    full = copy(adapted, "full")
    files = ", ".join(ADAPTER)
    for choice, same in (("ignore", "base"), ("apply", "merged")):
        code, lines = command("scan", scan_file(full, adapter=choice), "--replicas", "0")
        note = f"the adapter ({files}) is {'applied' if choice == 'apply' else 'ignored'}"
        assert (code, lines[0].partition(": ")[2]) == (0, note)
        run = run_of(f"full-{choice}")
        assert means(run) == pytest.approx(means(run_of(same)), rel=1e-5, abs=1e-7), choice
        manifest = json.loads(Path(run, "manifest.json").read_text())
        assert manifest["identity"]["scan"]["adapter"] == choice
        assert ({*ADAPTER} <= {*manifest["model"]["files"]}) == (choice == "apply")
    assert means(run_of("base")) != pytest.approx(means(run_of("merged")), rel=1e-3)
    # Another scale is another model, if the adapter is applied.
    config = Path(full, "adapter_config.json")
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 64'))
    assert command("scan", "full-ignore.toml", "--replicas", "0")[0] == 0
    code, lines = command("scan", "full-apply.toml", "--replicas", "0")
    assert code == 2
    assert "the model's adapter (adapter_config.json: " in lines[0]
    assert command("scan", "full-apply.toml", "--replicas", "0", "--new")[0] == 0


@pytest.mark.parametrize(("adapter", "choice", "told"), [
    (ADAPTER[:1], "refuse", "has an adapter (adapter_config.json) beside full weights; set …"),
    (ADAPTER[1:], "refuse", "has an adapter (adapter_model.safetensors) beside full weights; …"),
    (ADAPTER[:1], "apply", "adapter is 'apply', and the directory has only "
     "adapter_config.json of one; expected adapter_config.json and adapter_model.safetensors"),
    ((), "apply", "adapter is 'apply', and the directory has none; expected "
     "adapter_config.json and adapter_model.safetensors"),
])  # fmt: skip
def test_half_an_adapter_and_none_are_told(
    adapted: Path, command: Command, adapter: tuple[str, ...], choice: str, told: str
) -> None:
    name = scan_file(copy(adapted, "base", *adapter), adapter=choice)
    code, lines = command("plan", name)
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith(f"error: base: {told.rstrip('…')}")


def test_an_adapter_alone_is_no_model(adapted: Path, command: Command) -> None:
    assert command("plan", scan_file(copy(adapted, "adapter"))) == (2, [
        f"error: adapter: holds an adapter of {adapted}/base and no full weights; merge it into "
        "that model (PEFT's merge_and_unload, then save_pretrained), and name the result"
    ])  # fmt: skip


def test_checkpoints_that_differ_in_their_adapter_are_no_duplicates(
    adapted: Path, command: Command
) -> None:
    for step in ("step-1", "step-2"):
        copy(adapted, "full", to=step)
    config = Path("step-2/adapter_config.json")
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 64'))
    for choice, told in (("ignore", True), ("apply", False)):
        Path("steps.toml").write_text(f'model = "./step-*"\nadapter = "{choice}"\n{SCAN}')
        _, lines = command("plan", "steps.toml")
        assert any("has the weights of" in line for line in lines) == told


# Files of Git LFS


@pytest.mark.parametrize("name", [
    "model.safetensors", "config.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "generation_config.json", "model.safetensors.index.json",
    "pytorch_model.bin", "adapter_config.json",
])  # fmt: skip
def test_a_file_that_git_lfs_has_not_fetched_is_named(
    adapted: Path, command: Command, name: str
) -> None:
    folder = copy(adapted, "base")
    if name in ("pytorch_model.bin", "model.safetensors.index.json"):
        Path(folder, "model.safetensors").unlink()
    Path(folder, name).write_text(POINTER)
    told = (2, [f"error: base/{name}: {LFS_POINTER}"])
    choice = {"adapter": "apply"} if name == "adapter_config.json" else {}
    assert command("plan", scan_file(folder, **choice)) == told
    if not choice:
        assert command("doctor", "--model", folder) == told


# Parts of weights


def in_parts(folder: str, *, ending: str = "safetensors") -> list[str]:
    """Store a model's weights as two parts with an index; returns their names."""
    file = Path(folder, "model.safetensors")
    tensors = load_file(file)
    file.unlink()
    stem = "model" if ending == "safetensors" else "pytorch_model"
    parts = [f"{stem}-0000{i}-of-00002.{ending}" for i in (1, 2)]
    places = {name: parts[i % 2] for i, name in enumerate(sorted(tensors))}
    for part in parts:
        save_file({name: tensors[name] for name in places if places[name] == part},
                  Path(folder, part), {"format": "pt"})  # fmt: skip
    index = {"metadata": {}, "weight_map": places}
    Path(folder, f"{stem}.{ending}.index.json").write_text(json.dumps(index))
    return parts


@pytest.mark.long
def test_the_parts_that_the_index_names_are_the_model(adapted: Path, command: Command) -> None:
    whole, folder = copy(adapted, "base", to="whole"), copy(adapted, "base", to="parts")
    first, second = in_parts(folder)
    for name in (whole, folder):
        assert command("scan", scan_file(name), "--replicas", "0")[0] == 0
    assert means(run_of("parts")) == means(run_of("whole"))
    # What the index does not name is not read, and so no part of the model.
    for other in ("consolidated.safetensors", "model-00003-of-00003.safetensors"):
        shutil.copy(Path(folder, first), Path(folder, other))
    code, lines = command("scan", "parts.toml", "--replicas", "0")
    assert (code, "1 of them done" in lines[0]) == (0, True)
    Path(folder, second).rename("elsewhere")
    told = f"error: parts/{second}: not there, and parts/model.safetensors.index.json names it; "
    assert command("plan", "parts.toml") == (2, [f"{told}fetch the model again"])
    assert command("doctor", "--model", folder) == (2, [f"{told}fetch the model again"])
    Path("elsewhere").rename(Path(folder, second))
    index = Path(folder, "model.safetensors.index.json")
    index.rename("index")
    told = f"parts: has {first} and no {index.name}, which says the parts; fetch it again"
    for other in ("consolidated.safetensors", "model-00003-of-00003.safetensors"):
        Path(folder, other).unlink()
    assert command("plan", "parts.toml") == (2, [f"error: {told}"])
    # transformers reads the one file, other programs the parts.
    Path("index").rename(index)
    shutil.copy(Path(whole, "model.safetensors"), folder)
    code, lines = command("doctor", "--model", folder)
    assert code == 0
    code, lines = command("scan", "parts.toml", "--replicas", "0", "--new")
    told = f"the weights are those of model.safetensors; {index.name} names others, which are not"
    assert any(f"{told} read" in line for line in lines)


@pytest.mark.parametrize("places", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_names_no_files_is_told(adapted: Path, command: Command, places: str) -> None:
    folder = copy(adapted, "base")
    Path(folder, "model.safetensors").unlink()
    index = Path(folder, "model.safetensors.index.json")
    index.write_text(places)
    told = "expected weight_map, a file for each tensor; fetch it again"
    assert command("plan", scan_file(folder)) == (2, [f"error: base/{index.name}: {told}"])


@pytest.mark.parametrize("name", ["../base/w", "/etc/passwd", "sub/w", "..", "./w"])
def test_weights_elsewhere_than_beside_the_file_that_names_them_are_refused(
    adapted: Path, command: Command, name: str
) -> None:
    folder = copy(adapted, "base")
    # The link leads where only the driver may read; checks of the directory do not see it.
    Path(folder, "sub").mkdir()
    Path(folder, "sub", "w").symlink_to(Path(folder, "model.safetensors").absolute())
    config = Path(folder, "config.json")
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"transformers_weights": name}))
    told = f"names {name!r}, expected files beside it"
    assert command("plan", scan_file(folder)) == (2, [f"error: base/config.json: {told}"])
    config.write_text(json.dumps(fields))
    Path(folder, "model.safetensors").unlink()
    index = Path(folder, "model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    assert command("plan", scan_file(folder)) == (2, [f"error: base/{index.name}: {told}"])


# A Hub


def test_of_a_hub_s_model_only_the_files_that_are_read_are_downloaded(
    adapted: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {name: Path(copy(adapted, "base", to=f"hub/{name}")) for name in ("main", "parts")}
    copy(adapted, "full", to="hub/adapted")
    parts = in_parts(str(folders["parts"]))
    for folder in folders.values():
        for name in ("consolidated.safetensors", "model.fp16.safetensors", "notes.md"):
            (folder / name).write_bytes(b"not read")
    with hub(tmp_path / "hub", tmp_path / "cache", monkeypatch):
        for revision, weights in (("main", ["model.safetensors"]), ("parts", parts)):
            code, lines = command("scan", scan_file(MODEL, revision=revision), "--replicas", "0")
            assert code == 0, lines
            (snapshot,) = [
                path for path in (tmp_path / "cache").rglob("config.json")
                if path.with_name(weights[0]).exists()
            ]  # fmt: skip
            names = {path.name for path in snapshot.parent.iterdir()} - {"config.json"}
            others = {"generation_config.json", "model.safetensors.index.json"}
            assert names - others == {*weights}
        code, lines = command("plan", scan_file(MODEL, revision="adapted"))
        assert (code, "has an adapter (adapter_config.json and" in lines[0]) == (2, True)
        words = ("scan", scan_file(MODEL, revision="adapted", adapter="apply"), "--replicas", "0")
        assert command(*words)[0] == 0
