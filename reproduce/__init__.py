"""What papers claim, measured again: replications, verdicts and their pages."""
