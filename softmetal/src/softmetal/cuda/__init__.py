"""Metal kernels on an NVIDIA GPU: MSL sources are translated to CUDA C++, compiled with nvcc, and launched
through the CUDA driver. Translating needs clang and nvcc. Launching (softmetal.cuda.launch) needs only a
driver, so compiled kernels can run on another machine."""
