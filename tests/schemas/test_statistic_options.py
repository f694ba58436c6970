"""Statistics with options: how a scan names them, which run it is, and what SQL shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import GPT2LMHeadModel

import headcount
from headcount.queries.open.connection import connect
from headcount.schemas.errors import ScanError
from headcount.schemas.formula_pages import page
from headcount.schemas.pattern import Pattern, Tensor
from headcount.schemas.scans.scan import Scan, parse_scan
from headcount.schemas.scans.values import Count
from headcount.schemas.statistics import KIND, STATISTICS, statistic
from headcount.schemas.weight_statistics import weight
from tests.toys import toy_models as toy


def scan_of(*statistics: str) -> Scan:
    return toy.toy_scan(statistics=list(statistics))


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        (["distant_mass"], ("distant_mass(4,64)",)),
        (["distant_mass( 4, 64 )"], ("distant_mass(4,64)",)),
        (["distant_mass_4_64"], ("distant_mass(4,64)",)),
        (["distant_mass(8)"], ("distant_mass(8,64)",)),
        (["labelled_key_mass(other)"], ("labelled_key_mass(other,query)",)),
        (["standard", "distant_mass(8,32)"], ("standard", "distant_mass(8,32)")),
        (["standard", "entropy"], "standard"),
        (["all", "distant_mass", "distant_mass(1,2)"], ("all", "distant_mass(1,2)")),
        (["entropy", "sink_mass"], ("entropy", "sink_mass")),
        ("standard", "standard"),
    ],
)
def test_one_choice_is_one_text_and_so_one_run(written: Any, canonical: Any) -> None:
    scan = toy.toy_scan(statistics=written)
    assert scan.names(KIND) == canonical
    again = toy.toy_scan(statistics=canonical if isinstance(canonical, str) else list(canonical))
    assert again.fingerprint == scan.fingerprint
    assert again.formulas(KIND) == scan.formulas(KIND)


def test_a_choice_of_options_is_a_column_of_its_own() -> None:
    scan = scan_of("distant_mass(16,8)", "entropy", "distant_mass", "distant_mass(4,8)")
    names = [formula.name for formula in scan.formulas(KIND)]
    columns = ["distant_mass_16_8", "distant_mass_4_64", "distant_mass_4_8"]
    assert sorted(names) == sorted([*columns, "entropy"])
    assert [name for name in names if name != "entropy"] == columns
    other = KIND.find("distant_mass(16,8)")
    assert other.description.endswith("; sink = 16, recent = 8; " + other.undefined_when)
    assert other.record["options"] == {"sink": 16, "recent": 8}
    assert other.record["function"] == "distant_mass"
    assert "options" not in STATISTICS["entropy"].record
    # The options do not change the code.
    assert other.fingerprint == STATISTICS["distant_mass_4_64"].fingerprint


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["distant_mass(4,64,1)"], "distant_mass takes at most sink, recent, got [4, 64, 1]"),
        (["distant_mass(-1)"], "sink of distant_mass: expected 0 or more, got -1"),
        (["distant_mass(4,0)"], "recent of distant_mass: expected 1 or more, got 0"),
        (["distant_mass(4,0.5)"], "recent of distant_mass: expected an integer, got 0.5"),
        (["distant_mass(a)"], "sink of distant_mass: expected an integer, got 'a'"),
        (["distant_mass(4,64"], "expected distant_mass(4,64), with your options, got"),
        (["distant_mass(4)+entropy"], "expected distant_mass(4,64), with your options, got"),
        (["labelled_key_mass(3)"], "keys of labelled_key_mass: expected a string"),
        (["entropy(1)"], "entropy takes no options, got [1]"),
        (["distant_mas(4)"], "unknown statistic 'distant_mas': did you mean 'distant_mass'?"),
        (["distant_mass", "distant_mass(4,64)"], "expected at least one name, each once"),
        (["standard", "standard"], "expected at least one name, each once"),
        (
            ["labelled_key_mass(a_b,c)", "labelled_key_mass(a,b_c)"],
            "would have one column, labelled_key_mass_a_b_c; leave one of them out",
        ),
    ],
)
def test_wrong_options_are_one_line(names: list[str], problem: str) -> None:
    with pytest.raises(ScanError) as error:
        scan_of(*names)
    assert str(error.value).startswith("statistics: ")
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_a_statistic_needs_a_default_and_only_statistics_have_options() -> None:
    def without_default(pattern: Pattern, *, keys: Count) -> Tensor:
        """Meaning.

        formula
        """
        return pattern.distance()

    with pytest.raises(ValueError, match="option 'keys' needs a default of its type"):
        statistic(unit="x", source="x")(without_default)

    def with_option(W_Q: Tensor, *, keys: Count = 1) -> Tensor:
        """Meaning.

        formula
        """
        return W_Q

    with pytest.raises(ValueError, match="a weight statistic has no options, got keys"):
        weight(unit="x", source="x", axis="none")(with_option)


def test_the_page_says_which_options_there_are() -> None:
    text = page(KIND.page)
    assert text.count("### distant_mass\n") == 1
    assert "options `sink` = 4 (0 or more), `recent` = 64 (1 or more)" in text
    assert ": column `distant_mass_4_64`" in text
    assert "options `keys` = gold, `queries` = query" in text


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("options")
    return {
        "model": str(toy.save_model(folder / "toy", toy.gpt2())),
        "n_ctx": 12,
        "input": {"family": "uniform_random"},
        "sequences": 4,
        "sequences_per_shard": 2,
        "statistics": ["entropy", "distant_mass(1,3)", "sink_position"],
        "out": str(folder / "runs"),
    }


def test_a_scan_with_options_is_measured_extended_and_asked_in_sql(fields: dict[str, Any]) -> None:
    with headcount.scan(fields, name="options", replicas=0, quiet=True) as run:
        first = run.path
    written = fields | {"sequences": 6, "statistics": ["entropy", "distant_mass(1, 3)"]}
    written["statistics"].append("sink_position")
    with headcount.scan(written, name="options", replicas=0, quiet=True) as run:
        assert run.path == first
        columns = "sequence, layer, head, distant_mass_1_3, sink_position"
        rows = run.sql(f"SELECT {columns} FROM heads ORDER BY sequence, layer, head").rows()
        assert len(rows) == 6 * 3 * 4
        shares = np.array([row[3] for row in rows], dtype=float)
        assert ((shares > 0) & (shares < 1)).all()
        assert {row[4] for row in rows} <= set(range(7))
        uniform_baseline = run.sql(
            "SELECT DISTINCT round(uniform_distant_mass_1_3, 5) FROM sequences"
        ).rows()
        # Of q + 1 keys, q - 3 are distant.
        expected = np.mean([(q - 3) / (q + 1) for q in range(4, 12)])
        assert uniform_baseline == [(pytest.approx(expected, abs=1e-5),)]
        with connect(first) as connection:
            comments = connection.execute(
                "SELECT comment FROM duckdb_columns() "
                "WHERE table_name = 'by_head' AND column_name = 'mean_distant_mass_1_3'"
            ).fetchall()
        assert "sink = 1, recent = 3" in comments[0][0]


def test_measure_takes_options_too(fields: dict[str, Any]) -> None:
    model = GPT2LMHeadModel.from_pretrained(fields["model"])
    tokens = [[5, 6, 7, 8, 9, 5, 6, 7]]
    rows = headcount.measure(model, tokens, ["distant_mass(1,3)", "query_absmax"])
    values = rows["distant_mass_1_3"].to_numpy()
    assert len(values) == 12
    assert ((values > 0) & (values < 1)).all()


def test_parse_scan_takes_what_it_writes(tmp_path: Path) -> None:
    scan = scan_of("standard", "distant_mass(2,3)")
    again = parse_scan(scan.model_dump(mode="json", exclude_none=True))
    assert again == scan
