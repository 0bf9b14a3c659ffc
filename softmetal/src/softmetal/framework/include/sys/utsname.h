// uname() names the simulated macOS ($SOFTMETAL_MACOS), by its kernel; without one it names the host.
#pragma once
#include_next <sys/utsname.h>

#ifdef __cplusplus
extern "C"
#endif
    int
    softmetal_uname(struct utsname* system);
#define uname(system) softmetal_uname(system)
