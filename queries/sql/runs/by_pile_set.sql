-- Mean of every statistic per subset of the Pile and head, with standard errors over documents
-- (se_…).
-- sink_rate: share of sequences with sink_alpha above the threshold.
-- Needs: an input of the family pile whose rows have meta.pile_set_name.
-- parameter threshold DOUBLE = 0.3: Value of sink_alpha above which a sequence counts.
-- example: by_pile_set --threshold 0.5 --limit 5
WITH
    measured AS (
        -- An empty table that has the column, so that the rate is NULL if no run measured it.
        SELECT NULL::FLOAT AS sink_mass
        WHERE false
        UNION ALL BY NAME
        FROM heads
    ),
    document_sums AS (
        SELECT
            run_id, model, n_ctx, intervention, input_family, pile_set_name, layer, head, document,
            count(*) AS sequences,
            -- sink_alpha = (1 + (T - 1) sink_mass) / T: it also counts query 0, which sees only
            -- key 0.
            document_sums(
                ((1 + (n_ctx - 1) * sink_mass::DOUBLE) / n_ctx > $threshold)::INT, document
            ) AS rate_sums,
            document_sums(1, document) AS sequence_sums,
            document_sums(
                COLUMNS(
                    measured.* EXCLUDE (
                        run_id, intervention, input_family, shard, sequence, layer, head, label
                    )
                ),
                document
            ) AS 'sums_\0'
        FROM measured
        JOIN internal.documents USING (run_id, intervention, sequence)
        JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
        WHERE pile_set_name IS NOT NULL
        GROUP BY ALL
    )
SELECT
    run_id, model, n_ctx, intervention, input_family, pile_set_name, layer, head,
    'L' || layer || 'H' || head AS label,
    sum(sequences)::BIGINT AS sequences,
    sum(sequence_sums.documents)::BIGINT AS documents,
    document_mean(rate_sums) AS sink_rate,
    document_error(rate_sums) AS se_sink_rate,
    document_mean(COLUMNS('^sums_(.*)$')) AS 'mean_\1',
    document_error(COLUMNS('^sums_(.*)$')) AS 'se_\1'
FROM document_sums
GROUP BY ALL
ORDER BY run_id, intervention, input_family, pile_set_name, layer, head
