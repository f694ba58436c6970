"""What the data means: scans, statistics, tables, run directories and errors."""
