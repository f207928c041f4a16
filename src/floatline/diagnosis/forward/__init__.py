"""A forward pass without training: whether it may run in 16 bits, judged by its outputs against FP32's."""
