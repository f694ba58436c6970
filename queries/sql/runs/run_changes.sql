-- What differs between two runs in each statistic of each head, on sequences with the same tokens.
-- One row per pair of runs in both directions, intervention, head and statistic.
-- change: mean of run_id minus other_run over the sequences on which both are defined.
-- standard_error: over documents; NULL for one document. p, q: as in effects.
-- Needs: two runs of the same input (family, seed, n_ctx, corpus).
WITH
    -- A hash of 64 bits stands for the tokens. That is enough: only sequences of the same number
    -- are compared.
    token_hashes AS (
        SELECT
            run_id, intervention, sequence, hash(tokens) AS token_hash,
            documents.document
        FROM sequences
        JOIN internal.documents AS documents USING (run_id, intervention, sequence)
    ),
    -- All statistics of a row as one list: then a single join pairs them all (as in effects).
    value_lists AS NOT MATERIALIZED (
        SELECT
            run_id, intervention, input_family, sequence, layer, head, token_hash, document,
            list_value(*COLUMNS(
                heads.* EXCLUDE (
                    run_id, intervention, input_family, shard, sequence, layer, head, label
                )
            )) AS values
        FROM heads
        JOIN token_hashes USING (run_id, intervention, sequence)
    ),
    -- The names of the statistics, in the order of the lists. struct_keys would be shorter, but
    -- DuckDB 1.4 does not have it (exported_views.py).
    statistic_names AS (
        SELECT
            json_keys(to_json(struct_pack(*COLUMNS(
                * EXCLUDE (
                    run_id, intervention, input_family, shard, sequence, layer, head, label
                )
            )))) AS names
        FROM heads
        LIMIT 1
    ),
    pairs AS (
        SELECT
            one.run_id, other.run_id AS other_run, intervention, input_family, layer, head,
            one.document,
            generate_subscripts(one.values, 1) AS number,
            -- The stored float32 would lose digits when differences are added up.
            unnest(other.values)::DOUBLE AS before,
            unnest(one.values)::DOUBLE AS after
        FROM value_lists AS one
        JOIN value_lists AS other
            USING (intervention, input_family, sequence, layer, head, token_hash)
        WHERE one.run_id <> other.run_id
    ),
    changes_of_documents AS (
        SELECT
            run_id, other_run, intervention, input_family, layer, head, number, document,
            sum(before) AS before,
            sum(after) AS after,
            document_sums(after - before, document) AS sums
        FROM pairs
        WHERE before IS NOT NULL AND after IS NOT NULL
        GROUP BY ALL
    ),
    changes AS (
        SELECT
            run_id, other_run, intervention, input_family, layer, head, number,
            sum(before) / sum(sums.number) AS other,
            sum(after) / sum(sums.number) AS this,
            document_mean(sums) AS change,
            document_error(sums) AS standard_error,
            sum(sums.documents)::BIGINT AS documents,
            document_number(sums) AS effective_documents,
            document_freedom(sums) AS degrees_of_freedom,
            sum(sums.number)::BIGINT AS pairs
        FROM changes_of_documents
        GROUP BY ALL
    ),
    tested AS (
        SELECT
            *,
            two_sided_p(
                change, standard_error, degrees_of_freedom,
                greatest(abs(other), abs(this))
            ) AS p
        FROM changes
    ),
    scaled AS (
        SELECT
            *,
            scaled_p(
                p, run_id, intervention, input_family, number, other := other_run
            ) AS scaled
        FROM tested
    ),
    models AS (
        SELECT run_id, model, n_ctx FROM runs
    )
SELECT
    scaled.run_id, scaled.other_run,
    models.model, other_models.model AS other_model, models.n_ctx,
    intervention, input_family,
    'L' || layer || 'H' || head AS label,
    layer, head,
    names[number] AS statistic,
    other, this, change, standard_error, documents, effective_documents,
    degrees_of_freedom, pairs,
    p,
    adjusted_p(
        p, scaled, scaled.run_id, intervention, input_family, number, other := other_run
    ) AS q
FROM scaled
JOIN models USING (run_id)
JOIN models AS other_models ON other_models.run_id = other_run, statistic_names
ORDER BY scaled.run_id, other_run, intervention, input_family, layer, head, number
