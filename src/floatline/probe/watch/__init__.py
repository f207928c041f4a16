"""A training loop watched without changing it: its calls as events, in order."""
