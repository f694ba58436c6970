"""Where the tokens of a stored sequence look, against the float64 reference and what a run kept."""

import asyncio
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium.webdriver import ActionChains, Chrome, Keys

import headcount
from headcount.queries.ask.asking import open_runs
from headcount.queries.explore import attention
from headcount.queries.report.html_page import unpacked
from headcount.schemas.errors import QueryError
from tests.pages.browser import Page
from tests.queries.page.test_explore import browser, served
from tests.queries.page.test_explore_queries import Asker
from tests.toys.toy_runs import one_line

__all__ = ["browser"]

N_CTX = 24
HEAD = {"layer": 1, "head": 2}
WINDOW = 6
TEXTS = "text\nThe cat sat on the mat and the cat sat\nDer Junge isst rote Beeren heute\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of models and of their runs, by name."""
    folder = tmp_path_factory.mktemp("attention")
    (folder / "texts.csv").write_text(TEXTS, encoding="utf-8")
    runs_of(folder, "plain")
    return folder


def runs_of(home: Path, name: str, **other: Any) -> Path:
    """A run of a model, which is measured when a test first wants it."""
    from tests.toys import toy_models as toy
    from tests.toys.runs_here import measure_here

    runs = home / "runs" / name
    if runs.exists():
        return runs
    config = toy.gpt2(n_embd=16, n_layer=2, n_head=4, vocab_size=257)
    if name == "windowed":
        # In layer 0.
        options = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"))
        options |= {"sliding_window": WINDOW, "head_dim": 8, "vocab_size": 257, **toy.GQA}
        config = toy.family("Gemma2Config", **options)
    model = toy.byte_tokenizer(toy.save_model(home / "models" / name, config))
    fields = {
        "model": str(model), "out": str(runs), "n_ctx": N_CTX, "sequences": 2, "bos": False,
        "input": {"family": "csv_texts", "files": str(home / "texts.csv")},
        "interventions": ["none", "mask_keys(0,2)"], "statistics": ["sink_mass"],
        "curves": ["attention_received_by_key"],
    }  # fmt: skip
    measure_here(fields | other, name)
    return runs


@pytest.fixture
def ask(home: Path) -> Iterator[Asker]:
    with closing(asker_of(runs_of(home, "plain"))) as asker:
        yield asker


def asker_of(runs: Path, **options: Any) -> Asker:
    asker = Asker(runs, **options)
    asker.run_id = asker.engine.runs.overview()["runs"][0]["run_id"]
    return asker


