// Formats findings: the thread, the access, the memory and the line of the .metal source.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "worker.h"

namespace softmetal {

struct Module;

// Return addresses, innermost first; zeros behind them.
using CallChain = std::array<uintptr_t, 8>;
// Stores the return addresses of a fiber's frames, starting at `frame`, in chain[first...]. Needs code
// compiled with frame pointers.
void walk_frames(const Fiber&, void** frame, size_t first, CallChain& chain);

// Returns "file.metal:12" for an address in the module (and its callers, innermost first). If `line` is
// known, only a frame at that line counts; without debug information the result is "line 12" or the offset in
// the module.
std::string source_of(const Module*, const std::vector<uintptr_t>& return_addresses, int line = 0);
std::string source_of(const Module*, const Fiber&);  // for the operation that the fiber waits in

std::string to_string(softmetal_uint3);
std::string thread_name(const Worker&, const Fiber&);
std::string lane_list(uint32_t lanes);  // "0-15, 20"

std::string divergence_message(const Worker&, const Simdgroup&, uint32_t lanes, const Fiber& representative);
// A shuffle gave lanes the value of an inactive lane.
std::string inactive_source_message(const Worker&, const Simdgroup&);
std::string barrier_mismatch_message(const Worker&, const Fiber& late);
// A thread waits at a barrier that others never reach: either `me` returned, or `me` waits and others
// returned.
std::string barrier_missed_message(const Worker&, const Fiber& me);
std::string tensor_message(const Worker&, const Fiber&, const std::string& what);
std::string threadgroup_memory_message(const Worker&, const char* name, int line);

}  // namespace softmetal
