"""The cost that a call should have: bounds from published figures, and bounds on counts."""
