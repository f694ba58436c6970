"""Whether two models are the same, and where they begin to differ."""
