"""What is done about bad steps: decided from numbers, as data, with snapshots to go back to."""
