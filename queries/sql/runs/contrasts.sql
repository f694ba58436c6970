-- How the means of two groups of sequences differ, per head and statistic.
-- difference: mean of this minus mean of other. standard_error: √(SE² + SE²). z: difference /
-- standard_error. p, q: as in effects, with the degrees of freedom of Welch and Satterthwaite.
-- The error is too large for groups that share documents. For runs on the same sequences take
-- run_changes.
-- Needs: two groups to compare; subsets of the Pile need an input of the family pile.
-- parameter compare VARCHAR = 'pile_set_name': What separates the groups: pile_set_name,
--   input_family, model or run_id.
-- parameter statistic VARCHAR = NULL: A column of heads, or NULL for all.
-- parameter this VARCHAR = NULL: One group, or NULL for every one.
-- parameter other VARCHAR = NULL: The group that it is compared with, or NULL for every one.
-- example: contrasts --statistic sink_mass --this Github --limit 5
WITH
    named AS (
        SELECT
            CASE $compare
                WHEN 'pile_set_name' THEN parts.pile_set_name
                WHEN 'input_family' THEN parts.input_family
                WHEN 'model' THEN parts.model
                WHEN 'run_id' THEN parts.run_id
                ELSE error('compare: expected pile_set_name, input_family, model or run_id')
            END AS name,
            -- What must be equal in both groups. NULL is what separates them.
            CASE WHEN $compare = 'pile_set_name' THEN parts.run_id END AS same_run,
            CASE WHEN $compare = 'input_family' THEN parts.model END AS same_model,
            CASE WHEN $compare <> 'input_family' THEN parts.input_family END AS same_input,
            parts.intervention, parts.layer, parts.head, parts.statistic,
            parts.count, parts.documents, parts.degrees_of_freedom, parts.mean,
            parts.standard_error
        -- Whole heads where parts are no groups: a document may have sequences in two parts.
        FROM (
            FROM subset_summaries WHERE $compare = 'pile_set_name'
            UNION ALL BY NAME
            SELECT *, NULL::VARCHAR AS pile_set_name FROM head_summaries
            WHERE $compare <> 'pile_set_name'
        ) AS parts
        WHERE parts.count > 0 AND ($statistic IS NULL OR parts.statistic = $statistic)
    ),
    with_errors AS (
        SELECT
            name, same_run, same_model, same_input, intervention, layer, head,
            named.statistic AS measured,
            sum(count) AS n,
            sum(documents) AS documents,
            sum(count * mean) / sum(count) AS mean,
            -- A group may have several runs, whose errors are independent. One without an error
            -- leaves the group without one.
            CASE WHEN count(standard_error) = count(*) THEN
                sum((count * standard_error) ** 2) / sum(count) ** 2
            END AS squared_error,
            sum((count * standard_error) ** 4 / degrees_of_freedom) / sum(count)::DOUBLE ** 4
                AS error_over_freedom
        FROM named
        WHERE name IS NOT NULL
        GROUP BY ALL
    ),
    pairs AS (
        SELECT
            one.* EXCLUDE (name, n, documents, mean, squared_error, error_over_freedom),
            one.name AS this_name,
            two.name AS other_name,
            one.mean AS this_mean,
            two.mean AS other_mean,
            one.mean - two.mean AS difference,
            sqrt(one.squared_error + two.squared_error) AS error,
            one.n AS this_n,
            two.n AS other_n,
            one.documents AS this_documents,
            two.documents AS other_documents,
            -- Welch and Satterthwaite. Where both errors are 0, p needs none.
            (one.squared_error + two.squared_error) ** 2 / nullif(
                one.error_over_freedom + two.error_over_freedom, 0
            ) AS degrees_of_freedom
        FROM with_errors AS one
        JOIN with_errors AS two
            ON one.name <> two.name
            AND one.same_run IS NOT DISTINCT FROM two.same_run
            AND one.same_model IS NOT DISTINCT FROM two.same_model
            AND one.same_input IS NOT DISTINCT FROM two.same_input
            AND one.intervention = two.intervention
            AND one.layer = two.layer
            AND one.head = two.head
            AND one.measured = two.measured
        -- Without a choice each pair of groups comes once.
        WHERE one.name = coalesce($this, one.name)
            AND two.name = coalesce($other, two.name)
            AND ($this IS NOT NULL OR $other IS NOT NULL OR one.name < two.name)
    ),
    tested AS (
        SELECT
            *,
            two_sided_p(
                difference, error, degrees_of_freedom, greatest(abs(this_mean), abs(other_mean))
            ) AS p
        FROM pairs
    ),
    scaled AS (
        SELECT
            *,
            scaled_p(
                p, same_run, intervention, same_input, measured,
                other := (same_model, this_name, other_name)
            ) AS scaled
        FROM tested
    )
SELECT
    same_run AS run_id,
    same_model AS model,
    same_input AS input_family,
    intervention,
    'L' || layer || 'H' || head AS label,
    layer, head,
    measured AS statistic,
    $compare AS compared,
    this_name AS this,
    other_name AS other,
    this_mean, other_mean, difference,
    error AS standard_error,
    difference / nullif(error, 0) AS z,
    this_n::BIGINT AS this_sequences,
    other_n::BIGINT AS other_sequences,
    this_documents::BIGINT AS this_documents,
    other_documents::BIGINT AS other_documents,
    degrees_of_freedom,
    p,
    adjusted_p(
        p, scaled, same_run, intervention, same_input, measured,
        other := (same_model, this_name, other_name)
    ) AS q
FROM scaled
ORDER BY
    run_id, model, input_family, intervention, measured, this_name, other_name, layer, head
