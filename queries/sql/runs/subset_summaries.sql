-- Every statistic of every head by subset of the Pile: count, mean, spread, error and extremes.
-- pile_set_name is NULL for what is of no subset.
SELECT
    run_id, model, intervention, input_family, pile_set_name, layer, head,
    'L' || layer || 'H' || head AS label,
    statistic, count, undefined, mean,
    standard_deviation(m2, count) AS sd,
    standard_error(document_m2, count, document_squares) AS standard_error,
    documents,
    effective_number(count, document_squares) AS effective_documents,
    degrees_of_freedom(count, document_squares, document_fourths) AS degrees_of_freedom,
    minimum, maximum
FROM internal.subset_moments
JOIN (SELECT run_id, model FROM runs) USING (run_id)
ORDER BY run_id, intervention, input_family, statistic, layer, head, pile_set_name
