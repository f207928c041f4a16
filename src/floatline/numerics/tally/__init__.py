"""How often each bit pattern occurs in a tensor: on a CPU, with numba, and on an NVIDIA GPU."""
