"""Measures calls: on an Apple GPU, on an NVIDIA GPU, or by counting on softmetal."""
