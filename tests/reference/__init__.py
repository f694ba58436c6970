"""Every figure once more, from files and formulas alone: plain loops in float64.

Nothing here imports from `schemas` or `workers`, so that a mistake of theirs is not repeated.
"""
