"""Runs the bench and shows its results: as a table, as a picture, in the README."""
