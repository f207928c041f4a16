"""The reference workloads: systems that teams reported, whole, each in a folder or file of its name."""
