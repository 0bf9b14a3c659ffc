// <os/log.h>: the type that torch's MPSProfiler.h names.
#pragma once
typedef void* os_log_t;
