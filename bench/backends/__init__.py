"""Where a call is measured: an Apple GPU, an NVIDIA GPU, or softmetal's counters."""
