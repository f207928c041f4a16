"""The ledger: what really happened in a run, step by step, on the disk."""
