"""Reference checkpoints small enough to ship, each with its recipe and model card."""
