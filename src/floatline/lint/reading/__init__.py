"""What a source file shows: names, values, dtypes, gradients, loops and branches. Never imports torch."""
