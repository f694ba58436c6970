-- What differs between two runs in each statistic of each head: mean change on the sequences with the same tokens.
-- One row per pair of runs, intervention, head and statistic, in both directions: change is that of run_id against other_run.
-- A pair is one sequence of the same number and tokens on which both are defined; NULL as in effects.
-- Needs: two runs of the same input (family, seed, n_ctx, corpus).
WITH
    -- 64 bits stand for the tokens: only sequences of the same number are compared by them.
    inputs AS (SELECT run_id, intervention, sequence, hash(tokens) AS input FROM sequences),
    listed AS NOT MATERIALIZED (
        SELECT
            run_id, intervention, input_family, sequence, layer, head, input,
            list_value(*COLUMNS(
                heads.* EXCLUDE (run_id, intervention, input_family, shard, sequence, layer, head, label)
            )) AS values
        FROM heads JOIN inputs USING (run_id, intervention, sequence)
    ),
    names AS (
        SELECT struct_keys(struct_pack(*COLUMNS(* EXCLUDE (run_id, intervention, input_family, shard, sequence, layer, head, label)))) AS names
        FROM heads
        LIMIT 1
    ),
    pairs AS (
        SELECT
            one.run_id, other.run_id AS other_run, intervention, input_family, layer, head,
            generate_subscripts(one.values, 1) AS number,
            unnest(other.values)::DOUBLE AS before,
            unnest(one.values)::DOUBLE AS after
        FROM listed AS one
        JOIN listed AS other USING (intervention, input_family, sequence, layer, head, input)
        WHERE one.run_id <> other.run_id
    ),
    changes AS (
        SELECT
            run_id, other_run, intervention, input_family, layer, head, number,
            avg(before) AS other,
            avg(after) AS this,
            avg(after - before) AS change,
            stddev_samp(after - before) / sqrt(count(*)) AS standard_error,
            count(*) AS pairs
        FROM pairs
        WHERE before IS NOT NULL AND after IS NOT NULL
        GROUP BY ALL
    ),
    models AS (SELECT run_id, model FROM runs)
SELECT
    changes.run_id, changes.other_run, models.model, other_models.model AS other_model,
    intervention, input_family,
    'L' || layer || 'H' || head AS label,
    layer, head,
    names[number] AS statistic,
    other, this, change, standard_error, pairs
FROM changes
JOIN models USING (run_id)
JOIN models AS other_models ON other_models.run_id = other_run, names
ORDER BY changes.run_id, other_run, intervention, input_family, layer, head, number
