"""What runs a model and shows its activations: the fused engine, and the dense one that is the
reference.
"""
