-- Heads ranked by attention to what followed an earlier copy of the token, with the uniform
-- baseline.
-- is_induction: score of at least the threshold, by default that of ARENA's exercises, and above the
-- uniform baseline with q <= 0.05.
-- p, q: as in effects, of the score less the baseline of the same sequence.
-- coverage: share of queries that have an earlier copy. measured: sequences in which any query has
-- one; only they count.
-- parameter threshold DOUBLE = 0.4: Score from which on a head is an induction head.
-- ranks induction_score from $threshold
-- example: induction_heads --threshold 0.5 --limit 5
WITH
    by_document AS (
        SELECT
            run_id, intervention, input_family, layer, head,
            sum(match_coverage::DOUBLE) AS coverage,
            count(match_coverage) AS covered,
            count(*) AS sequences,
            document_sums(induction_score, document) AS scores,
            -- What uniform attention would score on the same sequence.
            document_sums(induction_score::DOUBLE - uniform_induction_score, document) AS excess
        FROM heads
        JOIN (
            SELECT run_id, intervention, sequence, documents.document, uniform_induction_score
            FROM sequences
            JOIN internal.documents AS documents USING (run_id, intervention, sequence)
        ) USING (run_id, intervention, sequence)
        GROUP BY run_id, intervention, input_family, layer, head, document
    ),
    head_means AS (
        SELECT
            run_id, intervention, input_family, layer, head,
            document_mean(scores) AS induction_score,
            document_error(scores) AS standard_error,
            sum(scores.documents)::BIGINT AS documents,
            sum(coverage) / sum(covered) AS coverage,
            sum(scores.number)::BIGINT AS measured,
            sum(sequences)::BIGINT AS sequences,
            document_mean(excess) AS excess,
            document_error(excess) AS excess_error,
            document_number(excess) AS effective_documents,
            document_freedom(excess) AS degrees_of_freedom
        FROM by_document
        GROUP BY ALL
    ),
    tested AS (
        SELECT
            *,
            two_sided_p(
                excess, excess_error, degrees_of_freedom, induction_score
            ) AS p
        FROM head_means
    ),
    scaled AS (
        SELECT *, scaled_p(p, run_id, intervention, input_family, NULL) AS scaled FROM tested
    ),
    adjusted AS (
        SELECT *, adjusted_p(p, scaled, run_id, intervention, input_family, NULL) AS q FROM scaled
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
    layer, head, induction_score, standard_error, documents, effective_documents,
    degrees_of_freedom, uniform_baseline,
    induction_score >= $threshold
        AND (uniform_baseline IS NULL OR (excess > 0 AND q <= 0.05)) AS is_induction,
    coverage, measured, sequences, p, q
FROM adjusted
JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
LEFT JOIN uniform_baselines USING (run_id)
-- Whatever a limit leaves is the top of each run.
ORDER BY rank, run_id, intervention, input_family, layer, head
