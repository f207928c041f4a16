"""A module and what torch.compile makes of it: who is nearer to FP32, and the smallest part that is wrong."""
