-- How the values of every statistic are distributed, by head and subset of the Pile.
-- One row per bin with a value, between its ends low and high, which may be ±inf.
-- pile_set_name is NULL for what is of no subset; sum over subsets for a whole head.
SELECT
    run_id, model, intervention, input_family, pile_set_name, layer, head,
    'L' || layer || 'H' || head AS label,
    statistic, bin, low, high, count
FROM internal.subset_bins
JOIN (SELECT run_id, model FROM runs) USING (run_id)
ORDER BY run_id, intervention, input_family, statistic, layer, head, pile_set_name, bin
