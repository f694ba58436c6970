-- Heads ranked by any statistic, with the chance level.
-- mean: over the sequences on which it is defined. chance: what uniform attention would score.
-- rank: 1 is the largest mean, or the smallest if ascending.
-- parameter statistic VARCHAR = 'sink_mass': A column of heads.
-- parameter ascending BOOLEAN = false: Whether the smallest mean comes first.
-- example: ranking --statistic entropy --ascending true --limit 5
WITH
    head_means AS (
        SELECT
            run_id, intervention, input_family, layer, head,
            avg(value) AS mean,
            stddev_samp(value) AS sd,
            count(value) AS defined,
            count(*) AS sequences
        FROM (
            SELECT
                run_id, intervention, input_family, layer, head,
                COLUMNS(lambda c: c = $statistic)::DOUBLE AS value
            FROM heads
        )
        GROUP BY ALL
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
    'L' || layer || 'H' || head AS label,
    layer, head,
    $statistic AS statistic,
    mean, sd, sd / sqrt(defined) AS standard_error,
    chance, mean - chance AS above_chance,
    defined, sequences
FROM head_means
-- Not the runs that did not measure it.
JOIN (
    SELECT run_id, model, n_ctx FROM runs WHERE list_contains(statistics, $statistic)
) USING (run_id)
LEFT JOIN (
    SELECT levels.run_id, levels.chance
    FROM chance_levels AS levels
    WHERE levels.statistic = $statistic
) USING (run_id)
ORDER BY run_id, intervention, input_family, rank, layer, head
