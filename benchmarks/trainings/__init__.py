"""Tiny trainings, sound and with planted faults: what alarms find in them."""
