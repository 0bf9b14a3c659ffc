"""The cost that a call should have: bounds from published figures, bounds on counts, and a model of times."""
