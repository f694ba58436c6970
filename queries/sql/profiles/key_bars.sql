-- Mean and variance of the attention that each key receives, over the queries of all sequences that
-- see it.
-- is_bar: the rule of Cancedda for keys that nearly all queries attend to.
-- decay: mean of this key over that of the key before.
-- Needs: profiles = ["attention_by_pair"] in the scan, so at most 256 tokens.
-- parameters say so: the rule of Cancedda for keys that nearly all queries attend to.
-- decay: mean of this key over that of the key before.
-- Needs: profiles = ["attention_by_pair"] in the scan, so at most 256 tokens.
-- parameter least_mean DOUBLE = 0.018: Mean attention that a bar must exceed.
-- parameter most_variance DOUBLE = 0.01: Variance that a bar must stay below.
-- example: key_bars --least-mean 0.05 --limit 5
WITH
    -- The mean over all queries stands beside each query's: the variance needs the difference.
    with_key_mean AS (
        SELECT
            run_id, model, n_ctx, intervention, layer, head, label, query, key, count, mean,
            sd ** 2 * (count - 1) AS m2,
            sum(count * mean) OVER one_key / sum(count) OVER one_key AS key_mean
        FROM profile_means
        WHERE profile = 'attention_by_pair'
        WINDOW one_key AS (PARTITION BY run_id, intervention, layer, head, key)
    ),
    bars AS (
        SELECT
            run_id, model, n_ctx, intervention, layer, head, label, key,
            count(*) AS queries,
            any_value(key_mean) AS received_mean,
            -- A pair of a single sequence has no spread of its own.
            sum(coalesce(m2, 0) + count * (mean - key_mean) ** 2) / sum(count) AS received_variance
        FROM with_key_mean
        GROUP BY ALL
    )
SELECT
    run_id, model, n_ctx, intervention, label, layer, head, key, queries,
    received_mean, received_variance,
    received_mean > $least_mean AND received_variance < $most_variance AS is_bar,
    received_mean / lag(received_mean) OVER (
        PARTITION BY run_id, intervention, layer, head ORDER BY key
    ) AS decay
FROM bars
ORDER BY run_id, intervention, layer, head, key
