-- Heads ranked by attention to what followed an earlier copy of the token, with the uniform
-- baseline.
-- is_induction: score of at least the threshold, by default that of ARENA's exercises.
-- coverage: share of queries that have an earlier copy. measured: sequences in which any query has
-- one; only they count.
-- parameter threshold DOUBLE = 0.4: Score from which on a head is an induction head.
-- example: induction_heads --threshold 0.5 --limit 5
WITH
    head_means AS (
        SELECT
            run_id, intervention, input_family, layer, head,
            avg(induction_score) AS induction_score,
            avg(match_coverage) AS coverage,
            count(induction_score) AS measured,
            count(*) AS sequences
        FROM heads
        GROUP BY ALL
    ),
    -- What uniform attention would score on the same sequences.
    uniform_baselines AS (
        SELECT run_id, avg(uniform_induction_score) AS uniform_baseline
        FROM sequences
        GROUP BY ALL
    )
SELECT
    run_id, model, n_ctx, intervention, input_family,
    -- A head without a score has no rank: rank() would give it the last one.
    CASE WHEN induction_score IS NOT NULL THEN
        rank() OVER (
            PARTITION BY run_id, intervention, input_family
            ORDER BY induction_score DESC NULLS LAST
        )
    END AS rank,
    'L' || layer || 'H' || head AS label,
    layer, head, induction_score, uniform_baseline,
    induction_score >= $threshold AS is_induction,
    coverage, measured, sequences
FROM head_means
JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
LEFT JOIN uniform_baselines USING (run_id)
ORDER BY run_id, intervention, input_family, rank, layer, head
