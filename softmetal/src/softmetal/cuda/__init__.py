"""Metal kernels on an NVIDIA GPU: MSL sources are translated to CUDA C++, compiled with nvcc, and launched
through the CUDA driver. Translating needs clang and nvcc; launching (softmetal.cuda.launch) needs a
driver only, so compiled kernels can travel to a machine that has nothing else."""
