-- Mean and standard deviation of every statistic over the sequences of a run, per head.
-- NULL (undefined) is left out of both; sd is the sample standard deviation, NULL for a single sequence.
WITH
    heads_only AS (
        SELECT
            run_id, intervention, input_family, layer, head,
            count(*) AS sequences,
            avg(COLUMNS(* EXCLUDE (run_id, intervention, input_family, shard, sequence, layer, head, label))) AS 'mean_\0',
            stddev_samp(COLUMNS(* EXCLUDE (run_id, intervention, input_family, shard, sequence, layer, head, label))) AS 'sd_\0'
        FROM heads
        GROUP BY ALL
    )
SELECT
    run_id, model, intervention, input_family, layer, head,
    'L' || layer || 'H' || head AS label,
    heads_only.* EXCLUDE (run_id, intervention, input_family, layer, head)
FROM heads_only JOIN (SELECT run_id, model FROM runs) USING (run_id)
ORDER BY run_id, intervention, input_family, layer, head
