-- Heads ranked by the mean of any statistic over the sequences on which it is defined, with the
-- uniform baseline.
-- parameter statistic VARCHAR = 'sink_mass': A column of heads.
-- parameter ascending BOOLEAN = false: Whether the smallest mean comes first.
-- example: ranking --statistic entropy --ascending true --limit 5
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
    summaries.statistic,
    mean, sd, standard_error, documents,
    uniform_baseline, mean - uniform_baseline AS above_uniform,
    count AS defined, count + undefined AS sequences
FROM (
    SELECT head_summaries.* EXCLUDE (model)
    FROM head_summaries
    WHERE head_summaries.statistic = CASE
        WHEN $statistic IN (SELECT name FROM statistics) THEN $statistic
        ELSE error(format(
            'statistic ''{}'' was not measured in these runs; --statistic names another', $statistic
        ))
    END
) AS summaries
JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
LEFT JOIN (
    SELECT levels.run_id, levels.uniform_baseline
    FROM uniform_baselines AS levels
    WHERE levels.statistic = $statistic
) USING (run_id)
ORDER BY run_id, intervention, input_family, rank, layer, head
