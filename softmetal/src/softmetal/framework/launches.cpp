// Records and totals of dispatches, as JSON.
#include "launches.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "census.h"
#include "host.h"

namespace softmetal {
namespace {

struct Log {
  std::mutex mutex;
  std::map<std::string, uint64_t> launches;
  softmetal_counters totals{};
  std::vector<Launch> records;
  std::vector<size_t> recordings;  // start of each active recording in `records`
};
Log& log() {
  static Log* instance = new Log;
  return *instance;
}

struct Field {
  const char* name;
  uint64_t softmetal_counters::* value;
};
constexpr Field kFields[] = {
    {"products", &softmetal_counters::products},
    {"simd_reductions", &softmetal_counters::simd_reductions},
    {"shuffles", &softmetal_counters::shuffles},
    {"threadgroup_barriers", &softmetal_counters::threadgroup_barriers},
    {"simdgroup_barriers", &softmetal_counters::simdgroup_barriers},
    {"exps", &softmetal_counters::exps},
    {"threadgroups", &softmetal_counters::threadgroups},
    {"tensor_products", &softmetal_counters::tensor_products},
    {"device_loads", &softmetal_counters::device_loads},
    {"device_stores", &softmetal_counters::device_stores},
    {"threadgroup_loads", &softmetal_counters::threadgroup_loads},
    {"threadgroup_stores", &softmetal_counters::threadgroup_stores},
};
constexpr const char* kSpaces[4] = {"thread", "device", "constant", "threadgroup"};

void add(softmetal_counters& sum, const softmetal_counters& more) {
  for (const Field& field : kFields) sum.*field.value += more.*field.value;
  for (int i = 0; i < 4; ++i) {
    sum.bytes_read[i] += more.bytes_read[i];
    sum.bytes_written[i] += more.bytes_written[i];
  }
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) out += c;
  }
  return out + "\"";
}

using Members = std::vector<std::pair<std::string, std::string>>;  // names, and values as JSON

std::string object(const Members& members) {
  std::string json = "{";
  for (const auto& [name, value] : members)
    json += (json.size() > 1 ? ", " : "") + quoted(name) + ": " + value;
  return json + "}";
}

// {"slot": bytes, ...} for the accessed slots.
std::string slots_json(const uint64_t (&bytes)[SOFTMETAL_MAX_BUFFERS]) {
  Members slots;
  for (int slot = 0; slot < SOFTMETAL_MAX_BUFFERS; ++slot)
    if (bytes[slot]) slots.emplace_back(std::to_string(slot), std::to_string(bytes[slot]));
  return object(slots);
}

std::string spaces_json(const uint64_t bytes[4]) {
  Members spaces;
  for (int i = 0; i < 4; ++i) spaces.emplace_back(kSpaces[i], std::to_string(bytes[i]));
  return object(spaces);
}

std::string counters_json(const softmetal_counters& counters) {
  Members members;
  for (const Field& field : kFields) members.emplace_back(field.name, std::to_string(counters.*field.value));
  members.emplace_back("bytes_read", spaces_json(counters.bytes_read));
  members.emplace_back("bytes_written", spaces_json(counters.bytes_written));
  return object(members);
}

std::string uint3_json(softmetal_uint3 v) {
  return "[" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + "]";
}

std::string launch_json(const Launch& launch) {
  return object({{"kernel", quoted(launch.kernel)},
                 {"grid", uint3_json(launch.grid)},
                 {"threads", uint3_json(launch.threads)},
                 {"threadgroup_bytes", std::to_string(launch.threadgroup_bytes)},
                 {"counters", counters_json(launch.counters)},
                 {"buffers_read", slots_json(launch.counters.buffer_read)},
                 {"buffers_written", slots_json(launch.counters.buffer_written)},
                 {"buffers_distinct", slots_json(launch.counters.buffer_distinct)}});
}

}  // namespace

void log_launch(const Launch& launch) {
  std::lock_guard lock(log().mutex);
  ++log().launches[launch.kernel];
  add(log().totals, launch.counters);
  if (!log().recordings.empty()) log().records.push_back(launch);
}

}  // namespace softmetal

using namespace softmetal;

extern "C" {

void softmetal_start_recording(void) {
  std::lock_guard lock(log().mutex);
  log().recordings.push_back(log().records.size());
}

char* softmetal_stop_recording(void) {
  std::lock_guard lock(log().mutex);
  if (log().recordings.empty()) return strdup("[]");
  std::string json = "[";
  for (size_t i = log().recordings.back(); i < log().records.size(); ++i)
    json += (json.size() > 1 ? ", " : "") + launch_json(log().records[i]);
  log().recordings.pop_back();
  if (log().recordings.empty()) log().records.clear();
  return strdup((json + "]").c_str());
}

char* softmetal_totals(void) {
  std::lock_guard lock(log().mutex);
  Members launches;
  for (const auto& [kernel, count] : log().launches) launches.emplace_back(kernel, std::to_string(count));
  return strdup(object({{"launches", object(launches)}, {"counters", counters_json(log().totals)}}).c_str());
}

void softmetal_reset_totals(void) {
  std::lock_guard lock(log().mutex);
  log().launches.clear();
  log().totals = {};
}

size_t softmetal_allocated_bytes(void) { return softmetal::allocated_bytes(); }
size_t softmetal_peak_bytes(void) { return softmetal::peak_bytes(); }
void softmetal_restart_peak(void) { softmetal::restart_peak(); }
char* softmetal_live_objects(void) {
  Members objects;
  for (int i = 0; i < int(MetalClass::kCount); ++i)
    if (const int64_t count = live_count(MetalClass(i)))
      objects.emplace_back(class_name(MetalClass(i)), std::to_string(count));
  return strdup(object(objects).c_str());
}

char* softmetal_device_facts(void) {
  return strdup(object({{"name", quoted(device_name())},
                        {"cores", std::to_string(core_count())},
                        {"memory", std::to_string(device_memory())}})
                    .c_str());
}

void softmetal_free(void* text) { free(text); }
}
