-- What each intervention does to the sink and to the loss: one row per run and intervention, the
-- smallest sink first.
-- sink_mass: mean over the measured heads, and then over the sequences on which loss is known too.
-- sink_change, loss_change: less what the untouched model has on the same sequences. Errors are over
-- documents; NULL for one document.
-- on_frontier: no intervention of the run has both a smaller sink and a smaller loss.
-- Needs: statistics = ["sink_mass"] and predictions = ["loss"]; changes need interventions =
-- ["none", "…"] in one scan.
WITH
    -- A column that no run has measured is there, and empty.
    sinks AS (
        SELECT run_id, intervention, sequence, avg(sink_mass::DOUBLE) AS sink_mass
        FROM (
            SELECT NULL::FLOAT AS sink_mass WHERE false
            UNION ALL BY NAME
            SELECT * FROM heads
        )
        GROUP BY ALL
    ),
    measured AS (
        SELECT
            run_id, intervention, input_family, sequence, documents.document, sink_mass,
            loss::DOUBLE AS loss
        FROM (
            SELECT NULL::FLOAT AS loss WHERE false
            UNION ALL BY NAME
            SELECT * FROM sequences
        )
        JOIN sinks USING (run_id, intervention, sequence)
        JOIN internal.documents AS documents USING (run_id, intervention, sequence)
        WHERE sink_mass IS NOT NULL AND loss IS NOT NULL
    ),
    by_document AS (
        SELECT
            measured.run_id, measured.intervention, measured.input_family, measured.document,
            document_sums(measured.sink_mass, measured.document) AS sinks,
            document_sums(measured.loss, measured.document) AS losses,
            document_sums(
                measured.sink_mass - untouched.sink_mass, measured.document
            ) AS sink_changes,
            document_sums(measured.loss - untouched.loss, measured.document) AS loss_changes
        FROM measured
        LEFT JOIN measured AS untouched
            ON untouched.run_id = measured.run_id
            AND untouched.intervention = 'none'
            AND untouched.sequence = measured.sequence
        GROUP BY ALL
    ),
    means AS (
        SELECT
            run_id, intervention, input_family,
            document_mean(sinks) AS sink_mass,
            document_error(sinks) AS sink_error,
            document_mean(losses) AS loss,
            document_error(losses) AS loss_error,
            document_mean(sink_changes) AS sink_change,
            document_error(sink_changes) AS sink_change_error,
            document_mean(loss_changes) AS loss_change,
            document_error(loss_changes) AS loss_change_error,
            sum(sinks.documents)::BIGINT AS documents,
            sum(sinks.number)::BIGINT AS sequences
        FROM by_document
        GROUP BY ALL
    )
SELECT
    run_id, model, n_ctx,
    means.* EXCLUDE (run_id),
    sink_mass <= min(sink_mass) OVER smaller_losses IS NOT FALSE AS on_frontier
FROM means
JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
WINDOW smaller_losses AS (
    PARTITION BY run_id, input_family
    ORDER BY loss
    RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW EXCLUDE GROUP
)
ORDER BY run_id, input_family, sink_mass, intervention
