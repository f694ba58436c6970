"""Standard errors that take documents for independent, and not the sequences of one document.

s² = Σ_d (S_d - n_d x̄)² / N² · D / (D - 1): the sum runs over the D documents with a value, S_d is
the sum of document d's n_d values, N = Σ n_d, and x̄ = Σ S_d / N. Where each sequence is a document,
s = sd / √N. With less than two documents it is NULL.

Every view goes by these macros. One query needs two steps: `document_sums` by document, then
`document_error` of what it gave.
"""

from __future__ import annotations

import duckdb

MACROS = {
    "standard_deviation(m2, number)": "CASE WHEN number > 1 THEN sqrt(m2 / (number - 1)) END",
    # m2 is Σ (S_d - n_d x̄)².
    "standard_error(m2, number, documents)": """
        CASE WHEN documents > 1 THEN sqrt(m2 * documents / (documents - 1)) / number END""",
    # An aggregate over the rows of one document, or of all that have one sequence each (NULL): by
    # `internal.documents`. For the latter, S_d is the value itself.
    "document_sums(value, document)": """
        struct_pack(
            number := count(value),
            total := sum(value::DOUBLE),
            documents := if(count(document) = 0, count(value), least(count(value), 1)),
            squares := if(
                count(document) = 0, sum(value::DOUBLE * value), sum(value::DOUBLE) ** 2
            ),
            products := sum(value::DOUBLE) * if(count(document) = 0, 1, count(value)),
            weights := count(value)::DOUBLE * if(count(document) = 0, 1, count(value))
        )""",
    "document_mean(sums)": "sum((sums).total) / sum((sums).number)",
    # Rounding may leave less than nothing of values that are all equal.
    "document_error(sums)": """
        standard_error(
            greatest(
                0,
                sum((sums).squares)
                - 2 * document_mean(sums) * sum((sums).products)
                + document_mean(sums) ** 2 * sum((sums).weights)
            ),
            sum((sums).number),
            sum((sums).documents)
        )""",
}
"""What each macro is, by name and parameters."""

DOCUMENTS = """
    SELECT
        run_id, intervention, sequence, pile_set_name,
        CASE
            WHEN count(*) OVER (PARTITION BY run_id, intervention, document) > 1 {or_it_goes_on}
            THEN document
        END AS document
    FROM internal.{sequences}
    WINDOW in_order AS (PARTITION BY run_id, intervention ORDER BY sequence)"""
"""The document of each sequence. NULL if it has no other: most queries need no group for it."""

AT_AN_END = """
    OR lag(sequence) OVER in_order IS DISTINCT FROM sequence - 1
    OR lead(sequence) OVER in_order IS DISTINCT FROM sequence + 1"""
"""Whether a document may go on in sequences that are not among these."""


def create_error_macros(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the macros, and the view of documents that they need."""
    for signature, body in MACROS.items():
        connection.execute(f"CREATE MACRO {signature} AS {body}")
    all_documents = DOCUMENTS.format(sequences="sequences", or_it_goes_on="")
    connection.execute(f"CREATE VIEW internal.documents AS {all_documents}")
    # Where all is rolled up, this one reads nothing.
    unrolled = DOCUMENTS.format(sequences="unrolled_sequences", or_it_goes_on=AT_AN_END)
    connection.execute(f"CREATE VIEW internal.unrolled_documents AS {unrolled}")
