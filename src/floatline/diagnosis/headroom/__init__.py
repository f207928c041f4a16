"""How far a step is from the limits of a format, module by module."""
