"""Timing of tile sizes on one GPU: candidates, timing, choice, and the file of the results."""
