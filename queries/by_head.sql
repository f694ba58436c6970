-- Mean and standard deviation of every statistic over the sequences of a run, per head.
-- Both leave out NULL, which means undefined.
-- sd is the sample standard deviation. It is NULL for a single sequence.
WITH
    head_means AS (
        SELECT
            run_id, intervention, input_family, layer, head,
            count(*) AS sequences,
            -- COLUMNS repeats the aggregate for every statistic, whatever a run measured.
            avg(COLUMNS(
                * EXCLUDE (
                    run_id, intervention, input_family, shard, sequence, layer, head, label
                )
            )) AS 'mean_\0',
            stddev_samp(COLUMNS(
                * EXCLUDE (
                    run_id, intervention, input_family, shard, sequence, layer, head, label
                )
            )) AS 'sd_\0'
        FROM heads
        GROUP BY ALL
    )
SELECT
    run_id, model, n_ctx, intervention, input_family, layer, head,
    'L' || layer || 'H' || head AS label,
    head_means.* EXCLUDE (run_id, intervention, input_family, layer, head)
FROM head_means
JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
ORDER BY run_id, intervention, input_family, layer, head