@pytest.mark.parametrize(("intervention", "layer"), [("none", 0), ("mask_keys(0,2)", 1)])
@pytest.mark.parametrize("name", ["plain", pytest.param("windowed", marks=pytest.mark.long)])
def test_rows_are_those_of_the_reference_and_columns_those_that_were_kept(
    home: Path, name: str, intervention: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.reference.reference_changes import run_changed
    from tests.reference.weights import read_weights

    runs = runs_of(home, name)
    of_run = f"intervention = '{intervention}' AND sequence = 1"
    database = open_runs(runs)
    ((tokens,),) = database.rows(f"SELECT tokens FROM sequences WHERE {of_run}")
    kept = f"FROM curves WHERE {of_run} AND layer = {layer} AND head = 2"
    ((received,),) = database.rows(f"SELECT attention_received_by_key {kept}")
    weights = read_weights(home / "models" / name)
    if name == "windowed":
        weights.layers[0].window = WINDOW
    reference = run_changed(weights, tokens, intervention, ()).layers[layer].pattern[2]
    query = {"sequence": 1, "head": {"layer": layer, "head": 2}}
    query |= {"scope": {"intervention": intervention}}
    with closing(asker_of(runs)) as asker:
        whole = asker("attention", **query)
        monkeypatch.setattr(attention, "SHOWN_TOKENS", 8)
        asker.engine.cache.clear()
        part = asker("attention", **query, start=11)
        last = asker("attention", **query, start=10**6)
    rows, outside, of_key = whole["arrays"]
    assert whole["rows"][0]["tokens"][:5] == list("Der J")
    assert not outside.any()
    # Behind the window there is no attention.
    assert np.isnan(rows).any() == (name == "windowed" and layer == 0)
    np.testing.assert_allclose(np.nan_to_num(rows), reference, atol=2e-6)
    np.testing.assert_allclose(of_key, received, atol=1e-6)
    # A part of a sequence has rows of the whole, and says what it leaves out.
    np.testing.assert_array_equal(part["arrays"][0], rows[11:19, 11:19])
    np.testing.assert_allclose(part["arrays"][1][:, 0], reference[11:19, 0], atol=2e-6)
    np.testing.assert_allclose(part["arrays"][1].sum(1), reference[11:19, :11].sum(1), atol=2e-6)
    np.testing.assert_array_equal(part["arrays"][2], of_key[11:19])
    assert [answer["rows"][0]["start"] for answer in (part, last)] == [11, N_CTX - 8]


def test_a_prompt_is_read_as_a_sequence_of_the_run_is(home: Path, ask: Asker) -> None:
    from tests.reference.reference_changes import run_changed
    from tests.reference.weights import read_weights

    prompt = "Wo sitzt die Katze?"
    for intervention in ("none", "mask_keys(0,2)"):
        query = {"head": HEAD, "scope": {"intervention": intervention}}
        answer = ask("attention", prompt=prompt, **query)
        assert answer["rows"][0]["tokens"] == list(prompt)
        weights = read_weights(home / "models" / "plain")
        reference = run_changed(weights, list(prompt.encode()), intervention, ())
        pattern = reference.layers[1].pattern[2]
        np.testing.assert_allclose(answer["arrays"][0], pattern, atol=2e-6)
        # The same in Python, and on the page that a notebook shows.
        with headcount.open(home / "runs" / "plain") as runs:
            read = runs.attention("L1H2", prompt, intervention=intervention)
        np.testing.assert_allclose(read.weights, pattern, atol=2e-6)
        assert repr(read).splitlines()[-1].split()[2] == str(pattern[-1].argmax())
        data: Any = unpacked(read.html())
        assert data["tokens"] == read.tokens == list(prompt)
        np.testing.assert_allclose(data["weights"], read.weights, rtol=1e-5)
        np.testing.assert_allclose(data["received"], answer["arrays"][2], rtol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        pytest.param("", "the prompt has no tokens; expected a text", id="empty"),
        pytest.param(
            "a" * 65,
            "the prompt has 65 tokens; expected at most 40, which the model reads",
            id="long",
        ),
    ],
)
def test_a_prompt_that_cannot_be_read_is_one_line(ask: Asker, prompt: str, why: str) -> None:
    answer = ask("attention", prompt=prompt, head=HEAD)
    assert (answer["rows"], answer["why"]) == ([], f"where tokens look is not shown: {why}")


def test_a_query_is_about_one_text(ask: Asker) -> None:
    for texts in ({}, {"sequence": 0, "prompt": "a"}):
        with one_line(QueryError, "expected a sequence or a prompt"):
            ask("attention", head=HEAD, **texts)


def test_labels_of_a_sequence_are_drawn_again(home: Path) -> None:
    ideal = "ideal_backcopy(1,2)"
    scanned = {"family": "backcopy", "text": str(home / "texts.csv"), "alphabet": "tokenizer"}
    other = {"input": scanned, "interventions": ["none", ideal], "curves": []}
    runs = runs_of(home, "labelled", **other)
    sql = f"SELECT labels FROM sequences WHERE sequence = 1 AND intervention = '{ideal}'"
    ((labels,),) = open_runs(runs).rows(sql)
    with closing(asker_of(runs)) as asker:
        query = {"sequence": 1, "head": HEAD, "scope": {"intervention": ideal}}
        weights = asker("attention", **query)["arrays"][0]
    # A trigger looks at the token before it, all others at the first one.
    keys = [max(0, q - 1) if label == "trigger" else 0 for q, label in enumerate(labels)]
    assert weights.argmax(1).tolist() == keys
    assert sum(keys) > 0
    with closing(asker_of(runs)) as asker:
        query = {"prompt": "a cat", "head": HEAD, "scope": {"intervention": ideal}}
        assert asker("attention", **query)["why"].endswith("a prompt has no partner and no labels")


