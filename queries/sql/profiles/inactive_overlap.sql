-- How far two scores call the same heads inactive on the same sequences (inactive_flags).
-- iou: intersection over union. n, other_n, n_both: heads and sequences that score, other_score and
-- both flag. Scores that flag nothing are left out.
WITH
    -- For each head and sequence, the set of scores that flag it.
    flagging_scores AS (
        SELECT
            run_id, intervention, input_family, quantile,
            list(score ORDER BY score) AS scores
        FROM inactive_flags
        WHERE is_inactive
        GROUP BY run_id, intervention, input_family, quantile, sequence, layer, head
    ),
    -- A few different sets stand for many rows, so they are counted before scores are paired.
    distinct_sets AS (
        SELECT *, count(*) AS rows
        FROM flagging_scores
        GROUP BY ALL
    ),
    first_scores AS (
        SELECT *, unnest(scores) AS score
        FROM distinct_sets
    ),
    pairs AS (
        SELECT
            run_id, intervention, input_family, quantile, score, other_score,
            sum(rows)::BIGINT AS n_both
        FROM (SELECT *, unnest(scores) AS other_score FROM first_scores)
        GROUP BY ALL
    ),
    -- A score paired with itself: what it flags.
    totals AS (
        SELECT * EXCLUDE other_score RENAME (n_both AS n)
        FROM pairs
        WHERE score = other_score
    )
SELECT
    run_id, model, n_ctx, intervention, input_family, quantile, score, other_score, n, other_n,
    coalesce(n_both, 0) AS n_both,
    coalesce(n_both, 0) / (n + other_n - coalesce(n_both, 0)) AS iou
FROM totals
JOIN (SELECT * RENAME (score AS other_score, n AS other_n) FROM totals)
    USING (run_id, intervention, input_family, quantile)
-- LEFT: two scores that never flag the same head have no pair, and an overlap of 0.
LEFT JOIN pairs
    USING (run_id, intervention, input_family, quantile, score, other_score)
JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
ORDER BY run_id, intervention, input_family, quantile, score, other_score
