"""Tile sizes timed on one GPU: candidates, timing, choice, and the file that keeps them."""
