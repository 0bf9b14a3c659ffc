"""What the bench compares: torch_fattn's plans and the peers' kernels, each as passes over named buffers."""
