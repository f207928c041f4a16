"""Findings tried on replays: what is taken away, and whether that fixes the step."""
