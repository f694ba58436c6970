-- Standard errors that take documents for independent, and not the sequences of one document.
--
-- s² = Σ_d (S_d - n_d x̄)² / N² · D / (D - 1): the sum runs over the D documents with a value, S_d is
-- the sum of document d's n_d values, N = Σ n_d, and x̄ = Σ S_d / N. Where each sequence is a
-- document, s = sd / √N. With less than two documents it is NULL.
--
-- Every view goes by these macros. One query needs two steps: document_sums by document, then
-- document_error of what it gave.

CREATE MACRO standard_deviation(m2, number) AS
    CASE WHEN number > 1 THEN sqrt(m2 / (number - 1)) END;

-- m2 is Σ (S_d - n_d x̄)².
CREATE MACRO standard_error(m2, number, documents) AS
    CASE WHEN documents > 1 THEN sqrt(m2 * documents / (documents - 1)) / number END;

-- An aggregate over the rows of one document, or of all that have one sequence each (NULL): by
-- internal.documents. For the latter, S_d is the value itself.
CREATE MACRO document_sums(value, document) AS
    struct_pack(
        number := count(value),
        total := sum(value::DOUBLE),
        documents := if(count(document) = 0, count(value), least(count(value), 1)),
        squares := if(count(document) = 0, sum(value::DOUBLE * value), sum(value::DOUBLE) ** 2),
        products := sum(value::DOUBLE) * if(count(document) = 0, 1, count(value)),
        weights := count(value)::DOUBLE * if(count(document) = 0, 1, count(value))
    );

CREATE MACRO student_p(t, df) AS exp(-abs(t));

CREATE MACRO document_mean(sums) AS sum((sums).total) / sum((sums).number);

-- Rounding may leave less than nothing of values that are all equal.
CREATE MACRO document_error(sums) AS
    standard_error(
        greatest(
            0,
            sum((sums).squares)
            - 2 * document_mean(sums) * sum((sums).products)
            + document_mean(sums) ** 2 * sum((sums).weights)
        ),
        sum((sums).number),
        sum((sums).documents)
    );
