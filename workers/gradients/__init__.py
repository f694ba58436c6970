"""The backward pass: what a head does for the loss, to first order."""
