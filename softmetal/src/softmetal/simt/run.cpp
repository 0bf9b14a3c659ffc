// softmetal_run: validates and runs one dispatch, and reports its findings.
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "checks/checker.h"
#include "dispatch.h"
#include "fault.h"
#include "module.h"
#include "pool.h"
#include "report.h"
#include "watchdog.h"
#include "worker.h"

namespace softmetal {
namespace {

constexpr uint32_t kMaxThreadsPerThreadgroup = 1024;
// The default number of threads is at most this: more do not pay off, and each keeps up to 1,024 stacks, and
// their guard pages count against the process's limit of mappings.
constexpr uint32_t kMaxOsThreads = 16;

uint64_t volume(softmetal_uint3 v) { return uint64_t{v.x} * v.y * v.z; }

std::string refusal(const Dispatch& d) {
  const softmetal_kernel& kernel = *d.launch.kernel;
  std::string name = "launch: kernel '" + std::string(kernel.name) + "': ";
  uint64_t threads = volume(d.launch.threads);
  uint32_t limit = kernel.max_threads ? kernel.max_threads : kMaxThreadsPerThreadgroup;
  if (!threads || threads > limit)
    return name + "threadgroup of " + to_string(d.launch.threads) + " has " + std::to_string(threads) +
           " threads; between 1 and " + std::to_string(limit) + " are possible";
  if (volume(d.launch.grid) >= UINT32_MAX)
    return name + "grid of " + to_string(d.launch.grid) + " threadgroups; at most 4294967294 can be numbered";
  uint64_t memory = 0;
  for (uint32_t bytes : d.launch.arguments->threadgroup_length) memory += (bytes + 15) / 16 * 16;
  if (memory > SOFTMETAL_MAX_THREADGROUP_BYTES)
    return name + "threadgroup memory arguments take " + std::to_string(memory) + " bytes; the limit is " +
           std::to_string(SOFTMETAL_MAX_THREADGROUP_BYTES);
  if (d.settings.checks && !(d.module && d.module->table->checked))
    return name +
           "checks are on, but its module was compiled without memory callbacks; compile it in checked mode";
  return "";
}

uint32_t os_threads(const Dispatch& d) {
  if (d.checker) return 1;  // the shadow memory is not shared between OS threads
  static const auto cores = static_cast<uint32_t>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  uint32_t wanted = d.settings.threads ? d.settings.threads : std::min(cores, kMaxOsThreads);
  return std::min(wanted, d.threadgroups);
}

// Reused by later dispatches for their stacks and memory. Guarded, like the pool, by dispatch_mutex.
std::mutex dispatch_mutex;
std::vector<std::unique_ptr<Worker>>& workers() {
  static auto* all = new std::vector<std::unique_ptr<Worker>>;
  return *all;
}

void add_counters(softmetal_counters& sum, const softmetal_counters& part) {
  auto* to = reinterpret_cast<uint64_t*>(&sum);
  auto* from = reinterpret_cast<const uint64_t*>(&part);
  for (size_t i = 0; i < sizeof sum / sizeof *to; i++) to[i] += from[i];
}

void run_share(void* context, uint32_t slot) {
  Dispatch& d = *static_cast<Dispatch*>(context);
  Worker& worker = *workers()[slot];
  FaultGuard guard;
  *softmetal_thread_counters() = {};
  worker.prepare(d);
  Watchdog watchdog(worker, d.settings.watchdog_ms);
  while (!d.stop) {
    uint32_t index = d.next++;
    if (index >= d.threadgroups) break;
    if (!worker.run_threadgroup(index)) d.stop = true;
  }
  std::lock_guard lock(d.mutex);
  if (!worker.error.empty()) d.errors.push_back(worker.error);
  add_counters(d.counters, *softmetal_thread_counters());
}

char* joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : "\n") + line;
  return strdup(text.c_str());
}

}  // namespace
}  // namespace softmetal

extern "C" int softmetal_run(const softmetal_launch* launch, const softmetal_settings* settings,
                             softmetal_counters* counters, char** error) {
  using namespace softmetal;
  Dispatch dispatch(*launch, *settings);
  dispatch.module = module_of(launch->kernel);
  *counters = {};
  if (std::string why = refusal(dispatch); !why.empty()) {
    *error = strdup(why.c_str());
    return 1;
  }
  dispatch.threadgroups = static_cast<uint32_t>(volume(launch->grid));
  if (!dispatch.threadgroups) return 0;

  std::lock_guard lock(dispatch_mutex);
  std::optional<Checker> checker;
  if (dispatch.module && dispatch.module->table->checked) dispatch.checker = &checker.emplace(dispatch);
  uint32_t count = os_threads(dispatch);
  while (workers().size() < count) workers().push_back(std::make_unique<Worker>());
  run_on_threads(count - 1, run_share, &dispatch);

  *counters = dispatch.counters;
  if (checker)
    for (std::string& finding : checker->findings()) dispatch.errors.push_back(std::move(finding));
  if (dispatch.errors.empty()) return 0;
  *error = joined(dispatch.errors);
  return 1;
}
