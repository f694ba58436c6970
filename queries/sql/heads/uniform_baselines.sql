-- Uniform baseline of each statistic that has one, on the same sequences.
SELECT run_id, model, n_ctx, name[9:] AS statistic, avg(value) AS uniform_baseline
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
JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
GROUP BY ALL
ORDER BY run_id, statistic
