-- Every statistic by KV head, which a cache keeps or drops: its mean and its extremes over the
-- query heads that share the keys.
-- heads: query heads of the group that were measured.
-- example: kv_heads --limit 5
WITH
    model_sizes AS (
        SELECT run_id, n_kv_heads, n_heads // nullif(n_kv_heads, 0) AS group_size
        FROM runs
        WHERE n_kv_heads > 0
    )
SELECT
    run_id, model, intervention, input_family, layer,
    -- Query heads of a group stand side by side, in all models that share keys.
    (head // group_size)::INTEGER AS kv_head,
    'L' || layer || 'KV' || (head // group_size) AS label,
    statistic,
    count(*) AS heads,
    any_value(group_size)::INTEGER AS group_size,
    sum(count)::BIGINT AS count,
    avg(mean) AS mean,
    min(mean) AS lowest,
    max(mean) AS highest,
    min(minimum) AS minimum,
    max(maximum) AS maximum
FROM head_summaries
JOIN model_sizes USING (run_id)
GROUP BY ALL
ORDER BY run_id, intervention, input_family, statistic, layer, kv_head
