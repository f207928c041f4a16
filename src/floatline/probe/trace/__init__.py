"""Every operation of one step, with its numbers and those of its FP32 twin."""
