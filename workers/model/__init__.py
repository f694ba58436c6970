"""What happens to a model: its files, its weights, its tokenizer. The one room that knows
TransformerLens and module trees.
"""
