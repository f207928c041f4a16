"""Reports for people and programs: they render what was found and compute nothing."""
