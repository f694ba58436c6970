-- Scores by which a head counts as inactive on a sequence (Sandoval-Segura et al. 2025, arXiv
-- 2504.03889).
-- One row per run, intervention, sequence, layer, head and score. The column inactive says whether
-- a head is inactive above or below a threshold (inactive_flags).
-- (LN): divided by the mean over the layer's heads, all of which must be measured. (HN): divided by
-- the head's own AHON. Random: an MD5 hash of sequence, layer and head, uniform in 0 to 1.
-- Scores whose columns a run did not measure are left out.
WITH
    measured AS (
        -- An empty table that has all columns, so that a column which no run measured is NULL.
        SELECT
            NULL::FLOAT AS sink_alpha,
            NULL::FLOAT AS entropy,
            NULL::FLOAT AS head_output_norm,
            NULL::FLOAT AS head_output_norm_last,
            NULL::FLOAT AS sink_value_norm,
            NULL::FLOAT AS value_norm,
            NULL::FLOAT AS head_result_norm
        WHERE false
        UNION ALL BY NAME
        FROM heads
    ),
    with_layers AS (
        SELECT
            measured.*, model, n_ctx,
            count(*) OVER layer_heads >= coalesce(n_heads, 0) AS is_whole
        FROM measured
        JOIN (SELECT run_id, model, n_ctx, n_heads FROM runs) USING (run_id)
        WINDOW layer_heads AS (PARTITION BY run_id, intervention, sequence, layer)
    ),
    -- FILTER makes the mean of a layer NULL, and with it the score, if heads are missing.
    layer_means AS (
        SELECT
            *,
            avg(sink_alpha) FILTER (WHERE is_whole) OVER layer_heads AS layer_alpha,
            avg(head_output_norm) FILTER (WHERE is_whole) OVER layer_heads AS layer_output,
            avg(entropy) FILTER (WHERE is_whole) OVER layer_heads AS layer_entropy,
            avg(sink_value_norm) FILTER (WHERE is_whole) OVER layer_heads AS layer_sink_value,
            avg(value_norm) FILTER (WHERE is_whole) OVER layer_heads AS layer_value,
            avg(head_result_norm) FILTER (WHERE is_whole) OVER layer_heads AS layer_result
        FROM with_layers
        WINDOW layer_heads AS (PARTITION BY run_id, intervention, sequence, layer)
    ),
    scored AS (
        SELECT
            run_id, model, n_ctx, intervention, input_family, sequence, layer, head, label,
            sink_alpha::DOUBLE AS "AWFT",
            sink_alpha / nullif(layer_alpha, 0) AS "AWFT (LN)",
            head_output_norm::DOUBLE AS "AHON",
            head_output_norm / nullif(layer_output, 0) AS "AHON (LN)",
            entropy::DOUBLE AS "AEQD",
            entropy / nullif(layer_entropy, 0) AS "AEQD (LN)",
            sink_value_norm::DOUBLE AS "FTVVN",
            sink_value_norm / nullif(layer_sink_value, 0) AS "FTVVN (LN)",
            value_norm::DOUBLE AS "AVVN",
            value_norm / nullif(layer_value, 0) AS "AVVN (LN)",
            head_output_norm_last::DOUBLE AS "LTHON",
            head_output_norm_last / nullif(layer_output, 0) AS "LTHON (LN)",
            head_output_norm_last::DOUBLE / nullif(head_output_norm, 0) AS "LTHON (HN)",
            head_result_norm::DOUBLE AS "FullHeadOutput",
            head_result_norm / nullif(layer_result, 0) AS "FullHeadOutput (LN)",
            -- Not random(): the same row has the same score in every query.
            md5_number_lower(sequence || ' ' || layer || ' ' || head)
                / 2.0::DOUBLE ** 64 AS "Random"
        FROM layer_means
    )
SELECT
    run_id, model, n_ctx, intervention, input_family, sequence, layer, head, label, score, value,
    CASE WHEN score LIKE 'AWFT%' THEN 'above' ELSE 'below' END AS inactive
FROM (
    -- UNPIVOT leaves out NULL, and so every score that a run cannot have.
    UNPIVOT scored
    ON COLUMNS(
        * EXCLUDE (
            run_id, model, n_ctx, intervention, input_family, sequence, layer, head, label
        )
    )
    INTO NAME score VALUE value
)
