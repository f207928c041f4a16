"""Replay bundles: a captured step in a folder, to be run again on another machine."""
