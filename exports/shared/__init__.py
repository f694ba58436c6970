"""What all formats share: what a format is, the run that it reads, how sure it is."""
