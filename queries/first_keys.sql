-- Attention of the last 64 queries to the first keys, per shard and head, and the class of head that it makes (Scheuer).
-- From the profile tail_attention_by_key, means over a shard's sequences: sequences_per_shard = 1 tells single sequences apart.
-- boost_k: first_k over what uniform attention would give. tail_entropy: of the distribution over the keys, over ln T.
-- head_class: first_4 > 0.5 strong_sink; > 0.2 moderate; else tail_entropy > 0.8 distributed; else peak_key > 0.8 T recency; else mixed.
-- Needs: profiles = ["tail_attention_by_key"] in the scan.
WITH
    tails AS (
        SELECT
            run_id, intervention, shard, layer, head,
            sum(mean) FILTER (WHERE key < 1) AS first_1,
            sum(mean) FILTER (WHERE key < 4) AS first_4,
            sum(mean) FILTER (WHERE key < 8) AS first_8,
            arg_max(key, mean) AS peak_key,
            max(mean) AS peak_mass,
            -sum(mean * ln(mean)) FILTER (WHERE mean > 0) AS nats
        FROM profiles
        WHERE profile = 'tail_attention_by_key'
        GROUP BY ALL
    ),
    lengths AS (
        SELECT run_id, model, n_ctx, unnest(range(greatest(n_ctx - 64, 0), n_ctx)) + 1 AS visible FROM runs
    ),
    uniform AS (
        SELECT
            run_id, model, n_ctx,
            avg(1 / visible) AS uniform_1,
            avg(least(4, visible) / visible) AS uniform_4,
            avg(least(8, visible) / visible) AS uniform_8
        FROM lengths
        GROUP BY ALL
    )
SELECT
    run_id, model, intervention, shard,
    'L' || layer || 'H' || head AS label,
    layer, head, n_ctx, first_1, first_4, first_8,
    first_1 / uniform_1 AS boost_1, first_4 / uniform_4 AS boost_4, first_8 / uniform_8 AS boost_8,
    peak_key, peak_mass,
    nats / nullif(ln(n_ctx), 0) AS tail_entropy,
    CASE
        WHEN first_4 > 0.5 THEN 'strong_sink'
        WHEN first_4 > 0.2 THEN 'moderate'
        WHEN nats > 0.8 * ln(n_ctx) THEN 'distributed'
        WHEN peak_key > 0.8 * n_ctx THEN 'recency'
        ELSE 'mixed'
    END AS head_class
FROM tails JOIN uniform USING (run_id)
ORDER BY run_id, intervention, shard, layer, head
