-- Every entry of every profile over all sequences of a run: the means of its shards, merged.
-- n = Σ n_s, mean = Σ n_s mean_s / n, M2 = Σ M2_s + Σ n_s (mean_s - mean)², over the shards s.
-- head is NULL if all heads of a layer share the values.
-- standard_error: over sequences, or over shards if a document has several sequences; NULL for a
-- single one. It is too small if documents are about as long as shards. groups: how many sequences
-- or shards that are.
-- Needs: profiles = ["…"] in the scan, names from docs/reference/profiles.md.
WITH
    -- An empty table with the columns that only some runs have.
    measured AS (
        SELECT
            NULL::INTEGER AS dimension, NULL::SMALLINT AS component,
            NULL::SMALLINT AS other_component, NULL::SMALLINT AS candidate,
            NULL::SMALLINT AS part
        WHERE false
        UNION ALL BY NAME
        FROM profiles
    ),
    -- The mean over all shards stands beside each shard's: M2 needs the difference of the two.
    with_pooled_mean AS (
        SELECT
            *,
            sum(count * mean) OVER entry / sum(count) OVER entry AS pooled_mean
        FROM measured
        WINDOW entry AS (
            PARTITION BY run_id, intervention, profile, layer, head, query, key, lag, dimension,
                component, other_component, candidate, part
        )
    ),
    merged AS (
        SELECT
            run_id, intervention, profile, layer, head, query, key, lag, dimension,
            component, other_component, candidate, part,
            sum(count)::BIGINT AS count,
            any_value(pooled_mean) AS mean,
            sum(m2) + sum(count * (mean - pooled_mean) ** 2) AS m2,
            count(*) FILTER (WHERE count > 0) AS shards,
            sum(count::DOUBLE ** 2) AS shard_squares,
            sum((count * (mean - pooled_mean)) ** 2) AS shard_m2
        FROM with_pooled_mean
        GROUP BY ALL
    ),
    long_documents AS (
        SELECT run_id, intervention, count(document) > 0 AS is_long
        FROM internal.documents
        GROUP BY ALL
    )
SELECT
    run_id, model, n_ctx, intervention, profile, layer, head,
    'L' || layer || 'H' || head AS label,
    query, key, lag, dimension, component, other_component, candidate, part, count, mean,
    standard_deviation(m2, count) AS sd,
    CASE
        WHEN is_long THEN standard_error(shard_m2, count, shard_squares)
        ELSE standard_error(m2, count, count)
    END AS standard_error,
    CASE WHEN is_long THEN shards ELSE count END AS groups
FROM merged
JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
LEFT JOIN long_documents USING (run_id, intervention)
ORDER BY run_id, intervention, profile, layer, head, query, key, lag, dimension,
    component, other_component, candidate, part
