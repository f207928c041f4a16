"""Targets run as they are, or in another precision, and what each run showed."""
