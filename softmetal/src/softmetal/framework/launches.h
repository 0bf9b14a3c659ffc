// A log of dispatches: totals always, one record per dispatch during a recording.
#pragma once
#include <string>

#include "../simt/abi.h"

namespace softmetal {

struct Launch {
  std::string kernel;
  softmetal_uint3 grid, threads;
  uint32_t threadgroup_bytes;  // static and dynamic
  softmetal_counters counters;
};

void log_launch(const Launch& launch);

}  // namespace softmetal

// Called by softmetal/control.py. The strings are JSON; the caller releases them with softmetal_free.
extern "C" {
void softmetal_start_recording(void);
char* softmetal_stop_recording(void);  // [launch, ...] since the start of the innermost recording
char* softmetal_totals(void);          // {"launches": {kernel: count}, "counters": {...}}
void softmetal_reset_totals(void);
size_t softmetal_allocated_bytes(void);
size_t softmetal_peak_bytes(void);  // since softmetal_restart_peak()
void softmetal_restart_peak(void);
char* softmetal_live_objects(void);  // {class: count}, classes with none left out
char* softmetal_device_facts(void);  // {"name": ..., "cores": ..., "memory": ...}
void softmetal_free(void* text);
}
