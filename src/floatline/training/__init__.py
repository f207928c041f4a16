"""Training a workload under guard, from the first step to the last checkpoint."""
