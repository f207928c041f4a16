"""Metrics as training scripts leave them behind: JSON, CSV, TensorBoard, Weights & Biases, MLflow."""
