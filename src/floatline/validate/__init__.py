"""Paired validation against FP32: pure functions over arm runs, and the verdict they lead to."""
