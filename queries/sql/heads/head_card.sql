-- All statistics of one head: means with errors, uniform baselines and its place among the
-- heads.
-- percentile: share of the other heads with a smaller mean in float32, from 0 to 100; NULL for the
-- only one. heads: that have a mean, with itself. Cards and pages say the same.
-- parameter label VARCHAR = NULL: The head, as in L5H1, or NULL for every head.
-- parameter intervention VARCHAR = 'none': The intervention under which it was measured.
-- example: head_card --label L5H1
WITH
    placed AS (
        SELECT
            summaries.*,
            count(*) OVER measured AS heads,
            -- In float32: means of equal numbers differ in the order in which they are added up.
            100 * (rank() OVER (measured ORDER BY summaries.mean::FLOAT) - 1)
                / nullif(count(*) OVER measured - 1, 0) AS percentile
        FROM head_summaries AS summaries
        -- A head on which a statistic is never defined has no place.
        WHERE summaries.intervention = $intervention AND summaries.mean IS NOT NULL
        WINDOW measured AS (
            PARTITION BY summaries.run_id, summaries.input_family, summaries.statistic
        )
    )
SELECT
    placed.run_id, placed.model, contexts.n_ctx, placed.intervention, placed.input_family, placed.label,
    placed.statistic, placed.mean, placed.standard_error, placed.documents, placed.sd, levels.uniform_baseline,
    placed.percentile, placed.heads, placed.minimum, placed.maximum, placed.count AS defined,
    placed.undefined
FROM placed
JOIN (SELECT run_id, n_ctx FROM runs) AS contexts ON contexts.run_id = placed.run_id
LEFT JOIN (
    SELECT baselines.run_id, baselines.statistic AS measured, baselines.uniform_baseline
    FROM uniform_baselines AS baselines
) AS levels
    ON levels.run_id = placed.run_id AND levels.measured = placed.statistic
WHERE $label IS NULL OR placed.label = upper($label)
ORDER BY placed.run_id, placed.input_family, placed.label, placed.statistic
