"""The calls of a run, their operands, and the arguments that choose them."""
