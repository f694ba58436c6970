-- What effects of heads say to first order, beside what an intervention changed: the heads that
-- headcount calibrate has measured.
-- estimate, measured: means over the same sequences, in nats per token. measured is the loss under
-- the intervention less that of the untouched model, and its size where the effect is a size.
-- measured_error: standard error of measured, over documents; NULL for one document. p, q: of
-- measured against 0, over the heads that were measured, as in effects.
-- Needs: a run with effects among its statistics, and headcount calibrate of it.
WITH
    -- A column that no run has measured is there, and empty.
    losses AS (
        SELECT run_id, intervention, sequence, hash(tokens) AS token_hash, loss
        FROM (
            SELECT NULL::FLOAT AS loss WHERE false
            UNION ALL BY NAME
            SELECT * FROM sequences
        )
    ),
    estimates AS (
        UNPIVOT (
            SELECT
                run_id, sequence, layer, head, COLUMNS('^effect_')
            FROM (
                SELECT NULL::FLOAT AS effect_of_nothing WHERE false
                UNION ALL BY NAME
                SELECT * FROM heads
            )
            WHERE intervention = 'none'
        ) ON COLUMNS('^effect_') INTO NAME statistic VALUE estimate
    ),
    -- Two calibrations may have drawn the same head.
    changes AS (
        SELECT
            runs.model, changed.intervention, changed.sequence, changed.token_hash,
            avg(changed.loss::DOUBLE - untouched.loss) AS change
        FROM losses AS changed
        JOIN losses AS untouched USING (run_id, sequence)
        JOIN runs USING (run_id)
        WHERE untouched.intervention = 'none' AND changed.intervention <> 'none'
            AND changed.loss IS NOT NULL AND untouched.loss IS NOT NULL
        GROUP BY ALL
    ),
    by_document AS (
        SELECT
            estimates.run_id, runs.model, estimates.statistic, estimates.layer, estimates.head,
            document,
            sum(estimate::DOUBLE) AS estimated,
            document_sums(
                CASE statistics.name
                    WHEN 'effect_zero_magnitude' THEN abs(change) ELSE change
                END,
                document
            ) AS sums
        FROM estimates
        JOIN statistics ON statistics.name = estimates.statistic
        JOIN runs USING (run_id)
        JOIN losses AS own
            ON own.run_id = estimates.run_id
            AND own.intervention = 'none'
            AND own.sequence = estimates.sequence
        JOIN internal.documents AS origins
            ON origins.run_id = estimates.run_id
            AND origins.intervention = 'none'
            AND origins.sequence = estimates.sequence
        JOIN changes
            ON changes.model = runs.model
            AND changes.sequence = estimates.sequence
            AND changes.token_hash = own.token_hash
            AND changes.intervention = replace(
                replace(statistics.measured_by, '{layer}', estimates.layer::VARCHAR),
                '{head}', estimates.head::VARCHAR
            )
        GROUP BY ALL
    ),
    by_head AS (
        SELECT
            run_id, model, statistic, layer, head,
            sum(estimated) / sum(sums.number) AS estimate,
            document_mean(sums) AS measured,
            document_error(sums) AS measured_error,
            sum(sums.documents)::BIGINT AS documents,
            document_number(sums) AS effective_documents,
            document_freedom(sums) AS degrees_of_freedom,
            sum(sums.number)::BIGINT AS sequences
        FROM by_document
        GROUP BY ALL
    ),
    tested AS (
        SELECT
            *,
            two_sided_p(measured, measured_error, degrees_of_freedom, 0) AS p
        FROM by_head
    ),
    scaled AS (
        SELECT *, scaled_p(p, run_id, NULL, NULL, statistic) AS scaled FROM tested
    )
SELECT
    run_id, model, statistic,
    'L' || layer || 'H' || head AS label,
    layer, head, estimate, measured, measured_error, documents, effective_documents,
    degrees_of_freedom, sequences,
    p, adjusted_p(p, scaled, run_id, NULL, NULL, statistic) AS q
FROM scaled
ORDER BY run_id, statistic, layer, head
