"""`headcount cache-plan`: which heads get a window, which keys and values few bits."""
