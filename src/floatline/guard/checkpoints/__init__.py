"""A guarded run on the disk: its whole state as safetensors and JSON, for one process or several."""
