"""How a scan is run: planned, executed on Ray, watched."""
