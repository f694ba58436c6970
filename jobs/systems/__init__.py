"""The systems of the literature: each a TOML file of scans, checks against published figures, and phenomena."""
