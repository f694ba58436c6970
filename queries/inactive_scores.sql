-- Scores by which a head counts as inactive on a sequence: one row per run, intervention, sequence, layer, head and score.
-- After Sandoval-Segura et al. 2025, arXiv 2504.03889. (LN): over the mean of the layer's heads; (HN): over the head's own AHON.
-- A head is inactive where the score is above or below a threshold, as the column inactive says (inactive_flags).
-- A mean over the layer's heads needs all of them: where a scan measured some, scores with (LN) are left out.
-- Scores whose columns a run does not have are left out; Random is an MD5 hash of sequence, layer and head, uniform in 0 to 1.
WITH
    measured AS (
        -- An empty table of all columns, so that those that no run has are NULL.
        SELECT
            NULL::FLOAT AS sink_alpha, NULL::FLOAT AS entropy, NULL::FLOAT AS head_output_norm,
            NULL::FLOAT AS head_output_norm_last, NULL::FLOAT AS sink_value_norm, NULL::FLOAT AS value_norm,
            NULL::FLOAT AS head_result_norm
        WHERE false
        UNION ALL BY NAME
        FROM heads
    ),
    in_layers AS (
        SELECT measured.*, count(*) OVER layer_heads >= coalesce(n_heads, 0) AS is_whole
        FROM measured JOIN (SELECT run_id, n_heads FROM runs) USING (run_id)
        WINDOW layer_heads AS (PARTITION BY run_id, intervention, sequence, layer)
    ),
    scored AS (
        SELECT
            run_id, intervention, input_family, sequence, layer, head, label,
            sink_alpha::DOUBLE AS "AWFT",
            sink_alpha / nullif(avg(sink_alpha) FILTER (WHERE is_whole) OVER layer_heads, 0) AS "AWFT (LN)",
            head_output_norm::DOUBLE AS "AHON",
            head_output_norm / nullif(avg(head_output_norm) FILTER (WHERE is_whole) OVER layer_heads, 0) AS "AHON (LN)",
            entropy::DOUBLE AS "AEQD",
            entropy / nullif(avg(entropy) FILTER (WHERE is_whole) OVER layer_heads, 0) AS "AEQD (LN)",
            sink_value_norm::DOUBLE AS "FTVVN",
            sink_value_norm / nullif(avg(sink_value_norm) FILTER (WHERE is_whole) OVER layer_heads, 0) AS "FTVVN (LN)",
            value_norm::DOUBLE AS "AVVN",
            value_norm / nullif(avg(value_norm) FILTER (WHERE is_whole) OVER layer_heads, 0) AS "AVVN (LN)",
            head_output_norm_last::DOUBLE AS "LTHON",
            head_output_norm_last / nullif(avg(head_output_norm) FILTER (WHERE is_whole) OVER layer_heads, 0) AS "LTHON (LN)",
            head_output_norm_last::DOUBLE / nullif(head_output_norm, 0) AS "LTHON (HN)",
            head_result_norm::DOUBLE AS "FullHeadOutput",
            head_result_norm / nullif(avg(head_result_norm) FILTER (WHERE is_whole) OVER layer_heads, 0) AS "FullHeadOutput (LN)",
            md5_number_lower(sequence || ' ' || layer || ' ' || head) / 2.0::DOUBLE ** 64 AS "Random"
        FROM in_layers
        WINDOW layer_heads AS (PARTITION BY run_id, intervention, sequence, layer)
    )
SELECT
    run_id, intervention, input_family, sequence, layer, head, label, score, value,
    CASE WHEN score LIKE 'AWFT%' THEN 'above' ELSE 'below' END AS inactive
FROM (
    UNPIVOT scored
    ON COLUMNS(* EXCLUDE (run_id, intervention, input_family, sequence, layer, head, label))
    INTO NAME score VALUE value
)
