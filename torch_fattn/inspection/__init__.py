"""What a call would do and what calls have done: plans, compiled kernels, warm-up."""
