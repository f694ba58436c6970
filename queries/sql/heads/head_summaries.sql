-- Every statistic of every head: count, mean, spread, error and extremes. By subset of the Pile:
-- subset_summaries.
SELECT
    run_id, model, intervention, input_family, layer, head,
    'L' || layer || 'H' || head AS label,
    statistic, count, undefined, mean,
    standard_deviation(m2, count) AS sd,
    standard_error(document_m2, count, document_squares) AS standard_error,
    documents,
    effective_number(count, document_squares) AS effective_documents,
    degrees_of_freedom(count, document_squares, document_fourths) AS degrees_of_freedom,
    minimum, maximum
FROM internal.head_moments
JOIN (SELECT run_id, model FROM runs) USING (run_id)
ORDER BY run_id, intervention, input_family, statistic, layer, head
