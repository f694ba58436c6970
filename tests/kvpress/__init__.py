"""Our exports in kvpress, in an environment of its own."""
