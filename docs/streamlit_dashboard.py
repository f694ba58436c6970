"""A dashboard that refreshes while a scan runs.

Start it with `streamlit run docs/streamlit_dashboard.py -- RUNS`.

It reads means from the view `head_summaries`. So on runs with roll-ups it never reads rows.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import headcount

if TYPE_CHECKING:
    from headcount.queries.api import AnswerTable, Runs

# No texts below these values: Streamlit would write them on the page.
SECONDS_BETWEEN_LOOKS = 10

# In Vega-Lite: layers upwards, heads to the right.
HEATMAP: dict[str, Any] = {
    "height": {"step": 24},
    "mark": {"type": "rect", "tooltip": True},
    "encoding": {
        "x": {"field": "head", "type": "ordinal"},
        "y": {"field": "layer", "type": "ordinal", "sort": "descending"},
        "color": {"field": "mean", "type": "quantitative", "scale": {"scheme": "viridis"}},
    },
}


def progress(runs: Runs) -> AnswerTable:
    """How much of each run is in."""
    return runs.sql("""
        SELECT run_id, model, sequences_done, sequences, shards_done, shards, complete
        FROM runs ORDER BY created DESC
    """)


def statistics(runs: Runs) -> list[str]:
    """The statistics that have a value in some head."""
    # On this input some may be undefined everywhere, and nothing could be drawn of them.
    names = runs.sql("""
        SELECT DISTINCT statistic FROM head_summaries
        WHERE mean IS NOT NULL AND intervention = 'none' ORDER BY statistic
    """)
    return [name for (name,) in names]


def means(runs: Runs, statistic: str) -> AnswerTable:
    """The mean of a statistic in every head of the untouched models, and how sure it is."""
    quoted = statistic.replace("'", "''")
    return runs.sql(f"""
        SELECT run_id, layer, head, label, mean, standard_error, count
        FROM head_summaries WHERE statistic = '{quoted}' AND intervention = 'none'
        ORDER BY run_id, layer, head
    """)


def main() -> None:
    """Draw the page, and again every few seconds."""
    import streamlit as st

    st.set_page_config(page_title="headcount", layout="wide")
    path = sys.argv[1] if len(sys.argv) > 1 else "runs"
    if "runs" not in st.session_state:
        # Of each browser's own session: one must not refresh what another reads.
        st.session_state.runs = headcount.open(path)
    runs: Runs = st.session_state.runs

    @st.fragment(run_every=SECONDS_BETWEEN_LOOKS)
    def live() -> None:
        runs.refresh()
        st.dataframe(progress(runs).df(), hide_index=True)
        statistic = st.selectbox("statistic", statistics(runs))
        rows = means(runs, statistic).df()
        for run_id, of_run in rows.groupby("run_id"):
            st.subheader(str(run_id))
            st.vega_lite_chart(of_run, HEATMAP)
            strongest = of_run.nlargest(5, "mean")
            st.dataframe(strongest[["label", "mean", "standard_error", "count"]], hide_index=True)

    try:
        live()
    except headcount.Error as error:
        st.error(str(error))


if __name__ == "__main__":
    main()
