// sysctlbyname(), which glibc lacks.
#pragma once
#include <stddef.h>

// Reads "kern.osversion", the build of the simulated macOS (SOFTMETAL_MACOS_BUILD). Without SOFTMETAL_MACOS,
// as for other names, it returns -1 with ENOENT.
#ifdef __cplusplus
extern "C"
#endif
    int
    sysctlbyname(const char* name, void* value, size_t* size, void* new_value, size_t new_size);
