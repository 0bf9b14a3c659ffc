"""Metal kernels as machine code of Apple's M1 and M2, by Mesa's open compiler, and what that code costs:
docs/agx.md."""
