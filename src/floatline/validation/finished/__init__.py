"""Runs that are done, found on the disk and compared."""
