"""What one step did: the operations it ran, their numbers and their FP32 twins."""
