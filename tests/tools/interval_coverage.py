"""How many of 100 intervals of 95 % hold the truth, by documents and their sizes.

`python -m tests.tools.interval_coverage` prints the table of docs/guide/sql.md. The truth is 0, and
half of the variance of a sequence is its document's. The last line has of the largest case what
the plain number of documents gives: its error, with Student's t of one degree of freedom less.
In real text sizes go with values: `tests.tools.document_coverage` draws its documents.
"""

import numpy as np

from headcount.exports.shared.certainty import DocumentSums
from headcount.schemas.significance import student_tail

HEADS, DRAWS = 1000, 40
NUMBERS = (4, 8, 16, 64, 256, 512)  # of documents


def covered(t: np.ndarray, degrees_of_freedom: float) -> float:
    """The share of intervals with the truth in them, in percent."""
    return 100 * float((student_tail(np.abs(t), degrees_of_freedom) > 0.05).mean())


def main() -> None:
    """Print the table."""
    rng = np.random.default_rng(0)
    sizes_of = {
        "equal": lambda number: np.full(number, 3),
        "1 to 5": lambda number: rng.integers(1, 6, number),
        "log-normal, σ = 1": lambda number: np.ceil(3 * rng.lognormal(0, 1, number)),
        "as 1/rank": lambda number: np.ceil(number / np.arange(1, number + 1)),
        "one has half of all": lambda number: np.array([number - 1] + [1] * (number - 1)),
    }
    print("| documents |", " | ".join(sizes_of), "|")
    print("|---" * (1 + len(sizes_of)) + "|")
    for number in NUMBERS:
        shares: dict[str, float] = {}
        plain: list[float] = []
        for name, draw in sizes_of.items():
            of_draws: list[float] = []
            for _ in range(DRAWS):
                sizes = draw(number)[:, None, None]  # [document 1 1]
                of_document, of_sequences = rng.normal(size=(2, number, 1, HEADS))
                totals = sizes * of_document + np.sqrt(sizes) * of_sequences
                sums = DocumentSums(totals, sizes.ravel())
                of_draws.append(covered(sums.means / sums.errors, sums.degrees_of_freedom))
                residuals = totals - sizes * sums.means
                error = np.sqrt((residuals**2).sum(0) * number / (number - 1)) / sizes.sum()
                plain.append(covered(sums.means / error, number - 1))
            shares[name] = float(np.mean(of_draws))
        print(f"| {number} |", " | ".join(f"{share:.1f}" for share in shares.values()), "|")
    print(f"by the number of documents: {np.mean(plain[-DRAWS:]):.0f} %")


if __name__ == "__main__":
    main()
