"""The fused engine, which runs a model and shows its activations, and what engines share."""
