"""Fewer kernels per token in transformers' models, beside attention.

A decode step of a small model on a Mac takes as long as the host needs to launch its kernels, and attention
is one launch of about forty per layer. `models` decides at a model's first forward which of its modules to
fuse, `norms` fuses RMSNorm, and `report` shows what was fused and how many kernels a step launches.
"""
