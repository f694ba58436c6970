-- How far effects to first order can be trusted: they are compared with measured interventions, by
-- layer and, where layer is NULL, over all layers.
-- spearman: rank correlation of estimate and measured over the heads; NULL for less than three.
-- slope: of measured by estimate, least squares. same_sign: share of the heads.
-- Needs: a run with effects among its statistics, and headcount calibrate of it.
-- example: effect_calibration --limit 5
WITH
    pairs AS MATERIALIZED (
        SELECT * FROM calibrated_effects
    ),
    by_layer AS (
        SELECT * FROM pairs
        UNION ALL BY NAME
        SELECT * REPLACE (NULL::SMALLINT AS layer) FROM pairs
    ),
    ranked AS (
        SELECT
            *,
            rank() OVER (PARTITION BY run_id, statistic, layer ORDER BY estimate) AS estimate_rank,
            rank() OVER (PARTITION BY run_id, statistic, layer ORDER BY measured) AS measured_rank
        FROM by_layer
    )
SELECT
    run_id, model, statistic, layer,
    count(*) AS heads,
    any_value(sequences)::BIGINT AS sequences,
    CASE WHEN count(*) > 2 THEN corr(measured_rank, estimate_rank) END AS spearman,
    CASE WHEN count(*) > 2 THEN regr_slope(measured, estimate) END AS slope,
    avg((sign(measured) = sign(estimate))::INT) AS same_sign
FROM ranked
GROUP BY ALL
ORDER BY run_id, statistic, layer NULLS FIRST
