"""The room that knows module trees, attention and the files of models."""
