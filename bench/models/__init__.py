"""What a call should cost: bounds from published figures, bounds on counts, and aims."""
