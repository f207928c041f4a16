"""Tensors against number formats: ranges, rounding, the exact split of FP32, half precision on a CPU."""
