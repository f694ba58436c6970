"""The fused engine and the dense one, its reference: they run a model and show its activations."""
