"""One guarded step: the judge on the device, gradients, buffers, samples and layers, and the update."""
