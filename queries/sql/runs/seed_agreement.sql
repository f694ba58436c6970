-- How far two runs agree which heads are high in a statistic: correlations over the heads, one row
-- per pair of runs.
-- spearman: of the ranks of the heads' means. pearson: of the means. top: share of the tenth of the
-- heads with the largest means that both have.
-- Needs: two runs with as many layers and heads, on the same family of input.
-- parameter statistic VARCHAR = NULL: A column of heads, or NULL for all.
-- example: seed_agreement --statistic induction_score
WITH
    head_means AS (
        SELECT
            summaries.run_id, summaries.model, n_ctx, n_layers, n_heads, seed,
            summaries.intervention, summaries.input_family, summaries.layer, summaries.head,
            summaries.statistic AS measured,
            summaries.mean
        FROM head_summaries AS summaries
        JOIN (SELECT run_id, n_ctx, n_layers, n_heads, seed FROM runs) USING (run_id)
        WHERE summaries.mean IS NOT NULL
            AND ($statistic IS NULL OR summaries.statistic = $statistic)
    ),
    pairs AS (
        SELECT
            one.run_id, two.run_id AS other_run, one.model, two.model AS other_model,
            one.n_ctx, one.seed, two.seed AS other_seed,
            one.intervention, one.input_family, one.measured,
            one.mean AS this, two.mean AS other
        FROM head_means AS one
        JOIN head_means AS two
            USING (n_layers, n_heads, intervention, input_family, layer, head, measured)
        WHERE one.run_id < two.run_id
    ),
    ranked AS (
        SELECT
            *,
            -- Equal means have the mean of their ranks.
            rank() OVER (one_pair ORDER BY this)
                + (count(*) OVER (PARTITION BY run_id, other_run, intervention, input_family,
                    measured, this) - 1) / 2 AS this_rank,
            rank() OVER (one_pair ORDER BY other)
                + (count(*) OVER (PARTITION BY run_id, other_run, intervention, input_family,
                    measured, other) - 1) / 2 AS other_rank,
            rank() OVER (one_pair ORDER BY this DESC) <= ceil(count(*) OVER one_pair / 10)
                AS is_top,
            rank() OVER (one_pair ORDER BY other DESC) <= ceil(count(*) OVER one_pair / 10)
                AS is_other_top
        FROM pairs
        WINDOW one_pair AS (
            PARTITION BY run_id, other_run, intervention, input_family, measured
        )
    )
SELECT
    run_id, other_run, model, other_model, n_ctx, seed, other_seed, intervention, input_family,
    ranked.measured AS statistic,
    count(*) AS heads,
    corr(this_rank, other_rank) AS spearman,
    corr(this, other) AS pearson,
    avg(is_other_top::INT) FILTER (WHERE is_top) AS top
FROM ranked
GROUP BY ALL
ORDER BY run_id, other_run, intervention, input_family, ranked.measured
