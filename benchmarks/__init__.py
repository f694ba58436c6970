"""How fast, and in how much memory, against what a user would do instead."""
