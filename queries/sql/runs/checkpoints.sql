-- How a model's heads change over the steps of its training: one row per run of one scan, in order
-- of the steps.
-- sink_heads: share of the heads with a mean sink_mass above the threshold (0.3: Gu et al. 2024,
-- arXiv 2410.10781).
-- collapsed_heads: share of the heads whose mean entropy_normalised is below the threshold. Zhai et
-- al. 2023 (arXiv 2303.06296) describe the collapse; the number is ours.
-- largest_score: largest score_max. clipped_heads: share of the heads that reach the threshold once
-- (100: QK-clip of Kimi K2, arXiv 2507.20534).
-- massive_dimensions: most massive dimensions of the stream at position 0, mean over sequences, in
-- any layer.
-- stream_ratio: largest ratio, over the layers, of the stream's norm at position 0 to its mean
-- norm.
-- Needs: sink_mass, entropy_normalised, induction_score or resid_post_norm and sink_resid_post_norm
-- (all standard); score_max and sink_resid_post_massive if they are named in the scan.
-- parameter sink DOUBLE = 0.3: Mean attention to key 0 above which a head is a sink head.
-- parameter entropy DOUBLE = 0.1: Mean normalised entropy below which a head is collapsed.
-- parameter score DOUBLE = 100: Score from which on a head would be clipped.
-- parameter induction DOUBLE = 0.4: Mean score from which on a head is an induction head.
-- example: checkpoints --sink 0.5
WITH
    -- A head's ratio of two statistics stands beside its statistics.
    ratios AS (
        SELECT
            run_id, intervention, input_family, layer, head,
            'stream_ratio' AS measured,
            max(mean) FILTER (WHERE statistic = 'sink_resid_post_norm')
                / nullif(max(mean) FILTER (WHERE statistic = 'resid_post_norm'), 0) AS mean,
            NULL::DOUBLE AS maximum
        FROM head_summaries
        WHERE statistic IN ('sink_resid_post_norm', 'resid_post_norm')
        GROUP BY ALL
    ),
    numbers AS (
        SELECT
            run_id, intervention, input_family, layer, head, statistic AS measured, mean, maximum
        FROM head_summaries
        WHERE statistic IN (
            'sink_mass', 'entropy_normalised', 'induction_score', 'score_max',
            'sink_resid_post_massive'
        )
        UNION ALL
        FROM ratios
    )
SELECT
    runs.name, runs.step, run_id, runs.model, intervention, numbers.input_family,
    avg((mean > $sink)::INT) FILTER (WHERE measured = 'sink_mass') AS sink_heads,
    avg((mean >= $induction)::INT) FILTER (WHERE measured = 'induction_score') AS induction_heads,
    avg(mean) FILTER (WHERE measured = 'entropy_normalised') AS mean_entropy_normalised,
    avg((mean < $entropy)::INT) FILTER (WHERE measured = 'entropy_normalised') AS collapsed_heads,
    max(maximum) FILTER (WHERE measured = 'score_max') AS largest_score,
    avg((maximum >= $score)::INT) FILTER (WHERE measured = 'score_max') AS clipped_heads,
    max(mean) FILTER (WHERE measured = 'sink_resid_post_massive') AS massive_dimensions,
    max(mean) FILTER (WHERE measured = 'stream_ratio') AS stream_ratio
FROM numbers
JOIN runs USING (run_id)
GROUP BY ALL
ORDER BY
    name, numbers.input_family, intervention, step NULLS LAST, run_id
