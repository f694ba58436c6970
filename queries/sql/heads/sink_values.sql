-- Norms of values and keys per head: at position 0 (first), mean over the other positions (others),
-- and first / others (ratio).
WITH
    head_means AS (
        SELECT
            run_id, model, n_ctx, intervention, input_family, layer, head,
            count(*) AS sequences,
            avg(sink_value_norm) AS value_norm_first,
            -- (T · mean - first) / (T - 1): the stored mean includes position 0.
            avg((n_ctx * value_norm::DOUBLE - sink_value_norm) / nullif(n_ctx - 1, 0))
                AS value_norm_others,
            avg(sink_key_norm) AS key_norm_first,
            avg((n_ctx * key_norm::DOUBLE - sink_key_norm) / nullif(n_ctx - 1, 0))
                AS key_norm_others
        FROM heads
        JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
        GROUP BY ALL
    )
SELECT
    run_id, model, n_ctx, intervention, input_family,
    'L' || layer || 'H' || head AS label,
    layer, head,
    value_norm_first, value_norm_others,
    value_norm_first / nullif(value_norm_others, 0) AS value_norm_ratio,
    key_norm_first, key_norm_others,
    key_norm_first / nullif(key_norm_others, 0) AS key_norm_ratio,
    sequences
FROM head_means
ORDER BY run_id, intervention, input_family, layer, head
