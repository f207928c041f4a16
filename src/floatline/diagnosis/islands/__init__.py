"""The smallest set of modules or lines that must compute in FP32, found on replays of captured steps."""
