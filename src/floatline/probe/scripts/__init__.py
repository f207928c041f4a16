"""Whole scripts run as Python would run them, watched, with some of their steps recorded."""
