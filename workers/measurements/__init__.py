"""What is measured in a batch: formulas evaluated, values checked, means merged, weights read."""
