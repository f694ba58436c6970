-- What differs between two runs in each statistic of each head: mean change on the sequences with the same tokens.
-- One row per pair of runs, intervention, head and statistic, in both directions: change is that of run_id against other_run.
-- A pair is one sequence of the same number and tokens on which both are defined; NULL as in effects.
-- Needs: two runs of the same input (family, seed, n_ctx, corpus).
WITH
    same AS (
        SELECT
            one.run_id, other.run_id AS other_run, sequence, intervention, input_family
        FROM sequences AS one JOIN sequences AS other USING (sequence, intervention, input_family, tokens)
        WHERE one.run_id <> other.run_id
    ),
    listed AS (
        SELECT
            run_id, intervention, input_family, sequence, layer, head,
            list_value(*COLUMNS(* EXCLUDE (run_id, intervention, input_family, shard, sequence, layer, head, label))) AS values
        FROM heads
    ),
    names AS (
        SELECT struct_keys(struct_pack(*COLUMNS(* EXCLUDE (run_id, intervention, input_family, shard, sequence, layer, head, label)))) AS names
        FROM heads
        LIMIT 1
    ),
    pairs AS (
        SELECT
            same.run_id, same.other_run, same.intervention, same.input_family, one.layer, one.head,
            generate_subscripts(one.values, 1) AS number,
            unnest(other.values)::DOUBLE AS before,
            unnest(one.values)::DOUBLE AS after
        FROM same
        JOIN listed AS one USING (run_id, intervention, input_family, sequence)
        JOIN listed AS other
            ON other.run_id = same.other_run AND other.intervention = same.intervention
            AND other.sequence = same.sequence AND other.layer = one.layer AND other.head = one.head
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
