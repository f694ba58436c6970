"""The guide is followed to the letter: everything in it runs and prints what its pages say, and its
dashboard grows with a run.
"""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headcount
from headcount.queries.ask.asking import open_runs
from headcount.queries.open.named_queries import QUERIES, read_queries
from tests import ROOT
from tests.pages.page_commands import CommandBlock, FileToSave, follow_page, same_output, steps_of

TUTORIAL = ROOT / "docs" / "guide" / "tutorial.md"
NAMED_QUERIES = ROOT / "docs" / "reference" / "queries.md"
CENSUS = ROOT / "docs" / "census" / "README.md"
PAGES = [ROOT / "README.md", *sorted(TUTORIAL.parent.glob("*.md")), CENSUS, NAMED_QUERIES]


def check(page: Path, folder: Path, begun: Path | None = None) -> None:
    for step, printed in follow_page(page, folder, begun):
        if isinstance(step, CommandBlock) and step.output is not None:
            advice = f"python -m tests.pages.page_commands {page.relative_to(ROOT)}"
            assert same_output(step.output, printed), f"{printed}\nif this is right: {advice}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of somebody who has followed the tutorial, where other pages continue."""
    folder = tmp_path_factory.mktemp("tutorial")
    check(TUTORIAL, folder)
    return folder


@pytest.mark.long
# What torch says to a Trainer where there is no GPU.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
# What rings in the guide's training: nothing repeats in its data, so heads no longer copy.
@pytest.mark.filterwarnings("ignore:(notice. sink_onset|induction_loss) at step:RuntimeWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_prints_what_it_says(
    page: Path, home: Path, tmp_path: Path
) -> None:
    if page != TUTORIAL:
        check(page, tmp_path, home)
    if page == NAMED_QUERIES:
        database = open_runs(tmp_path / "examples")
        for name, query in read_queries(QUERIES).items():
            is_empty = not database.rows(f"{query.call({})} LIMIT 1")
            assert is_empty == (name in OF_OTHER_RUNS), name


OF_OTHER_RUNS = (
    *("run_changes", "seed_agreement"),  # These compare runs on one family of input.
    *("head_effects", "calibrated_effects", "effect_calibration"),  # The examples have no effects.
)


def opened_blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The line above each block of a page, and the language of the block."""
    lines = ["", *page.read_text(encoding="utf-8").splitlines()]
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    for number in fences[::2]:
        yield lines[number - 1], lines[number].removeprefix("```")


def test_a_block_of_the_guide_that_is_not_run_says_what_it_needs() -> None:
    needs = "a cluster|a GPU|the network|money|another environment"
    excuse = re.compile(rf"<!-- not run: needs ({needs}) -->")
    for page in PAGES:
        for above, language in opened_blocks(page):
            # `py` is Python for another environment. SQL has tests of its own.
            assert language in ("bash", "python", "py", "text", "toml", "csv", "sql", "yaml"), page
            excused = excuse.fullmatch(above) is not None
            assert excused == above.startswith("<!-- not run"), f"{page.name}: {above}"
            assert excused or language != "py", f"{page.name}: {above}"


RUNNABLE = re.compile(r"^```(?:bash|python)$", re.MULTILINE)

EXCUSE = re.compile(r"^<!-- not run: .* -->\n```(?:bash|python)$", re.MULTILINE)
"""A remark above a block, which says why this one is not run."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_is_run_or_has_an_excuse_of_its_own(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = [step for step in steps_of(text) if isinstance(step, CommandBlock)]
    files = [step for step in steps_of(text) if isinstance(step, FileToSave)]
    saved = [file for file in files if file.name.endswith(".py")]
    assert len(blocks) + len(saved) == len(RUNNABLE.findall(text)) - len(EXCUSE.findall(text))


def test_an_excuse_covers_the_block_below_it_alone() -> None:
    excuse = "<!-- not run: needs money -->\n"
    page = "".join(
        f"{above}```bash\n{number}\n```\n" for number, above in enumerate([excuse, "", excuse, ""])
    )
    blocks = [step for step in steps_of(page) if isinstance(step, CommandBlock)]
    assert [block.commands for block in blocks] == [("1",), ("3",)]


# The dashboard that refreshes, and the queries that its page gives to other tools


STATISTICS = ["entropy", "sink_mass"]


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    """The functions of the dashboard. Streamlit is imported by `main` alone."""
    return runpy.run_path(str(ROOT / "docs" / "streamlit_dashboard.py"))


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        "model": "bundled:attn-only-2l-mini",
        "n_ctx": 16,
        "sequences": 4,
        "sequences_per_shard": 2,
        # Sixteen tokens have no key that is so far away.
        "statistics": ["distant_mass(4,64)", *STATISTICS],
        "input": {"family": "uniform_random"},
        "out": str(tmp_path_factory.mktemp("dashboard") / "runs"),
    }


def test_the_dashboard_grows_with_the_run(
    dashboard: dict[str, Any], fields: dict[str, Any]
) -> None:
    with headcount.scan(fields, sequences=2, quiet=True) as runs:
        assert dashboard["statistics"](runs) == STATISTICS
        assert dashboard["means"](runs, "entropy").df()["count"].unique().tolist() == [2]
        # The same run, continued elsewhere while it is open here.
        with headcount.scan(fields, quiet=True) as continued:
            assert continued.path == runs.path
        assert dashboard["means"](runs, "entropy").df()["count"].unique().tolist() == [2]
        assert runs.refresh() is runs
        (progress,) = dashboard["progress"](runs).df().to_dict("records")
        assert (progress["sequences_done"], progress["sequences"]) == (4, 4)
        shown = dashboard["means"](runs, "entropy").df()
        assert shown["count"].unique().tolist() == [4]
        query = "SELECT layer, head, avg(entropy) AS mean FROM heads GROUP BY ALL ORDER BY ALL"
        by_rows = runs.sql(query).df()
        assert shown["mean"].tolist() == pytest.approx(by_rows["mean"].tolist(), rel=1e-6)
        axes = {channel["field"] for channel in dashboard["HEATMAP"]["encoding"].values()}
        assert axes <= set(shown.columns)
        assert dashboard["means"](runs, "it's nothing").rows() == []


def test_the_queries_of_the_page_have_answers(fields: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "guide" / "dashboards.md").read_text(encoding="utf-8")
    queries = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    assert len(queries) == 4
    with headcount.scan(fields, quiet=True) as runs:
        answers = [runs.sql(query).rows() for query in queries]
    heads, ranked, bins, percents = answers
    assert len(heads) == len(ranked) == 16
    assert ranked == sorted(ranked, key=lambda row: -row[1])
    assert sum(row[2] for row in bins) == 4
    assert [row[1] for row in percents] == [100.0]
