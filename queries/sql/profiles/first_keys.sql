-- Attention of the last 64 queries to the first keys, per shard and head, and the head's class.
-- The classes are those of Scheuer (attention-sink-profiler), by the first rule that fits:
-- strong_sink if first_4 > 0.5, moderate if first_4 > 0.2, distributed if tail_entropy > 0.8,
-- recency if peak_key > 0.8 T, else mixed.
-- boost_k: first_k over its uniform baseline. tail_entropy: entropy over the keys, divided by ln T.
-- sequences_per_shard = 1 keeps sequences apart.
-- Needs: profiles = ["tail_attention_by_key"] in the scan.
WITH
    tails AS (
        SELECT
            run_id, intervention, shard, layer, head,
            -- FILTER: one pass over the keys answers for 1, 4 and 8 of them.
            sum(mean) FILTER (WHERE key < 1) AS first_1,
            sum(mean) FILTER (WHERE key < 4) AS first_4,
            sum(mean) FILTER (WHERE key < 8) AS first_8,
            arg_max(key, mean) AS peak_key,
            max(mean) AS peak_mass,
            -- p ln p is 0 at p = 0, but SQL would compute 0 · -infinity, which is NaN.
            -sum(mean * ln(mean)) FILTER (WHERE mean > 0) AS nats
        FROM profiles
        WHERE profile = 'tail_attention_by_key'
        GROUP BY ALL
    ),
    -- How many keys each of the last 64 queries sees.
    visible_keys AS (
        SELECT
            run_id, model, n_ctx,
            unnest(range(greatest(n_ctx - 64, 0), n_ctx)) + 1 AS visible
        FROM runs
    ),
    -- The uniform baseline: what uniform attention to the visible keys would give the first ones.
    uniform AS (
        SELECT
            run_id, model, n_ctx,
            avg(1 / visible) AS uniform_1,
            avg(least(4, visible) / visible) AS uniform_4,
            avg(least(8, visible) / visible) AS uniform_8
        FROM visible_keys
        GROUP BY ALL
    )
SELECT
    run_id, model, n_ctx, intervention, shard,
    'L' || layer || 'H' || head AS label,
    layer, head,
    first_1, first_4, first_8,
    first_1 / uniform_1 AS boost_1,
    first_4 / uniform_4 AS boost_4,
    first_8 / uniform_8 AS boost_8,
    peak_key, peak_mass,
    -- ln T is 0 for sequences of one token.
    nats / nullif(ln(n_ctx), 0) AS tail_entropy,
    CASE
        WHEN first_4 > 0.5 THEN 'strong_sink'
        WHEN first_4 > 0.2 THEN 'moderate'
        WHEN nats > 0.8 * ln(n_ctx) THEN 'distributed'
        WHEN peak_key > 0.8 * n_ctx THEN 'recency'
        ELSE 'mixed'
    END AS head_class
FROM tails
JOIN uniform USING (run_id)
ORDER BY run_id, intervention, shard, layer, head
