-- Mean and largest value of every statistic over the measured heads of a layer, each head's value
-- being its mean over sequences.
SELECT
    run_id, model, n_ctx, intervention, input_family, layer,
    count(*) AS heads,
    max(sequences) AS sequences,
    avg(COLUMNS('^mean_(.*)$')) AS 'mean_\1',
    max(COLUMNS('^mean_(.*)$')) AS 'max_\1'
FROM by_head
GROUP BY ALL
ORDER BY run_id, intervention, input_family, layer
