-- Exact quantiles of a statistic by head over the sequences on which it is defined, interpolated as
-- numpy.percentile does. Faster, to less than a bin: head_quantiles.
-- parameter statistic VARCHAR = 'sink_mass': A column of heads.
-- example: quantiles --statistic entropy --limit 5
WITH
    measured AS (
        SELECT
            run_id, intervention, input_family, layer, head,
            COLUMNS(lambda c: c = $statistic)::DOUBLE AS value
        FROM heads
    ),
    of_heads AS (
        SELECT
            run_id, intervention, input_family, layer, head,
            quantile_cont(value, [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99]) AS levels,
            min(value) AS minimum,
            max(value) AS maximum,
            count(value) AS defined
        FROM measured
        GROUP BY ALL
    )
SELECT
    run_id, model, n_ctx, intervention, input_family,
    'L' || layer || 'H' || head AS label,
    layer, head,
    $statistic AS statistic,
    minimum,
    levels[1] AS p01, levels[2] AS p05, levels[3] AS p25, levels[4] AS p50,
    levels[5] AS p75, levels[6] AS p95, levels[7] AS p99,
    maximum, defined
FROM of_heads
-- Not the runs that did not measure it.
JOIN (
    SELECT run_id, model, n_ctx FROM runs WHERE list_contains(statistics, $statistic)
) USING (run_id)
ORDER BY run_id, intervention, input_family, layer, head
