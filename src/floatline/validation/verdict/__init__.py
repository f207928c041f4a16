"""From pairs of runs to a verdict: intervals, gates, curves, power and notes."""
