"""Fewer kernels per token in transformers' models, beside attention.

A decode step of a small model on a Mac takes as long as the host needs to launch its kernels, and attention
is one launch of about forty per layer. `models` decides at a model's first forward what to fuse, `norms`
fuses RMSNorm, `rotary` and `layers` the rotary embedding with the write to the cache, by `deferred` tensors,
`mixers` layers of linear attention, by the `readers` of their families, or `delta_functions` what they call,
and `report` shows what was fused and how many kernels a step launches.
"""
