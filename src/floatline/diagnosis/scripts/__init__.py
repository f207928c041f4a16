"""A whole script diagnosed in a process of its own."""
