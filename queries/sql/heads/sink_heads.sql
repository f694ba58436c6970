-- Heads ranked by attention to key 0, with the uniform baseline and ratios of norms at
-- position 0 to those at other positions.
-- is_sink: mean sink_alpha above the threshold, by default that of Gu et al. 2024 (arXiv
-- 2410.10781). sink_rate: share of sequences above it.
-- parameter threshold DOUBLE = 0.3: Mean sink_alpha above which a head is a sink.
-- example: sink_heads --threshold 0.2 --limit 5
WITH
    head_sums AS (
        -- sum and count are faster than avg over the rows of large runs.
        SELECT
            run_id, intervention, input_family, layer, head,
            count(sink_mass) AS sequences,
            sum(sink_mass::DOUBLE) / count(sink_mass) AS sink_mass,
            sum(((1 + (n_ctx - 1) * sink_mass::DOUBLE) / n_ctx > $threshold)::INT)
                / count(sink_mass) AS sink_rate,
            sum(sink_value_norm::DOUBLE) / count(sink_value_norm) AS first_value,
            sum(value_norm::DOUBLE) / count(value_norm) AS mean_value,
            sum(sink_resid_pre_norm::DOUBLE) / count(sink_resid_pre_norm) AS first_resid,
            sum(resid_pre_norm::DOUBLE) / count(resid_pre_norm) AS mean_resid
        FROM heads
        JOIN (SELECT run_id, n_ctx FROM runs) USING (run_id)
        GROUP BY ALL
    ),
    head_means AS (
        SELECT
            *,
            -- sink_alpha also counts query 0, which sees only key 0.
            (1 + (n_ctx - 1) * sink_mass) / n_ctx AS sink_alpha,
            -- (T · mean - first) / (T - 1): the stored mean includes position 0.
            (n_ctx * mean_value - first_value) / nullif(n_ctx - 1, 0) AS other_values,
            (n_ctx * mean_resid - first_resid) / nullif(n_ctx - 1, 0) AS other_resid
        FROM head_sums
        JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
    ),
    -- What uniform attention would score on the same sequences.
    uniform_baselines AS (
        SELECT run_id, avg(uniform_sink_mass) AS uniform_baseline
        FROM sequences
        GROUP BY ALL
    )
SELECT
    run_id, model, n_ctx, intervention, input_family,
    -- A head without a score has no rank: rank() would give it the last one.
    CASE WHEN sink_mass IS NOT NULL THEN
        rank() OVER (
            PARTITION BY run_id, intervention, input_family
            ORDER BY sink_mass DESC NULLS LAST
        )
    END AS rank,
    'L' || layer || 'H' || head AS label,
    layer, head, sink_mass, uniform_baseline, sink_alpha,
    sink_alpha > $threshold AS is_sink,
    sink_rate,
    first_value / nullif(other_values, 0) AS value_norm_ratio,
    first_resid / nullif(other_resid, 0) AS resid_pre_norm_ratio,
    sequences
FROM head_means
LEFT JOIN uniform_baselines USING (run_id)
ORDER BY run_id, intervention, input_family, rank, layer, head
