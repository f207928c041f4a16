"""Pure functions from evidence to findings: one family of causes a file."""
