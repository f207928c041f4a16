"""Runs as their ledgers tell them: for the terminal, and as a page."""
