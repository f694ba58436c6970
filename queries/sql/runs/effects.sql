-- What each intervention changes in each statistic of each head, compared with none.
-- One row per run, intervention, head and statistic.
-- A pair is one sequence on which the statistic is defined with and without the intervention.
-- untouched, intervened, change: means over the pairs. standard_error: of the change, over documents;
-- NULL for one document.
-- p: two-sided, Student's t with degrees_of_freedom. q: adjusted over the heads.
-- Needs: interventions = ["none", "…"] in one scan.
WITH
    -- All statistics of a row as one list: then a single join pairs them all. If DuckDB kept it as
    -- a table, the conditions of a query would not reach the files and would skip nothing.
    value_lists AS NOT MATERIALIZED (
        SELECT
            run_id, intervention, input_family, sequence, layer, head,
            list_value(*COLUMNS(
                * EXCLUDE (
                    run_id, intervention, input_family, shard, sequence, layer, head, label
                )
            )) AS values
        FROM heads
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
            intervened.run_id, intervened.intervention, intervened.input_family, intervened.layer, intervened.head, document,
            generate_subscripts(intervened.values, 1) AS number,
            -- The stored float32 would lose digits when differences are added up.
            unnest(none.values)::DOUBLE AS before,
            unnest(intervened.values)::DOUBLE AS after
        FROM value_lists AS intervened
        JOIN value_lists AS none USING (run_id, sequence, layer, head)
        JOIN internal.documents AS origins
            ON origins.run_id = intervened.run_id
            AND origins.intervention = intervened.intervention
            AND origins.sequence = intervened.sequence
        WHERE none.intervention = 'none' AND intervened.intervention <> 'none'
    ),
    changes_of_documents AS (
        SELECT
            run_id, intervention, input_family, layer, head, number, document,
            sum(before) AS before,
            sum(after) AS after,
            document_sums(after - before, document) AS sums
        FROM pairs
        WHERE before IS NOT NULL AND after IS NOT NULL
        GROUP BY ALL
    ),
    changes AS (
        SELECT
            run_id, intervention, input_family, layer, head, number,
            sum(before) / sum(sums.number) AS untouched,
            sum(after) / sum(sums.number) AS intervened,
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
                greatest(abs(untouched), abs(intervened))
            ) AS p
        FROM changes
    ),
    scaled AS (
        SELECT *, scaled_p(p, run_id, intervention, input_family, number) AS scaled FROM tested
    )
SELECT
    run_id, model, n_ctx, intervention, input_family,
    'L' || layer || 'H' || head AS label,
    layer, head,
    names[number] AS statistic,
    untouched, intervened, change, standard_error, documents, effective_documents,
    degrees_of_freedom, pairs,
    p, adjusted_p(p, scaled, run_id, intervention, input_family, number) AS q
FROM scaled
JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id), statistic_names
ORDER BY run_id, intervention, input_family, layer, head, number
