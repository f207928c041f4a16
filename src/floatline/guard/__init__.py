"""What keeps a 16-bit run alive: the loss scale, and agreement between processes."""
