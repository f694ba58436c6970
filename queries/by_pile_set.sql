-- Mean of every statistic per part of the Pile and head, where the corpus names its parts.
WITH
    origins AS (
        -- One row per sequence, also where sequences were written once per intervention.
        SELECT run_id, sequence, any_value(pile_set_name) AS pile_set_name FROM sequences GROUP BY ALL
    )
SELECT
    run_id, intervention, input_family, pile_set_name, layer, head,
    'L' || layer || 'H' || head AS label,
    count(*) AS sequences,
    avg(COLUMNS(
        heads.* EXCLUDE (run_id, intervention, input_family, shard, sequence, layer, head)
    )) AS 'mean_\0'
FROM heads JOIN origins USING (run_id, sequence)
WHERE pile_set_name IS NOT NULL
GROUP BY ALL
ORDER BY run_id, intervention, input_family, pile_set_name, layer, head
