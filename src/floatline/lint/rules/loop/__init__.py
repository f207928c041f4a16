"""FL2xx: the order of a training loop."""
