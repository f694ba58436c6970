-- Uniform baseline of each statistic that has one, on the same sequences.
WITH
    by_document AS (
        SELECT run_id, name[9:] AS statistic, document_sums(value, documents.document) AS sums
        FROM (
            -- An empty column comes first: a run may have none.
            UNPIVOT (
                SELECT NULL::VARCHAR AS run_id, NULL::FLOAT AS uniform_
                WHERE false
                UNION ALL BY NAME
                FROM sequences
            )
            ON COLUMNS('^uniform_')
            INTO NAME name VALUE value
        )
        -- Interventions have the same sequences: one is enough.
        JOIN (SELECT run_id, interventions[1] AS intervention FROM runs)
            USING (run_id, intervention)
        JOIN internal.documents AS documents USING (run_id, intervention, sequence)
        GROUP BY run_id, name, documents.document
    )
SELECT
    run_id, model, n_ctx, statistic,
    document_mean(sums) AS uniform_baseline,
    document_error(sums) AS standard_error,
    sum(sums.documents)::BIGINT AS documents
FROM by_document
JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
GROUP BY run_id, model, n_ctx, statistic
ORDER BY run_id, statistic
