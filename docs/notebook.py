"""A notebook to start from: `marimo edit docs/notebook.py`."""

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Heads of a small model")


@app.cell
def _():
    import marimo as mo

    mo.md(
        """
        # Heads of a small model

        A scan measures every attention head of a bundled model on random texts that are repeated.
        Then we ask which heads continue the repetition, look at one of them, and measure a model
        that lies in memory.
        """
    )
    return (mo,)


@app.cell
def _():
    import headcount

    runs = headcount.scan(
        {
            "model": "bundled:attn-only-2l-mini",
            "n_ctx": 32,
            "sequences": 64,
            "input": {"family": "repeated_random"},
            "out": "runs",
        },
        name="notebook",
    )
    runs
    return headcount, runs


@app.cell
def _(runs):
    by_head = runs.sql("""
        SELECT label, layer, head, avg(induction_score) AS induction, avg(sink_mass) AS first_token
        FROM heads GROUP BY ALL ORDER BY induction DESC
    """)
    by_head
    return (by_head,)


@app.cell
def _(by_head):
    # Layer by head, as one looks at it most often.
    heatmap = by_head.df().pivot(index="layer", columns="head", values="induction")
    heatmap.add_prefix("head ").round(3)
    return (heatmap,)


@app.cell
def _(by_head, mo):
    labels = by_head.df()["label"].tolist()
    choice = mo.ui.dropdown(labels, value=labels[0], label="head")
    choice
    return (choice,)


@app.cell
def _(choice, runs):
    runs.head(choice.value).show()
    return


@app.cell
def _(headcount):
    import torch
    from transformers import AutoModelForCausalLM

    # Any causal language model of transformers, as it is loaded.
    model = AutoModelForCausalLM.from_pretrained("models/gpt2-mini")
    texts = torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([texts, texts], dim=1)
    rows = headcount.measure(
        model,
        tokens,
        ["sink_mass", "induction_score"],
        interventions=["none", "zero_query_bias"],
    )
    return (rows,)


@app.cell
def _(rows):
    # Which heads look at the first token because of what the query bias says?
    masses = rows.to_pandas().groupby(["layer", "head", "intervention"], observed=True)["sink_mass"]
    effect = masses.mean().unstack()
    effect.round(3)
    return (effect,)


if __name__ == "__main__":
    app.run()
