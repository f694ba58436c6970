-- Heads that copy where the input repeats and rest on key 0 where nothing does (is_dormant).
-- Joins runs of the same weights on repeated_random and uniform_random input, and on text if there
-- is such a run. One row per combination of runs.
-- The thresholds are ARENA's for induction_score and that of Gu et al. 2024 (arXiv 2410.10781) for
-- sink_mass.
-- Needs: a run of the family repeated_random and a run of uniform_random, of the same model and
-- interventions.
-- parameter least_induction DOUBLE = 0.4: Induction score that a head must have on repeats.
-- parameter least_sink DOUBLE = 0.3: Sink mass that it must exceed where nothing repeats.
-- example: dormant_induction_heads --least-induction 0.3
WITH
    head_means AS (
        SELECT
            run_id, model, weight_processing, model_fingerprint,
            intervention, input_family, layer, head,
            avg(induction_score) AS induction_score,
            avg(sink_mass) AS sink_mass
        FROM heads
        JOIN (
            SELECT run_id, model, weight_processing, model_fingerprint FROM runs
        ) USING (run_id)
        GROUP BY ALL
    ),
    repeated AS (
        FROM head_means WHERE input_family = 'repeated_random'
    ),
    unrepeated AS (
        FROM head_means WHERE input_family = 'uniform_random'
    ),
    natural_text AS (
        FROM head_means WHERE input_family IN ('pile', 'text')
    )
SELECT
    repeated.model, intervention,
    'L' || layer || 'H' || head AS label,
    layer, head,
    repeated.induction_score AS induction_repeated,
    unrepeated.sink_mass AS sink_unrepeated,
    repeated.induction_score >= $least_induction
        AND unrepeated.sink_mass > $least_sink AS is_dormant,
    repeated.sink_mass AS sink_repeated,
    natural_text.sink_mass AS sink_text,
    natural_text.induction_score AS induction_text,
    repeated.run_id AS repeated_run,
    unrepeated.run_id AS unrepeated_run,
    natural_text.run_id AS text_run
FROM repeated
JOIN unrepeated
    USING (model_fingerprint, weight_processing, intervention, layer, head)
-- LEFT: text is a bonus, and without such a run its columns are NULL.
LEFT JOIN natural_text
    USING (model_fingerprint, weight_processing, intervention, layer, head)
ORDER BY
    repeated_run, unrepeated_run, text_run, intervention,
    induction_repeated DESC NULLS LAST, layer, head
