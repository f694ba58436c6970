-- The sequences on which each head is most extreme, with their place in the corpus.
-- extreme: largest or smallest values. rank: 1 is the most extreme, the earlier of equals first.
-- deviations: distance from the head's mean, in standard deviations.
-- file, row, offset: where the sequence begins, if the input is a corpus.
-- parameter statistic VARCHAR = 'sink_mass': A column of heads.
-- parameter k BIGINT = 3: How many sequences of each head, at either end.
-- example: outliers --statistic entropy --k 1 --limit 5
WITH
    measured AS (
        SELECT
            run_id, intervention, input_family, layer, head, sequence,
            COLUMNS(lambda c: c = $statistic)::DOUBLE AS value
        FROM heads
    ),
    head_extremes AS (
        SELECT
            run_id, intervention, input_family, layer, head,
            avg(value) AS mean,
            stddev_samp(value) AS sd,
            -- The smallest -sequence is the latest: max and min both have to prefer the earliest.
            max(struct_pack(value := value, place := -sequence), $k) AS largest,
            min(struct_pack(value := value, place := sequence), $k) AS smallest
        FROM measured
        WHERE value IS NOT NULL
        GROUP BY ALL
    ),
    extremes AS (
        SELECT
            * EXCLUDE (largest, smallest),
            'largest' AS extreme,
            generate_subscripts(largest, 1) AS rank,
            unnest(largest) AS found
        FROM head_extremes
        UNION ALL
        SELECT
            * EXCLUDE (largest, smallest),
            'smallest' AS extreme,
            generate_subscripts(smallest, 1) AS rank,
            unnest(smallest) AS found
        FROM head_extremes
    )
SELECT
    run_id, model, n_ctx, intervention, input_family,
    'L' || layer || 'H' || head AS label,
    layer, head,
    $statistic AS statistic,
    extreme, rank,
    abs(found.place) AS sequence,
    found.value AS value,
    (found.value - mean) / nullif(sd, 0) AS deviations,
    pile_set_name, file, row, "offset"
FROM extremes
JOIN (SELECT run_id, model, n_ctx FROM runs) USING (run_id)
JOIN (
    SELECT run_id, intervention, sequence AS place, pile_set_name, file, row, "offset"
    FROM sequences
) AS origins
    USING (run_id, intervention)
WHERE origins.place = abs(found.place)
ORDER BY run_id, intervention, input_family, layer, head, extreme, rank
