-- Share of sequences on which a head is inactive, by each score and quantile of inactive_flags.
WITH
    shares AS (
        SELECT
            run_id, intervention, input_family, score, quantile, layer, head,
            any_value(threshold) AS threshold,
            avg(is_inactive::INT) AS inactive_share,
            count(*) AS sequences
        FROM inactive_flags
        GROUP BY ALL
    )
SELECT
    run_id, model, n_ctx, intervention, input_family, score, quantile, threshold,
    'L' || layer || 'H' || head AS label,
    layer, head, inactive_share, sequences
FROM shares
JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
ORDER BY run_id, intervention, input_family, score, quantile, layer, head
