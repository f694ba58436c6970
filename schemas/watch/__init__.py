"""What is watched in a training: measured steps, rules over them, and their thresholds."""
