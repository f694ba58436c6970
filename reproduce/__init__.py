"""What papers claim, measured again: systems of the literature, verdicts and their pages."""
