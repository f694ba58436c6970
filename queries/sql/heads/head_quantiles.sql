-- Quantiles of every statistic of every head, as in quantiles, from its distribution: fast, and off
-- by less than a bin.
-- width is that of the bin of p50, the wider one if it lies between values of two: 1/256 of a finite
-- range, 4.4 % of the value on an open axis. Exact: quantiles.
WITH
    bins AS (
        SELECT
            run_id, intervention, input_family, layer, head, statistic, count,
            -- No value lies beyond the extremes, which are exact.
            greatest(low, min(minimum) OVER cell) AS low,
            least(high, max(maximum) OVER cell) AS high,
            sum(count) OVER (cell ORDER BY bin) AS rank,
            sum(count) OVER cell AS total
        FROM internal.head_bins
        WINDOW cell AS (
            PARTITION BY run_id, intervention, input_family, layer, head, statistic
        )
    ),
    -- A quantile lies between two values: each counts as much as it is near.
    neighbours AS (
        SELECT
            bins.*, level,
            level * (total - 1) AS quantile_place,
            floor(quantile_place) + step AS place,
            1 - abs(quantile_place - place) AS weight
        FROM bins
        CROSS JOIN (SELECT unnest([0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99]::DOUBLE[]) AS level)
        CROSS JOIN (SELECT unnest([0, 1]) AS step)
        WHERE rank - count <= place AND place < rank AND weight > 0
    ),
    quantiles AS (
        SELECT
            run_id, intervention, input_family, layer, head, statistic, level,
            max(high - low) AS width,
            -- The values of a bin are taken to be equally far apart.
            sum(weight * (low + (high - low) * (place + 0.5 - (rank - count)) / count)) AS quantile
        FROM neighbours
        GROUP BY ALL
    )
SELECT
    run_id, model, intervention, input_family, layer, head,
    'L' || layer || 'H' || head AS label,
    statistic,
    any_value(quantile) FILTER (level = 0.01) AS p01,
    any_value(quantile) FILTER (level = 0.05) AS p05,
    any_value(quantile) FILTER (level = 0.25) AS p25,
    any_value(quantile) FILTER (level = 0.5) AS p50,
    any_value(quantile) FILTER (level = 0.75) AS p75,
    any_value(quantile) FILTER (level = 0.95) AS p95,
    any_value(quantile) FILTER (level = 0.99) AS p99,
    any_value(width) FILTER (level = 0.5) AS width
FROM quantiles
JOIN (SELECT run_id, model FROM runs) USING (run_id)
GROUP BY ALL
ORDER BY run_id, intervention, input_family, statistic, layer, head
