// Properties of GPU, system and torch, the tuned rows of earlier processes, and the folder of compiled
// pipelines. Python passes tuned rows before the GPU is known, so each set names its GPU.
#include "gpu.h"

#include <sys/utsname.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <c10/util/Exception.h>
#include <torch/library.h>
#include <torch/version.h>

#include "../plan/route.h"
#include "../plan/supported.h"
#include "../plan/tuned.h"

#ifdef FATTN_WITH_METAL
#include "../metal/executor.h"
#include "../selftest/verdicts.h"
#endif

namespace fattn {
namespace {

struct Tuning {
  std::string name;
  int64_t family;
  int64_t cores;
  TunedRows rows;

  template <typename Gpu>  // a Tuning, or DeviceFacts
  bool same_gpu(const Gpu& other) const {
    return name == other.name && family == other.family && cores == other.cores;
  }
};

std::mutex mutex;
// Rows live as long as the process: plans point to their source.
std::vector<const Tuning*>& tunings() {
  static auto& all = *new std::vector<const Tuning*>;
  return all;
}
struct Facts {
  DeviceFacts gpu;
  uint64_t verdicts;  // how many there were
};
std::atomic<const Facts*> known_facts{nullptr};  // null: not known, or out of date

// A TunedRow or TunedRoute as text, by member name.
using Row = c10::Dict<std::string, std::string>;
using Rows = c10::List<Row>;

template <typename T>
using Named = std::pair<const char*, T>;
constexpr std::array<Named<Kernel>, 6> kKernels{{{"prefill", Kernel::kPrefill},
                                                 {"prefill_wide", Kernel::kPrefillWide},
                                                 {"prefill_tensor", Kernel::kPrefillTensor},
                                                 {"decode", Kernel::kDecode},
                                                 {"decode_wide", Kernel::kDecodeWide},
                                                 {"decode_vector", Kernel::kDecodeVector}}};
constexpr std::array<Named<Routed>, 4> kRouted{{{"prefill", Routed::kPrefill},
                                                {"decode", Routed::kDecode},
                                                {"training", Routed::kTraining},
                                                {"training_causal", Routed::kTrainingCausal}}};
constexpr std::array<Named<DType>, 3> kDTypes{
    {{"float32", DType::kFloat32}, {"float16", DType::kFloat16}, {"bfloat16", DType::kBFloat16}}};
constexpr std::array<Named<bool>, 2> kTakers{{{"fattn", false}, {"torch", true}}};

template <typename T, size_t count>
T one_of(const std::array<Named<T>, count>& values, const Row& row, const char* name) {
  const std::string word = row.contains(name) ? row.at(name) : "";
  for (const auto& [known, value] : values) {
    if (word == known) return value;
  }
  TORCH_CHECK_VALUE(false, name, " of a tuned row is '", word, "', which is unknown");
}

// A missing field is 0.
int64_t whole(const Row& row, const char* name, int64_t most) {
  const std::string word = row.contains(name) ? row.at(name) : "0";
  const char* end = word.data() + word.size();
  int64_t number = -1;
  const bool is_whole = std::from_chars(word.data(), end, number).ptr == end;
  TORCH_CHECK_VALUE(is_whole && number >= 0 && number <= most, name, " of a tuned row is ", word,
                    " and must be between 0 and ", most);
  return number;
}

// Refuses unknown fields instead of ignoring them.
void check_names(const Row& row, std::initializer_list<std::string_view> known) {
  for (const auto& field : row) {
    TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), field.key()) != known.end(),
                      "a tuned row has no field '", field.key(), "'");
  }
}

constexpr int64_t kMaxVersion = 1000000;

std::vector<TunedRow> rows_of(const Rows& named) {
  std::vector<TunedRow> rows;
  for (const Row row : named) {
    check_names(row,
                {"kernel", "dtype", "min_dim", "max_dim", "max_length", "row_fragments", "row_groups",
                 "tile_keys", "simdgroups", "early_loads", "min_chunk", "threadgroups_per_core", "macos"});
    const auto size = [&](const char* name, int64_t most) { return uint16_t(whole(row, name, most)); };
    rows.push_back({.kernel = one_of(kKernels, row, "kernel"),
                    .dtype = one_of(kDTypes, row, "dtype"),
                    .min_dim = size("min_dim", kMaxHeadDim),
                    .max_dim = size("max_dim", kMaxHeadDim),
                    .max_length = int32_t(whole(row, "max_length", kMaxLength)),
                    .row_fragments = size("row_fragments", 16),
                    .row_groups = size("row_groups", 16),
                    .tile_keys = size("tile_keys", 64),
                    .simdgroups = size("simdgroups", 64),
                    .early_loads = size("early_loads", 1),
                    .min_chunk = size("min_chunk", 4096),
                    .threadgroups_per_core = size("threadgroups_per_core", 64),
                    .macos = int(whole(row, "macos", kMaxVersion))});
  }
  return rows;
}

