-- Whether a head is inactive on a sequence, by each score of inactive_scores and each threshold.
-- A threshold is a quantile of all scores of a run: 0, 0.05 … 0.3 from the end where heads are
-- inactive. A score equal to it is not past it.
WITH
    thresholds AS (
        SELECT
            run_id, intervention, input_family, score,
            unnest([0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]::DOUBLE[]) AS quantile,
            -- If large scores mean inactive, the quantiles count from the top.
            unnest(CASE any_value(inactive)
                WHEN 'above' THEN quantile_cont(value, [1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7])
                ELSE quantile_cont(value, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
            END) AS threshold
        FROM inactive_scores
        GROUP BY run_id, intervention, input_family, score
    )
SELECT
    run_id, model, n_ctx, intervention, input_family, score, quantile, threshold,
    sequence, layer, head, label,
    CASE inactive WHEN 'above' THEN value > threshold ELSE value < threshold END AS is_inactive
FROM inactive_scores
JOIN thresholds USING (run_id, intervention, input_family, score)
