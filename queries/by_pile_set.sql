-- Mean of every statistic per part of the Pile and head, with standard errors.
-- sink_rate: share of sequences with sink_alpha above the threshold, as in sink_heads.
-- se_…: standard error of the mean. It is NULL for a single sequence.
-- Needs: an input of the family pile whose rows have meta.pile_set_name.
-- parameter threshold DOUBLE = 0.3: Value of sink_alpha above which a sequence counts.
-- example: by_pile_set --threshold 0.5 --limit 5
WITH
    origins AS (
        -- Sequences are written once per intervention: without GROUP BY, heads would count twice.
        SELECT run_id, sequence, any_value(pile_set_name) AS pile_set_name
        FROM sequences
        GROUP BY ALL
    ),
    measured AS (
        -- An empty table that has the column, so that the rate is NULL if no run measured it.
        SELECT NULL::FLOAT AS sink_mass
        WHERE false
        UNION ALL BY NAME
        FROM heads
    )
SELECT
    run_id, model, n_ctx, intervention, input_family, pile_set_name, layer, head,
    'L' || layer || 'H' || head AS label,
    count(*) AS sequences,
    -- sink_alpha = (1 + (T - 1) sink_mass) / T: it also counts query 0, which sees only key 0.
    avg(((1 + (n_ctx - 1) * sink_mass::DOUBLE) / n_ctx > $threshold)::INT) AS sink_rate,
    stddev_samp(((1 + (n_ctx - 1) * sink_mass::DOUBLE) / n_ctx > $threshold)::INT)
        / sqrt(count(sink_mass)) AS se_sink_rate,
    avg(COLUMNS(
        measured.* EXCLUDE (
            run_id, intervention, input_family, shard, sequence, layer, head, label
        )
    )) AS 'mean_\0',
    -- count(statistic), not count(*): a sequence on which it is undefined does not count.
    stddev_samp(COLUMNS(
        measured.* EXCLUDE (
            run_id, intervention, input_family, shard, sequence, layer, head, label
        )
    )) / sqrt(count(COLUMNS(
        measured.* EXCLUDE (
            run_id, intervention, input_family, shard, sequence, layer, head, label
        )
    ))) AS 'se_\0'
FROM measured
JOIN origins USING (run_id, sequence)
JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
WHERE pile_set_name IS NOT NULL
GROUP BY ALL
ORDER BY run_id, intervention, input_family, pile_set_name, layer, head
