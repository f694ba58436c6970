"""The one room that knows TransformerLens: bridges, and the dense engine that runs them."""
