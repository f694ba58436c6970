-- Heads ranked by the mean of any statistic over the sequences on which it is defined, with the
-- uniform baseline.
-- p, q: of above_uniform, as in effects, as if mean and baseline were of different sequences: the
-- error is too large where they rise and fall together. induction_heads pairs them.
-- parameter statistic VARCHAR = 'sink_mass': A column of heads.
-- parameter ascending BOOLEAN = false: Whether the smallest mean comes first.
-- example: ranking --statistic entropy --ascending true --limit 5
WITH
    summaries AS (
        SELECT head_summaries.* EXCLUDE (model)
        FROM head_summaries
        WHERE head_summaries.statistic = CASE
            WHEN $statistic IN (SELECT name FROM statistics) THEN $statistic
            ELSE error(format(
                'statistic ''{}'' was not measured in these runs; --statistic names another',
                $statistic
            ))
        END
    ),
    tested AS (
        SELECT
            *,
            two_sided_p(
                mean - uniform_baseline, sqrt(standard_error ** 2 + baseline_error ** 2),
                degrees_of_freedom, mean
            ) AS p
        FROM summaries
        LEFT JOIN (
            SELECT
                levels.run_id, levels.uniform_baseline, levels.standard_error AS baseline_error
            FROM uniform_baselines AS levels
            WHERE levels.statistic = $statistic
        ) USING (run_id)
    ),
    scaled AS (
        SELECT
            *,
            scaled_p(p, run_id, intervention, input_family, tested.statistic) AS scaled
        FROM tested
    )
SELECT
    run_id, model, n_ctx, intervention, input_family,
    -- A head without a mean has no rank: rank() would give it the last one.
    CASE WHEN mean IS NOT NULL THEN
        rank() OVER (
            PARTITION BY run_id, intervention, input_family
            ORDER BY CASE WHEN $ascending THEN mean ELSE -mean END NULLS LAST
        )
    END AS rank,
    label, layer, head,
    scaled.statistic,
    mean, sd, standard_error, documents, effective_documents,
    degrees_of_freedom, uniform_baseline, mean - uniform_baseline AS above_uniform,
    count AS defined, count + undefined AS sequences,
    p, adjusted_p(p, scaled, run_id, intervention, input_family, scaled.statistic) AS q
FROM scaled
JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
-- Whatever a limit leaves is the top of each run.
ORDER BY rank, run_id, intervention, input_family, layer, head
