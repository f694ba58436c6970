-- Mean and standard deviation of every statistic over the sequences of a run, per head.
-- Both leave out NULL. sd is the sample standard deviation, to 1e-6 of itself or 2e-8 of the mean.
-- Standard errors: head_summaries.
WITH
    measured AS (
        SELECT
            run_id, intervention, input_family, layer, head,
            COLUMNS(
                * EXCLUDE (
                    run_id, intervention, input_family, shard, sequence, layer, head, label
                )
            ) AS 'value_\0'
        FROM heads
    ),
    head_means AS (
        SELECT
            run_id, intervention, input_family, layer, head,
            count(*) AS sequences,
            -- COLUMNS repeats the aggregate for every statistic, whatever a run measured.
            sum(COLUMNS('^value_(.*)$')::DOUBLE) / count(COLUMNS('^value_(.*)$')) AS 'mean_\1',
            -- Sums are three times as fast as stddev_samp, which divides in every row. A square has
            -- two parts, rounded to float and the rest: a sum of either loses next to nothing.
            standard_deviation(
                greatest(
                    0,
                    sum((COLUMNS('^value_(.*)$') * COLUMNS('^value_(.*)$'))::DOUBLE)
                    - sum(COLUMNS('^value_(.*)$')::DOUBLE) ** 2 / count(COLUMNS('^value_(.*)$'))
                    + sum(
                        COLUMNS('^value_(.*)$')::DOUBLE * COLUMNS('^value_(.*)$')
                        - COLUMNS('^value_(.*)$') * COLUMNS('^value_(.*)$')
                    )
                ),
                count(COLUMNS('^value_(.*)$'))
            ) AS 'sd_\1'
        FROM measured
        GROUP BY ALL
    )
SELECT
    run_id, model, n_ctx, intervention, input_family, layer, head,
    'L' || layer || 'H' || head AS label,
    head_means.* EXCLUDE (run_id, intervention, input_family, layer, head)
FROM head_means
JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
ORDER BY run_id, intervention, input_family, layer, head
