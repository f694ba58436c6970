-- Standard errors that take documents for independent, and not the sequences of one document.
--
-- s² = Σ_d (S_d - n_d x̄)² / (N² - Σ_d n_d²): the sums run over the documents with a value, S_d is
-- the sum of document d's n_d values, N = Σ n_d, and x̄ = Σ S_d / N. Where each sequence is a
-- document, s = sd / √N. With less than two documents it is NULL.
--
-- The divisor is N² (1 - 1/E), with the effective number of documents E = N² / Σ n_d²: how many
-- equally long ones are as sure. If their number stood there instead, s would be too small wherever
-- a few documents are much longer than the others.
--
-- Student's t has (1 - 1/E) (Σ n_d²)² / Σ n_d⁴ degrees of freedom, as Satterthwaite has it: s² is
-- about a sum of squares that are as large as n_d², and a few long documents are most of it. Where
-- all are equally long, that is their number less one.
--
-- Every view goes by these macros. One query needs two steps: document_sums by document, then
-- document_error of what it gave. No if(): DuckDB 1.4 does not know the one that 2.0 writes
-- (exported_views.py).

CREATE MACRO standard_deviation(m2, number) AS
    CASE WHEN number > 1 THEN sqrt(m2 / (number - 1)) END;

-- m2 is Σ (S_d - n_d x̄)², and squares is Σ n_d².
CREATE MACRO standard_error(m2, number, squares) AS
    CASE WHEN number::DOUBLE ** 2 > squares THEN sqrt(m2 / (number::DOUBLE ** 2 - squares)) END;

CREATE MACRO effective_number(number, squares) AS number::DOUBLE ** 2 / nullif(squares, 0);

-- fourths is Σ n_d⁴. Below 1 the tail of t would be longer than any that is of use.
CREATE MACRO degrees_of_freedom(number, squares, fourths) AS
    CASE WHEN number::DOUBLE ** 2 > squares THEN
        greatest(1, (1 - squares / number::DOUBLE ** 2) * squares::DOUBLE ** 2 / fourths)
    END;

-- An aggregate over the rows of one document, or of all that have one sequence each (NULL): by
-- internal.documents. For the latter, S_d is the value itself.
CREATE MACRO document_sums(value, document) AS
    struct_pack(
        number := count(value),
        total := sum(value::DOUBLE),
        documents := CASE count(document) WHEN 0 THEN count(value) ELSE least(count(value), 1) END,
        squares := CASE count(document)
            WHEN 0 THEN sum(value::DOUBLE * value) ELSE sum(value::DOUBLE) ** 2
        END,
        products := sum(value::DOUBLE) * CASE count(document) WHEN 0 THEN 1 ELSE count(value) END,
        weights := count(value)::DOUBLE * CASE count(document) WHEN 0 THEN 1 ELSE count(value) END,
        fourths := count(value)::DOUBLE * CASE count(document)
            WHEN 0 THEN 1 ELSE count(value)::DOUBLE ** 3
        END
    );

CREATE MACRO document_mean(sums) AS sum((sums).total) / sum((sums).number);

-- Of values that are all equal, rounding leaves a little, or less than nothing. Deviations below a
-- millionth of the values are those of stored numbers.
CREATE MACRO beyond_rounding(m2, squares) AS
    CASE WHEN m2 > 1e-12::DOUBLE * squares THEN m2 ELSE 0 END;

CREATE MACRO document_error(sums) AS
    standard_error(
        beyond_rounding(
            sum((sums).squares)
            - 2 * document_mean(sums) * sum((sums).products)
            + document_mean(sums) ** 2 * sum((sums).weights),
            sum((sums).squares)
        ),
        sum((sums).number),
        sum((sums).weights)
    );

CREATE MACRO document_number(sums) AS
    effective_number(sum((sums).number), sum((sums).weights));

CREATE MACRO document_freedom(sums) AS
    degrees_of_freedom(sum((sums).number), sum((sums).weights), sum((sums).fourths));

-- How sure a difference is: Student's t, and then q, Benjamini and Hochberg's adjusted p over all
-- heads of a table.

-- P(|T| > t) for t >= 0, off by less than 1e-5 of itself (df = 1: 4e-4). The density of t is that of
-- a normal y with a factor near 1: y² = r ln(1 + t²/df), r = df - 1/2 (Hill 1970, Algorithm 395).
-- √(y² / (2r sinh(y² / 2r))) is that factor. What lies beyond √(y² + 24) is less than e^-12 of it.
CREATE MACRO normal_scale(t, df) AS sqrt((df - 0.5) * ln(1 + t ** 2 / df));
CREATE MACRO tail_density(y, r) AS
    exp(y ** 2 / -2::DOUBLE) * y / sqrt(2 * r * sinh(y ** 2 / (2 * r)));

-- Lambdas stand for names of parts: a macro would write each part out wherever it is used. Gauss and
-- Legendre's eight points lie in pairs. Rounding may leave more than 1.
CREATE MACRO student_tail(t, df) AS
    least(
        1,
        2 * exp(lgamma((df + 1) / 2) - lgamma(df / 2)) / sqrt(pi() * (df - 0.5))
        * list_transform(
            [normal_scale(t, df)],
            lambda low: (sqrt(low ** 2 + 24) - low) * list_sum(list_transform(
                [
                    {'place': 0.0198550717512319::DOUBLE, 'weight': 0.0506142681451881::DOUBLE},
                    {'place': 0.1016667612931866::DOUBLE, 'weight': 0.1111905172266872::DOUBLE},
                    {'place': 0.2372337950418355::DOUBLE, 'weight': 0.1568533229389436::DOUBLE},
                    {'place': 0.4082826787521751::DOUBLE, 'weight': 0.1813418916891810::DOUBLE}
                ],
                lambda point: point.weight * (
                    tail_density(low + point.place * (sqrt(low ** 2 + 24) - low), df - 0.5)
                    + tail_density(low + (1 - point.place) * (sqrt(low ** 2 + 24) - low), df - 0.5)
                )
            ))
        )[1]
    );

-- Two-sided p of a difference. level: the size of what differs, as stored numbers are rounded:
-- below a millionth of it there is no difference. An error of 0 is that of documents that all agree.
CREATE MACRO two_sided_p(difference, error, df, level) AS
    CASE
        WHEN error IS NULL OR difference IS NULL OR NOT df > 0 THEN NULL
        WHEN abs(difference) <= 1e-6::DOUBLE * coalesce(abs(level), 0) THEN 1::DOUBLE
        WHEN error = 0 THEN 0::DOUBLE
        ELSE student_tail(abs(difference / error), df::DOUBLE)
    END;

-- q = min over p' >= p of p' m / #{p'' <= p'}, of the m heads with a p in a table; in two steps, as
-- windows do not nest. A table is what has equal keys.
CREATE MACRO scaled_p(p, run, intervention, input, statistic, other := NULL) AS
    p * count(p) OVER (PARTITION BY run, intervention, input, statistic, other)
    / count(p) OVER (PARTITION BY run, intervention, input, statistic, other ORDER BY p);
CREATE MACRO adjusted_p(p, scaled, run, intervention, input, statistic, other := NULL) AS
    CASE WHEN p IS NOT NULL THEN
        min(scaled) OVER (
            PARTITION BY run, intervention, input, statistic, other ORDER BY p DESC
        )
    END;
