// <os/signpost.h>: the types that torch's MPSProfiler.h names.
#pragma once
#include <os/log.h>
#include <stdint.h>
typedef uint64_t os_signpost_id_t;
typedef uint8_t os_signpost_type_t;
