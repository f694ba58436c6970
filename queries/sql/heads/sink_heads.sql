-- Heads ranked by attention to key 0, with the uniform baseline and ratios of norms at
-- position 0 to those at other positions.
-- is_sink: mean sink_alpha above the threshold, by default that of Gu et al. 2024 (arXiv
-- 2410.10781), and above the uniform baseline with q <= 0.05. sink_rate: share of sequences above it.
-- p, q: as in effects, of sink_mass less the baseline, which is the same in every sequence.
-- parameter threshold DOUBLE = 0.3: Mean sink_alpha above which a head is a sink.
-- ranks sink_mass above (n_ctx * $threshold - 1) / nullif(n_ctx - 1, 0)
-- example: sink_heads --threshold 0.2 --limit 5
WITH
    by_document AS (
        -- sum and count are faster than avg over the rows of large runs.
        SELECT
            run_id, intervention, input_family, layer, head,
            document_sums(sink_mass, document) AS sums,
            sum(((1 + (n_ctx - 1) * sink_mass::DOUBLE) / n_ctx > $threshold)::INT) AS above,
            sum(sink_value_norm::DOUBLE) AS first_value,
            count(sink_value_norm) AS first_values,
            sum(value_norm::DOUBLE) AS value,
            count(value_norm) AS values,
            sum(sink_resid_pre_norm::DOUBLE) AS first_resid,
            count(sink_resid_pre_norm) AS first_resids,
            sum(resid_pre_norm::DOUBLE) AS resid,
            count(resid_pre_norm) AS resids
        FROM heads
        JOIN (SELECT run_id, n_ctx FROM runs) USING (run_id)
        JOIN internal.documents USING (run_id, intervention, sequence)
        GROUP BY run_id, intervention, input_family, layer, head, document
    ),
    head_sums AS (
        SELECT
            run_id, intervention, input_family, layer, head,
            sum(sums.number)::BIGINT AS sequences,
            document_mean(sums) AS sink_mass,
            document_error(sums) AS standard_error,
            sum(sums.documents)::BIGINT AS documents,
            document_number(sums) AS effective_documents,
            document_freedom(sums) AS degrees_of_freedom,
            sum(above) / sum(sums.number) AS sink_rate,
            sum(first_value) / sum(first_values) AS first_value,
            sum(value) / sum(values) AS mean_value,
            sum(first_resid) / sum(first_resids) AS first_resid,
            sum(resid) / sum(resids) AS mean_resid
        FROM by_document
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
    ),
    tested AS (
        SELECT
            *,
            two_sided_p(
                sink_mass - uniform_baseline, standard_error, degrees_of_freedom,
                sink_mass
            ) AS p
        FROM head_means
        LEFT JOIN uniform_baselines USING (run_id)
    ),
    scaled AS (
        SELECT *, scaled_p(p, run_id, intervention, input_family, NULL) AS scaled FROM tested
    ),
    adjusted AS (
        SELECT *, adjusted_p(p, scaled, run_id, intervention, input_family, NULL) AS q FROM scaled
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
    layer, head, sink_mass, standard_error, documents, effective_documents,
    degrees_of_freedom, uniform_baseline, sink_alpha,
    sink_alpha > $threshold
        AND (uniform_baseline IS NULL OR (sink_mass > uniform_baseline AND q <= 0.05)) AS is_sink,
    sink_rate,
    first_value / nullif(other_values, 0) AS value_norm_ratio,
    first_resid / nullif(other_resid, 0) AS resid_pre_norm_ratio,
    sequences, p, q
FROM adjusted
-- Whatever a limit leaves is the top of each run.
ORDER BY rank, run_id, intervention, input_family, layer, head
