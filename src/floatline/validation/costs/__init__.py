"""Speed, memory and layers of a candidate, measured."""
