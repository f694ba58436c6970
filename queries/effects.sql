-- What each intervention changes in each statistic of each head: mean change against none, paired by sequence.
-- One row per run, intervention, head and statistic. untouched, edited: means over the pairs; change: edited - untouched.
-- A pair is one sequence on which both are defined; standard_error is that of the mean change, NULL for a single pair.
-- Needs: interventions = ["none", "…"] in one scan.
WITH
    -- A list of all statistics: one join serves them all. Kept as a table, no condition would reach its files.
    listed AS NOT MATERIALIZED (
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
            edit.run_id, edit.intervention, edit.input_family, edit.layer, edit.head,
            generate_subscripts(edit.values, 1) AS number,
            unnest(none.values)::DOUBLE AS before,
            unnest(edit.values)::DOUBLE AS after
        FROM listed AS edit JOIN listed AS none USING (run_id, sequence, layer, head)
        WHERE none.intervention = 'none' AND edit.intervention <> 'none'
    ),
    changes AS (
        SELECT
            run_id, intervention, input_family, layer, head, number,
            avg(before) AS untouched,
            avg(after) AS edited,
            avg(after - before) AS change,
            stddev_samp(after - before) / sqrt(count(*)) AS standard_error,
            count(*) AS pairs
        FROM pairs
        WHERE before IS NOT NULL AND after IS NOT NULL
        GROUP BY ALL
    )
SELECT
    run_id, model, intervention, input_family,
    'L' || layer || 'H' || head AS label,
    layer, head,
    names[number] AS statistic,
    untouched, edited, change, standard_error, pairs
FROM changes JOIN (SELECT run_id, model FROM runs) USING (run_id), names
ORDER BY run_id, intervention, input_family, layer, head, number
