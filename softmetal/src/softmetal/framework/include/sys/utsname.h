// uname() returns the kernel of the simulated macOS ($SOFTMETAL_MACOS), or of the host without one.
#pragma once
#include_next <sys/utsname.h>

#ifdef __cplusplus
extern "C"
#endif
    int
    softmetal_uname(struct utsname* system);
#define uname(system) softmetal_uname(system)
