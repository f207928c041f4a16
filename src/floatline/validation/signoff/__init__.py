"""Which plan is approved for a target, since when, and on what evidence."""
