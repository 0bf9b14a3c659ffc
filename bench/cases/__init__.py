"""What a run measures: calls, their operands, and the arguments that choose them."""
