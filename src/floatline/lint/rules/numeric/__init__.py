"""FL1xx: numbers that 16 bits cannot hold."""