@pytest.mark.parametrize("missing", ["model", "PyTorch"])
def test_without_the_model_a_line_says_why_and_what_was_kept_is_shown(
    home: Path, tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = shutil.copytree(runs_of(home, "plain"), tmp_path / "runs")
    model = str(home / "models" / "plain")
    if missing == "model":
        manifest = next(runs.glob("*/manifest.json"))
        manifest.write_text(manifest.read_text().replace(model, "/nowhere/plain"))
        why = (
            "model '/nowhere/plain': no such directory; --model PATH says where the model lies now"
        )
    else:
        monkeypatch.setitem(sys.modules, "torch", None)
        why = "needs torch, which is not installed: in headcount's folder, pip install -e '.[scan]'"
    with closing(asker_of(runs)) as asker:
        answer = asker("attention", sequence=0, head=HEAD)
    assert (answer["arrays"], answer["why"]) == ([], f"where tokens look is not shown: {why}")
    kept = "SELECT attention_received_by_key FROM curves WHERE layer = 1 AND head = 2"
    rows = open_runs(runs).rows(f"{kept} AND sequence = 0 AND intervention = 'none'")
    assert rows == [(pytest.approx(answer["rows"][0]["received"]),)]
    if missing == "model":
        with closing(asker_of(runs, model=model)) as asker:
            assert len(asker("attention", sequence=0, head=HEAD)["arrays"]) == 3


@pytest.mark.long
def test_a_model_stays_loaded_until_another_is_asked(home: Path, tmp_path: Path) -> None:
    for name in ("plain", "windowed"):
        shutil.copytree(runs_of(home, name), tmp_path, dirs_exist_ok=True)
    with closing(Asker(tmp_path)) as asker:
        first, second = [run["run_id"] for run in asker.engine.runs.overview()["runs"]]

        def loaded(run_id: str, sequence: int) -> list[Any]:
            asker("attention", sequence=sequence, head=HEAD, scope={"run_id": run_id})
            return [asker.engine.models[each].loaded for each in (first, second)]

        one, none = loaded(first, 0)
        assert one is not None
        assert (loaded(first, 1), none) == ([one, None], None)
        assert loaded(second, 0)[0] is None


def test_while_a_model_is_loaded_others_are_answered_and_the_deadline_holds(ask: Asker) -> None:
    may_load = threading.Event()
    ask.engine.model_thread.submit(may_load.wait)

    async def both() -> None:
        waiting = asyncio.create_task(ask.ask("attention", sequence=0, head=HEAD))
        assert (await ask.ask("heatmap", statistic="sink_mass"))["arrays"]
        assert not waiting.done()
        ask.engine.deadline = 0.3
        with one_line(QueryError, r"stopped after 0\.3 s"):
            await ask.ask("attention", sequence=1, head=HEAD)
        ask.engine.deadline = 20
        may_load.set()
        assert len((await waiting)["arrays"]) == 3

    asyncio.run(both())
    with one_line(QueryError, "has no tokens of sequence 99"):
        ask("attention", sequence=99, head=HEAD)


@pytest.mark.long
def test_a_token_shows_where_it_looks(browser: Chrome, ask: Asker) -> None:
    rows, _, received = ask("attention", sequence=1, head=HEAD)["arrays"]
    with served(ask.engine) as address:
        page = Page(browser)
        page.open(address)
        page.click('[data-cell="1.2"]')
        page.click('[data-sequence="1"] button')
        tokens = page.all("#attention [role=option]")
        assert len(tokens) == N_CTX
        assert "No token is chosen" in page.text("#attention .readout")

        def weights() -> list[float]:
            """What the titles of tokens say."""
            titles = page.run("return [...arguments[0]].map((token) => token.title)", tokens)
            return [float(title.rpartition(": ")[2]) for title in titles if ": " in title]

        assert weights() == pytest.approx(received, rel=1e-3)
        tokens[9].click()
        ActionChains(browser).move_to_element(page.find("h1")).perform()
        assert weights() == pytest.approx(rows[9, :10], rel=1e-3)
        strongest = int(rows[9].argmax())
        assert f"looks at {strongest} " in page.text("#attention .readout")
        # With the keyboard: the next but one, then the chosen one again.
        tokens[9].send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
        assert weights() == pytest.approx(rows[11, :12], rel=1e-3)
        page.run("document.activeElement.blur()")
        assert weights() == pytest.approx(rows[9, :10], rel=1e-3)
        assert "sequence=1" in browser.current_url
        # Another head reads the same text.
        page.click('[data-cell="0.0"]')
        assert page.text("#attention h4").endswith("sequence 1 look in L0H0")
        # A text of the reader's, and its picture: the row of a query, the column of a key.
        page.click("#prompt-part summary")
        page.find("#prompt").send_keys("a cat", Keys.CONTROL, Keys.ENTER)
        rows = ask("attention", prompt="a cat", head={"layer": 0, "head": 0})["arrays"][0]
        assert page.text("#attention h4").endswith("your text look in L0H0")
        assert "prompt=a+cat" in browser.current_url
        assert "sequence=" not in browser.current_url
        picture = page.find("canvas.pattern")
        cell = picture.size["width"] / 5
        move = ActionChains(browser).move_to_element_with_offset(picture, int(0.2 * cell), cell)
        move.perform()
        assert page.text("#attention .readout") == f'Token 3 "a" looks at 2 "c": {rows[3, 2]:.4}'
        move.click().perform()
        tokens = page.all("#attention [role=option]")
        ActionChains(browser).move_to_element(page.find("h1")).perform()
        assert weights() == pytest.approx(rows[3, :4], rel=1e-3)
        assert browser.get_log("browser") == []
