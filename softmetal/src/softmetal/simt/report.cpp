// Formats findings, with source positions from llvm-symbolizer.
#include "report.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>

#include "dispatch.h"
#include "module.h"

namespace softmetal {
namespace {

struct Frame {
  std::string file;
  int line;
  bool vague;  // code without a line, located by the call that inlined it
};

const char* symbolizer() {
  static const std::string path = [] {
    for (const char* candidate :
         {"/usr/bin/llvm-symbolizer-19", "/usr/lib/llvm-19/bin/llvm-symbolizer", "/usr/bin/llvm-symbolizer"})
      if (access(candidate, X_OK) == 0) return std::string(candidate);
    return std::string();
  }();
  return path.c_str();
}

std::string shell_quoted(const std::string& text) {
  std::string quoted = "'";
  for (char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

// Every source position of these offsets, innermost inlined frame first. Starts a process per finding:
// findings are few.
std::vector<Frame> symbolize(const std::string& object, const std::vector<uintptr_t>& offsets) {
  std::vector<Frame> frames;
  if (!*symbolizer() || offsets.empty()) return frames;
  std::ostringstream command;
  command << symbolizer() << " --obj=" << shell_quoted(object) << " --functions=none --inlines" << std::hex;
  for (uintptr_t offset : offsets) command << " 0x" << offset;
  command << " 2>/dev/null";
  FILE* pipe = popen(command.str().c_str(), "re");
  if (!pipe) return frames;
  char text[4096];
  bool innermost = true, vague = false;
  while (fgets(text, sizeof text, pipe)) {  // file:line:column, and an empty line after each offset
    std::string row = text;
    while (!row.empty() && isspace(static_cast<unsigned char>(row.back()))) row.pop_back();
    size_t column = row.rfind(':');
    size_t line = column == std::string::npos || !column ? column : row.rfind(':', column - 1);
    if (line == std::string::npos) {
      innermost = true;
      continue;
    }
    int number = atoi(row.c_str() + line + 1);
    if (innermost) vague = number == 0;
    innermost = false;
    frames.push_back({row.substr(0, line), number, vague});
  }
  pclose(pipe);
  return frames;
}

// Skips the frames of the host version of metal_stdlib.
bool is_kernel_source(const Frame& frame) {
  return frame.line > 0 && frame.file.find("softmetal/msl/") == std::string::npos && frame.file[0] != '?';
}

std::string base_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// The code before an offset. The compiler removes the lines of code that it merges; those before it are near.
std::vector<uintptr_t> code_before(uintptr_t offset) {
  constexpr uintptr_t kNearBytes = 128;
  std::vector<uintptr_t> offsets(std::min(kNearBytes, offset));
  for (uintptr_t& before : offsets) before = --offset;
  return offsets;
}

CallChain call_chain(const Fiber& fiber) {
  CallChain chain{};
  if (fiber.frame)
    walk_frames(fiber, fiber.frame, 0, chain);
  else
    chain[0] = reinterpret_cast<uintptr_t>(fiber.pc);
  return chain;
}

}  // namespace

void walk_frames(const Fiber& fiber, void** frame, size_t first, CallChain& chain) {
  uintptr_t low = reinterpret_cast<uintptr_t>(fiber.stack_low);
  for (size_t depth = first; depth < chain.size(); depth++) {
    uintptr_t at = reinterpret_cast<uintptr_t>(frame);
    if (at - low >= kStackBytes - 2 * sizeof(void*) || at % sizeof(void*)) break;
    chain[depth] = reinterpret_cast<uintptr_t>(frame[1]);
    frame = static_cast<void**>(frame[0]);
  }
}

std::string source_of(const Module* module, const std::vector<uintptr_t>& return_addresses, int line) {
  std::vector<uintptr_t> offsets;
  for (uintptr_t address : return_addresses)
    if (module && module->contains(address)) offsets.push_back(address - module->base - 1);
  if (offsets.empty()) return line ? "line " + std::to_string(line) : "offset 0x0";
  std::string file;
  for (const std::vector<uintptr_t>& places : {offsets, code_before(offsets[0])}) {
    const std::vector<Frame> frames = symbolize(module->path, places);
    for (bool vague : {false, true})
      for (const Frame& frame : frames) {
        if (frame.vague != vague || !is_kernel_source(frame)) continue;
        if (!line || frame.line == line) return base_name(frame.file) + ":" + std::to_string(frame.line);
        if (file.empty()) file = base_name(frame.file);
      }
    // Optimised code may attribute a call to another line of the file.
    if (line) return (file.empty() ? "line " : file + ":") + std::to_string(line);
  }
  char text[32];
  snprintf(text, sizeof text, "offset 0x%zx", static_cast<size_t>(offsets[0]));
  return text;
}

std::string source_of(const Module* module, const Fiber& fiber) {
  CallChain chain = call_chain(fiber);
  return source_of(module, {chain.begin(), chain.end()}, fiber.line);
}

std::string to_string(softmetal_uint3 v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

std::string thread_name(const Worker& worker, const Fiber& fiber) {
  return "thread " + to_string(fiber.position) + " of threadgroup " + to_string(worker.position);
}

std::string lane_list(uint32_t lanes) {
  std::string list;
  for (uint32_t i = 0; i < SOFTMETAL_SIMD_WIDTH; i++) {
    if (!(lanes >> i & 1)) continue;
    uint32_t end = i;
    while (end + 1 < SOFTMETAL_SIMD_WIDTH && lanes >> (end + 1) & 1) end++;
    if (!list.empty()) list += ", ";
    list += std::to_string(i) + (end > i ? "-" + std::to_string(end) : "");
    i = end;
  }
  return list;
}

namespace {

std::string prefix(const Worker& worker, const char* kind) {
  return std::string(kind) + ": kernel '" + worker.dispatch->launch.kernel->name + "': ";
}

// Describes each group of lanes, like "lanes 0-15 wait in a simdgroup operation at f.metal:3".
std::string describe_rest(const Worker& worker, const Simdgroup& group, uint32_t lanes) {
  std::string text;
  auto add = [&](uint32_t mask, const std::string& what) {
    if (mask) text += "; lanes " + lane_list(mask) + " " + what;
  };
  uint32_t left = group.waiting & ~lanes;
  while (left) {
    const Fiber& f = group.fibers[__builtin_ctz(left)];
    uint32_t same = 0;
    for (uint32_t m = left; m; m &= m - 1)
      if (group.fibers[__builtin_ctz(m)].meets(f)) same |= m & -m;
    add(same, "wait at " + source_of(worker.dispatch->module, f));
    left &= ~same;
  }
  if (group.at_barrier)
    add(group.at_barrier,
        "wait in the threadgroup_barrier at " +
            source_of(worker.dispatch->module, group.fibers[__builtin_ctz(group.at_barrier)]));
  add(group.existing & ~group.live, "have returned");
  add(~group.existing, "do not exist");
  return text;
}

}  // namespace

std::string divergence_message(const Worker& worker, const Simdgroup& group, uint32_t lanes,
                               const Fiber& representative) {
  bool trails_differ = false;
  for (uint32_t m = lanes; m; m &= m - 1)
    trails_differ |= group.fibers[__builtin_ctz(m)].trail != representative.trail;
  std::string at = source_of(worker.dispatch->module, representative);
  std::string where =
      "simdgroup " + std::to_string(group.index) + " of threadgroup " + to_string(worker.position);
  if (trails_differ)
    return prefix(worker, "divergence") + "lanes of " + where + " meet at " + at +
           " after passing different simdgroup_barriers; every lane must pass the same ones";
  return prefix(worker, "divergence") + "the simdgroup operation at " + at + " is reached only by lanes " +
         lane_list(lanes) + " of " + where + describe_rest(worker, group, lanes);
}

std::string inactive_source_message(const Worker& worker, const Simdgroup& group) {
  uint32_t lane = static_cast<uint32_t>(__builtin_ctz(group.undefined));
  const Fiber& reader = group.fibers[lane];
  uint32_t active = group.active;
  return prefix(worker, "undefined") + "the simdgroup operation at " +
         source_of(worker.dispatch->module, reader) + " gives lane " + std::to_string(lane) +
         " of simdgroup " + std::to_string(group.index) + " of threadgroup " + to_string(worker.position) +
         " the value of lane " + std::to_string(group.undefined_source) +
         ", which takes no part in it (the active lanes are " + lane_list(active) + ")";
}

std::string barrier_mismatch_message(const Worker& worker, const Fiber& late) {
  const Fiber* early = nullptr;
  for (uint32_t g = 0; g < worker.simdgroups && !early; g++)
    if (uint32_t waiting = worker.groups[g].at_barrier)
      early = &worker.groups[g].fibers[__builtin_ctz(waiting)];
  return prefix(worker, "divergence") + "two threadgroup_barriers at once: " + thread_name(worker, late) +
         " is at " + source_of(worker.dispatch->module, late) + " while thread " +
         to_string(early->position) + " waits at " + source_of(worker.dispatch->module, *early) +
         (late.line == early->line ? ", in another iteration of a loop or by another call" : "");
}

std::string barrier_missed_message(const Worker& worker, const Fiber& me) {
  const Fiber* waiting = &me;
  for (uint32_t g = 0; g < worker.simdgroups && worker.barrier_count; g++)
    if (uint32_t lanes = worker.groups[g].at_barrier)
      waiting = &worker.groups[g].fibers[__builtin_ctz(lanes)];
  std::string missing = waiting == &me ? std::to_string(worker.threads - worker.alive) + " of its " +
                                             std::to_string(worker.threads) + " threads have returned before"
                                       : "thread " + to_string(me.position) + " has returned without it";
  const char* what = worker.in_operation ? "threadgroup's operation" : "threadgroup_barrier";
  return prefix(worker, "divergence") + "the " + what + " at " +
         source_of(worker.dispatch->module, *waiting) + " was reached by " + thread_name(worker, *waiting) +
         ", but " + missing;
}

std::string tensor_message(const Worker& worker, const Fiber& fiber, const std::string& what) {
  return prefix(worker, "tensor") + what + ": " + source_of(worker.dispatch->module, fiber) + " by " +
         thread_name(worker, fiber);
}

std::string threadgroup_memory_message(const Worker& worker, const char* name, int line) {
  return prefix(worker, "limit") + "threadgroup variable '" + name + "' (line " + std::to_string(line) +
         ") brings threadgroup memory to " + std::to_string(worker.arena.total()) + " bytes; the limit is " +
         std::to_string(SOFTMETAL_MAX_THREADGROUP_BYTES);
}

}  // namespace softmetal
