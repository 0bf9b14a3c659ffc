"""Plans, compiled kernels, launch counts and warm-up."""
