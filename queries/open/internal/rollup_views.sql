-- Moments and histograms of every statistic, by head and by subset of the Pile.
-- In braces stands what depends on the runs and on the keys: rollup_views.py.

-- part: merged_moments
-- Count, mean, M2 and extremes by some keys, merged as Chan et al. 1979 do it.
-- n = Σ n_u, mean = Σ n_u mean_u / n, M2 = Σ M2_u + Σ n_u (mean_u - mean)², over what is merged.
-- document_m2 = Σ_d t_d², where t_d is the sum of document d's deviations from the mean. A row
-- without a document is of many, none of which has values in another row: with δ = mean_u - mean,
-- Σ (t_d + n_d δ)² = Σ t_d² + 2 δ Σ t_d n_d + δ² Σ n_d².
WITH
    with_pooled_mean AS (
        SELECT
            *,
            sum(count * mean) OVER cell / nullif(sum(count) OVER cell, 0) AS pooled_mean
        FROM (
            SELECT
                {by}, document, count, undefined, mean, m2, minimum, maximum,
                documents, document_m2, document_product, document_squares, document_fourths
            FROM internal.rollups
            WHERE {level}
            {from_rows}
        )
        WINDOW cell AS (PARTITION BY {by})
    ),
    by_document AS (
        SELECT
            {by}, document,
            sum(count) AS count,
            sum(undefined) AS undefined,
            any_value(pooled_mean) AS mean,
            sum(m2) + sum(count * (mean - pooled_mean) ** 2) AS m2,
            min(minimum) AS minimum,
            max(maximum) AS maximum,
            CASE WHEN document IS NULL THEN sum(documents) ELSE (sum(count) > 0)::INT END AS documents,
            CASE WHEN document IS NULL THEN
                sum(
                    document_m2
                    + 2 * (mean - pooled_mean) * document_product
                    + (mean - pooled_mean) ** 2 * document_squares
                )
            ELSE
                sum(count * (mean - pooled_mean)) ** 2
            END AS document_m2,
            CASE WHEN document IS NULL THEN sum(document_squares) ELSE sum(count) ** 2 END
                AS document_squares,
            CASE WHEN document IS NULL THEN sum(document_fourths) ELSE sum(count) ** 4 END
                AS document_fourths
        FROM with_pooled_mean
        GROUP BY {by}, document
    )
SELECT
    {by},
    sum(count)::BIGINT AS count,
    sum(undefined)::BIGINT AS undefined,
    any_value(mean) AS mean,
    sum(m2) AS m2,
    min(minimum) AS minimum,
    max(maximum) AS maximum,
    sum(documents)::BIGINT AS documents,
    sum(document_m2) AS document_m2,
    sum(document_squares) AS document_squares,
    sum(document_fourths) AS document_fourths
FROM by_document
GROUP BY ALL

-- part: moments_of_rows
-- Of a document, merging finds t_d itself. Of sequences that are a document each (NULL), t_d is the
-- deviation: Σ t_d² is M2, Σ t_d n_d is 0.
SELECT
    {keys}, document,
    count({value}) AS count,
    count(*) - count({value}) AS undefined,
    avg({value}) AS mean,
    var_pop({value}) * count({value}) AS m2,
    min({value}) AS minimum,
    max({value}) AS maximum,
    count({value}) AS documents,
    var_pop({value}) * count({value}) AS document_m2,
    0 AS document_product,
    count({value}) AS document_squares,
    count({value}) AS document_fourths
FROM internal.unrolled_heads JOIN {documents} {condition}
GROUP BY ALL

-- part: bin_ends
-- As schemas/histogram_bins.py says.
CASE
    WHEN isfinite(range_low) AND isfinite(range_high)
    THEN range_low + bin * (range_high - range_low) / {linear_bins}
    WHEN bin = -{last_bin} THEN '-inf'::DOUBLE
    WHEN bin < 0 THEN -pow(2, (-bin)::DOUBLE / {bins_per_octave} + {smallest_octave})
    WHEN bin = 0 THEN greatest(range_low, -{near_zero})
    ELSE pow(2, (bin - 1)::DOUBLE / {bins_per_octave} + {smallest_octave})
END AS low,
CASE
    WHEN isfinite(range_low) AND isfinite(range_high)
    THEN range_low + (bin + 1) * (range_high - range_low) / {linear_bins}
    WHEN bin = {last_bin} THEN 'inf'::DOUBLE
    WHEN bin > 0 THEN pow(2, bin::DOUBLE / {bins_per_octave} + {smallest_octave})
    WHEN bin = 0 THEN least(range_high, {near_zero})
    ELSE -pow(2, (-bin - 1)::DOUBLE / {bins_per_octave} + {smallest_octave})
END AS high

-- part: merged_bins
-- How many values lie in each bin by some keys, with the ends of the bin. minimum and maximum are
-- ends that the values of the bin do not exceed either.
SELECT
    {by}, bin,
    {bin_ends},
    count, minimum, maximum
FROM (
    SELECT
        {by}, bin, range_low, range_high,
        sum(count)::BIGINT AS count,
        min(minimum) AS minimum,
        max(maximum) AS maximum
    FROM (
        -- A roll-up has a list of bins and one of counts, unnested side by side.
        SELECT
            {by}, range_low, range_high, minimum, maximum,
            unnest(bins) AS bin, unnest(counts) AS count
        FROM internal.rollups
        WHERE {level}
        {from_rows}
    )
    GROUP BY ALL
)

-- part: bins_of_rows
SELECT
    {keys},
    {bin} AS bin,
    '{low}'::DOUBLE AS range_low,
    '{high}'::DOUBLE AS range_high,
    count(*) AS count,
    min({value}) AS minimum,
    max({value}) AS maximum
FROM (FROM internal.unrolled_heads {subsets} {condition})
WHERE {value} IS NOT NULL
GROUP BY ALL