std::vector<TunedRoute> routes_of(const Rows& named) {
  std::vector<TunedRoute> routes;
  for (const Row row : named) {
    check_names(row, {"op", "dtype", "dim", "min_length", "max_length", "macos", "torch", "to"});
    const int64_t max_length = whole(row, "max_length", kMaxLength);
    routes.push_back({.op = one_of(kRouted, row, "op"),
                      .dtype = one_of(kDTypes, row, "dtype"),
                      .dim = whole(row, "dim", kMaxHeadDim),
                      .min_length = whole(row, "min_length", kMaxLength),
                      .max_length = max_length == kAnyLength ? kAnyNumber : max_length,
                      .macos = int(whole(row, "macos", kMaxVersion)),
                      .torch = int(whole(row, "torch", kMaxVersion)),
                      .to_torch = one_of(kTakers, row, "to")});
  }
  return routes;
}

std::string fault_of_named(const Rows& rows, const Rows& routes) {
  const std::string fault = fault_of(rows_of(rows));
  return fault.empty() ? fault_of(routes_of(routes)) : fault;
}

// Replaces the rows of this GPU; without rows the built-in tables apply again.
void set_tuning(std::string name, int64_t family, int64_t cores, const Rows& rows, const Rows& routes,
                std::string provenance) {
  const std::string fault = fault_of_named(rows, routes);
  TORCH_CHECK_VALUE(fault.empty(), "tuned sizes are not legal: ", fault);
  const auto* given =
      new Tuning{std::move(name), family, cores, {rows_of(rows), std::move(provenance), routes_of(routes)}};
  std::lock_guard lock(mutex);
  std::erase_if(tunings(), [&](const Tuning* tuning) { return tuning->same_gpu(*given); });
  tunings().push_back(given);
  known_facts = nullptr;
}

void set_archive_folder([[maybe_unused]] std::string folder) {
#ifdef FATTN_WITH_METAL
  metal::set_archive_folder(folder);
#endif
}

// Returns name, family and cores of this machine's GPU. Raises without one.
std::tuple<std::string, int64_t, int64_t> this_gpu() {
#ifdef FATTN_WITH_METAL
  const DeviceFacts& device = metal::device_facts();
  return {device.name, device.family, device.cores};
#else
  TORCH_CHECK(false, "torch_fattn was built without Metal");
#endif
}

void add_system_and_torch(DeviceFacts& device) {
  utsname system{};
  uname(&system);
  device.macos = macos_of_kernel(system.sysname, system.release);
  device.torch = TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR;
  const char* language = std::getenv("PYTORCH_MPS_METAL_VERSION");
  device.torch_metal4 = language == nullptr || language[0] != '3';
  const char* disabled = std::getenv("PYTORCH_MPS_DISABLE_PREFILL_ATTENTION");
  device.torch_prefill = disabled == nullptr || std::string_view(disabled) == "0";
}

// The versions of macOS and torch in this process, to which tuned routes belong.
std::tuple<int64_t, int64_t> system_and_torch() {
  DeviceFacts device;
  add_system_and_torch(device);
  return {device.macos, device.torch};
}

std::string source_digest() {
#ifdef FATTN_WITH_METAL
  return metal::source_digest();
#else
  return "";
#endif
}

}  // namespace

#ifdef FATTN_WITH_METAL
const DeviceFacts& gpu_facts() {
  const uint64_t verdicts = count_of_verdicts();
  const Facts* known = known_facts.load(std::memory_order_acquire);
  if (known != nullptr && known->verdicts == verdicts) return known->gpu;
  DeviceFacts gpu = metal::device_facts();
  std::lock_guard lock(mutex);
  add_system_and_torch(gpu);
  for (const Tuning* tuning : tunings()) {
    const bool says_something = !tuning->rows.rows.empty() || !tuning->rows.routes.empty();
    if (tuning->same_gpu(gpu) && says_something) gpu.tuned = &tuning->rows;
  }
  add_units_states(gpu);
  const auto* found = new Facts{std::move(gpu), verdicts};  // never freed: callers hold references
  known_facts.store(found, std::memory_order_release);
  return found->gpu;
}
#endif

UnitsState units_state(std::string_view name) {
  for (const UnitsState state :
       {UnitsState::kOff, UnitsState::kUntested, UnitsState::kThreadgroup, UnitsState::kRegisters}) {
    if (name == name_of(state)) return state;
  }
  TORCH_INTERNAL_ASSERT(false, "no state of matrix units: ", name);
}

const DeviceFacts& facts_of([[maybe_unused]] const c10::Device& device) {
#ifdef FATTN_WITH_METAL
  if (device.is_mps()) return gpu_facts();
#endif
  static const DeviceFacts smallest = [] {
    DeviceFacts facts;
    add_system_and_torch(facts);
    return facts;
  }();
  return smallest;
}

TORCH_LIBRARY_FRAGMENT(fattn, library) {
  library.def("_source_digest() -> str", source_digest);
  library.def("_this_gpu() -> (str, int, int)", this_gpu);
  library.def("_set_archive_folder(str folder) -> ()", set_archive_folder);
  library.def("_system_and_torch() -> (int, int)", system_and_torch);
  library.def("_macos_of_kernel(str name, str release) -> int",
              [](std::string name, std::string release) { return int64_t(macos_of_kernel(name, release)); });
  library.def("_tuning_fault(Dict(str, str)[] rows, Dict(str, str)[] routes) -> str", fault_of_named);
  library.def(
      "_set_tuning(str chip, int family, int cores, Dict(str, str)[] rows, Dict(str, str)[] routes, "
      "str provenance) -> ()",
      set_tuning);
}

}  // namespace fattn
