"""Changes that span several statements of a file: loops, masks, buffers, loss scales, checkpoints, precisions."""
