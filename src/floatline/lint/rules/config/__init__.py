"""FL3xx: configurations."""
