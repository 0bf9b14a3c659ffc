"""Runs the bench and shows the results: table, picture, README."""
