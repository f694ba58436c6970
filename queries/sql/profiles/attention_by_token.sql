-- Attention that each token receives as a key, with the uniform baseline: which tokens are sinks.
-- One row per head, token and role of the token in the input's layout; first: whether the token
-- stands at position 0.
-- attention: mean over the pairs of such a key and a query that sees it. uniform_baseline: what
-- uniform attention would give. attention_ratio: attention / uniform_baseline.
-- share: of all attention of the head. sink_keys: share of the keys that receive more than 0.3.
-- received and expected are sums over keys, so that tokens can be put together.
-- Needs: curves = ["attention_received_by_key"] in the scan.
WITH
    -- Query q gives each of the q + 1 keys that it sees 1 / (q + 1), if it attends uniformly.
    uniform AS (
        SELECT
            run_id, model, n_ctx, key,
            n_ctx - key AS queries,
            sum(1 / (key + 1)) OVER (PARTITION BY run_id ORDER BY key DESC) AS expected
        FROM (SELECT run_id, model, n_ctx, unnest(range(n_ctx)) AS key FROM runs)
    ),
    keys AS (
        SELECT
            run_id, intervention, sequence,
            generate_subscripts(tokens, 1) - 1 AS key,
            unnest(tokens) AS token,
            nullif(unnest(labels), '') AS role
        FROM sequences
    ),
    received_by_key AS (
        SELECT
            run_id, intervention, input_family, sequence, layer, head, label,
            generate_subscripts(attention_received_by_key, 1) - 1 AS key,
            unnest(attention_received_by_key)::DOUBLE AS mean_received
        FROM curves
    ),
    tokens AS (
        SELECT
            run_id, model, n_ctx, intervention, input_family, layer, head, label, token, role,
            key = 0 AS first,
            count(*) AS keys,
            sum(queries) AS seen,
            sum(mean_received * queries) AS received,
            sum(expected) AS expected,
            avg((mean_received > 0.3)::INT) AS sink_keys
        FROM received_by_key
        JOIN keys USING (run_id, intervention, sequence, key)
        JOIN uniform USING (run_id, key)
        GROUP BY ALL
    )
SELECT
    run_id, model, n_ctx, intervention, input_family, label, layer, head, token, role, first, keys,
    received / seen AS attention,
    expected / seen AS uniform_baseline,
    received / expected AS attention_ratio,
    received / sum(received) OVER (
        PARTITION BY run_id, intervention, input_family, layer, head
    ) AS share,
    sink_keys, received, expected
FROM tokens
ORDER BY run_id, intervention, input_family, layer, head, share DESC, token, role
