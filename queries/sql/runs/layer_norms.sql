-- Norm of the residual stream before and after each layer: at position 0 (first), mean over the
-- other positions (others), and first / others (ratio).
WITH
    layer_means AS (
        SELECT
            run_id, model, n_ctx, intervention, input_family, layer,
            -- The stream is the same for all heads of a layer, so each sequence counts once.
            count(DISTINCT sequence) AS sequences,
            avg(sink_resid_pre_norm) AS resid_pre_first,
            -- (T · mean - first) / (T - 1): the stored mean includes position 0.
            avg((n_ctx * resid_pre_norm::DOUBLE - sink_resid_pre_norm) / nullif(n_ctx - 1, 0))
                AS resid_pre_others,
            avg(sink_resid_post_norm) AS resid_post_first,
            avg((n_ctx * resid_post_norm::DOUBLE - sink_resid_post_norm) / nullif(n_ctx - 1, 0))
                AS resid_post_others
        FROM heads
        JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
        GROUP BY ALL
    )
SELECT
    run_id, model, n_ctx, intervention, input_family, layer,
    resid_pre_first, resid_pre_others,
    resid_pre_first / nullif(resid_pre_others, 0) AS resid_pre_ratio,
    resid_post_first, resid_post_others,
    resid_post_first / nullif(resid_post_others, 0) AS resid_post_ratio,
    sequences
FROM layer_means
ORDER BY run_id, intervention, input_family, layer
