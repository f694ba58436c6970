"""How answers are read: DuckDB views over the committed files of runs, queries as `.sql` files, and
a report.
"""
