-- Every statistic of every head: count, mean, spread and extremes.
-- One row per head and statistic. By part of the Pile: part_summaries.
SELECT
    run_id, model, intervention, input_family, layer, head,
    'L' || layer || 'H' || head AS label,
    statistic, count, undefined, mean,
    sqrt(m2 / nullif(count - 1, 0)) AS sd,
    sqrt(m2 / nullif(count - 1, 0) / count) AS standard_error,
    minimum, maximum
FROM ledger.head_moments
JOIN (SELECT run_id, model FROM runs) USING (run_id)
ORDER BY run_id, intervention, input_family, statistic, layer, head
