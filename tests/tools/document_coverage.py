"""How often intervals of real documents hold the truth, and how often two random halves differ.

`python -m tests.tools.document_coverage RUN FILE…` measures it, as in docs/guide/sql.md. Documents
are drawn with replacement from those of a run whose file has one of these names; the truth is the
mean over all of them. A table of heads is null where two halves of a draw are compared.
"""

import sys

import numpy as np

from headcount.exports.shared.certainty import LARGEST_Q, DocumentSums
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.open.sql_text import quoted_name, text_literal
from headcount.schemas.significance import q_of, student_tail

NUMBERS, DRAWS = (10, 30, 60, 100, 200, 1000), 300  # of documents, and of draws of so many
LEAST_HALVES = 30  # documents that are compared by halves


def sums_by_document(database: RunDatabase, statistic: str, files: list[str]) -> DocumentSums:
    """The sums of a statistic that is defined on every sequence, of the untouched model."""
    names = ", ".join(map(text_literal, files))
    rows = np.array(
        database.rows(f"""
        SELECT document, layer, head, sum({quoted_name(statistic)}::DOUBLE), count(*)
        FROM heads JOIN sequences USING (run_id, intervention, sequence)
        WHERE intervention = 'none' AND parse_filename(file) IN ({names})
        GROUP BY ALL
    """)
    )
    document = np.unique(rows[:, 0], return_inverse=True)[1]
    layer, head = rows[:, 1:3].astype(int).T
    totals = np.zeros((document.max() + 1, layer.max() + 1, head.max() + 1))
    totals[document, layer, head] = rows[:, 3]
    numbers = np.zeros(len(totals))
    numbers[document] = rows[:, 4]
    return DocumentSums(totals, numbers)


def is_covered(sums: DocumentSums, truth: np.ndarray) -> np.ndarray:
    """Whether the interval of each head holds the truth."""
    return student_tail(np.abs(sums.means - truth) / sums.errors, sums.degrees_of_freedom) > 0.05


def is_any_different(one: DocumentSums, other: DocumentSums) -> bool:
    """Whether any head of two groups is called different, as the view contrasts has it."""
    squares = one.errors**2, other.errors**2
    error = np.sqrt(squares[0] + squares[1])
    # Welch and Satterthwaite
    spread = squares[0] ** 2 / one.degrees_of_freedom + squares[1] ** 2 / other.degrees_of_freedom
    t, freedom = np.abs(one.means - other.means) / error, error**4 / spread
    p = [
        student_tail(np.array(value), float(degrees)).item()
        for value, degrees in zip(t.ravel(), freedom.ravel(), strict=True)
    ]
    return bool((q_of(np.array(p)) <= LARGEST_Q).any())


def main() -> None:
    """Print the table."""
    run, *files = sys.argv[1:]
    database = open_runs(run)
    # Of a statistic that has one value everywhere there is nothing to cover.
    statistics = [
        name
        for (name,) in database.rows("""
            SELECT statistic FROM head_summaries
            WHERE intervention = 'none'
            GROUP BY statistic
            HAVING max(undefined) = 0 AND min(sd / abs(mean)) > 1e-6
            ORDER BY statistic
        """)
    ]
    all_sums = [sums_by_document(database, statistic, files) for statistic in statistics]
    documents = all_sums[0].documents
    print(f"{documents:,} documents, {len(statistics)} statistics: {', '.join(statistics)}")
    print("| documents | effective | intervals with the truth | null tables that name a head |")
    print("|---|---|---|---|")
    rng = np.random.default_rng(1)
    for number in NUMBERS:
        effective: list[float] = []
        covered: list[float] = []
        named: list[bool] = []
        for _ in range(DRAWS):
            draw = rng.integers(0, documents, number)
            halves = draw[: number // 2], draw[number // 2 :]
            for sums in all_sums:
                drawn = sums.of(draw)
                effective.append(float(drawn.numbers.sum() ** 2 / (drawn.numbers**2).sum()))
                covered.append(float(is_covered(drawn, sums.means).mean()))
                if number >= LEAST_HALVES:
                    named.append(is_any_different(*map(sums.of, halves)))
        held = f"{100 * np.mean(covered):.1f} %"
        share = f"{100 * np.mean(named):.1f} %" if named else ""
        print(f"| {number:,} | {np.median(effective):.0f} | {held} | {share} |", flush=True)


if __name__ == "__main__":
    main()
