-- Heads ranked by what they do for the loss, to first order: a row for each effect.
-- effect: rise of the loss in nats per token. direct: the part that reaches the logits without
-- passing a later layer. indirect: the rest. rank: by the size of the effect. p, q: of the effect
-- against 0, as in effects.
-- calibration: how the effect compares with measured interventions in the layer of the head, or
-- else in all layers.
-- Needs: statistics = ["effects"], or some of them.
-- example: head_effects --limit 5
WITH
    tested AS (
        SELECT *, two_sided_p(mean, standard_error, degrees_of_freedom, 0) AS p
        FROM head_summaries
        WHERE starts_with(statistic, 'effect_') AND count > 0
    ),
    effects AS (
        SELECT *, scaled_p(p, run_id, intervention, input_family, statistic) AS scaled FROM tested
    ),
    -- Read once, because it reads every sequence. The untouched model alone was calibrated.
    compared AS MATERIALIZED (
        SELECT *, 'none' AS intervention FROM effect_calibration
    ),
    direct_parts AS (
        SELECT run_id, intervention, input_family, layer, head, statistic, mean
        FROM head_summaries
        WHERE starts_with(statistic, 'direct_effect_')
    )
SELECT
    effects.run_id, effects.model, effects.intervention, effects.input_family, effects.statistic,
    rank() OVER (
        PARTITION BY effects.run_id, effects.intervention, effects.input_family, effects.statistic
        ORDER BY abs(effects.mean) DESC
    ) AS rank,
    effects.label, effects.layer, effects.head,
    effects.mean AS effect,
    effects.standard_error,
    effects.documents,
    effects.effective_documents,
    effects.degrees_of_freedom,
    direct_parts.mean AS direct,
    effects.mean - direct_parts.mean AS indirect,
    coalesce(of_layer.spearman, of_all.spearman) AS spearman,
    CASE WHEN of_layer.spearman IS NULL THEN of_all.slope ELSE of_layer.slope END AS slope,
    CASE WHEN of_layer.spearman IS NULL THEN of_all.heads ELSE of_layer.heads END
        AS calibrated_heads,
    CASE
        WHEN of_layer.spearman IS NOT NULL THEN 'in its layer'
        WHEN of_all.spearman IS NOT NULL THEN 'in all layers'
        ELSE 'first order, not calibrated'
    END AS calibration,
    effects.p,
    adjusted_p(
        effects.p, effects.scaled,
        effects.run_id, effects.intervention, effects.input_family, effects.statistic
    ) AS q
FROM effects
LEFT JOIN direct_parts
    ON direct_parts.statistic = 'direct_' || effects.statistic
    AND direct_parts.run_id = effects.run_id
    AND direct_parts.intervention = effects.intervention
    AND direct_parts.input_family = effects.input_family
    AND direct_parts.layer = effects.layer
    AND direct_parts.head = effects.head
LEFT JOIN compared AS of_layer
    ON of_layer.run_id = effects.run_id
    AND of_layer.intervention = effects.intervention
    AND of_layer.statistic = effects.statistic
    AND of_layer.layer = effects.layer
LEFT JOIN compared AS of_all
    ON of_all.run_id = effects.run_id
    AND of_all.intervention = effects.intervention
    AND of_all.statistic = effects.statistic
    AND of_all.layer IS NULL
-- Whatever a limit leaves is the top of each run.
ORDER BY rank, effects.run_id, effects.intervention, effects.input_family, effects.statistic
