// What earlier processes left for the GPU of this one: tuned rows, which are given before anybody has looked
// for a GPU, so that each set comes with the GPU that it was timed on; and the folder of compiled pipelines.
#include "gpu.h"

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/library.h>

#include "plan/supported.h"
#include "plan/tuned.h"

#ifdef FATTN_WITH_METAL
#include "metal/executor.h"
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
// What is given is kept for the life of the process, for plans name where their sizes come from.
std::vector<const Tuning*>& tunings() {
  static auto& all = *new std::vector<const Tuning*>;
  return all;
}
std::atomic<const DeviceFacts*> facts{nullptr};  // null: to be found anew

// A row as numbers, in the order of the members of TunedRow; the first two count these.
constexpr std::array kKernels = {Kernel::kPrefill, Kernel::kPrefillWide, Kernel::kDecode,
                                 Kernel::kDecodeWide};
constexpr std::array kDTypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr size_t kNumbers = 12;
constexpr int64_t kMost[kNumbers] = {kKernels.size() - 1,
                                     kDTypes.size() - 1,
                                     kMaxHeadDim,
                                     kMaxHeadDim,
                                     int64_t(1) << 30,
                                     16,
                                     16,
                                     64,
                                     64,
                                     1,
                                     4096,
                                     64};

std::vector<TunedRow> rows_of(at::IntArrayRef numbers) {
  TORCH_CHECK_VALUE(numbers.size() % kNumbers == 0, "a tuned row is ", kNumbers, " numbers, not ",
                    numbers.size() % kNumbers);
  std::vector<TunedRow> rows;
  for (size_t first = 0; first < numbers.size(); first += kNumbers) {
    const at::IntArrayRef n = numbers.slice(first, kNumbers);
    for (size_t i = 0; i < kNumbers; ++i) {
      TORCH_CHECK_VALUE(n[i] >= 0 && n[i] <= kMost[i], "number ", i, " of tuned row ", rows.size(), " is ",
                        n[i], " and must be between 0 and ", kMost[i]);
    }
    const auto size = [&](size_t i) { return uint16_t(n[i]); };
    rows.push_back({.kernel = kKernels[size_t(n[0])],
                    .dtype = kDTypes[size_t(n[1])],
                    .min_dim = size(2),
                    .max_dim = size(3),
                    .max_length = int32_t(n[4]),
                    .row_fragments = size(5),
                    .row_groups = size(6),
                    .tile_keys = size(7),
                    .simdgroups = size(8),
                    .early_loads = size(9),
                    .least_chunk = size(10),
                    .threadgroups_per_core = size(11)});
  }
  return rows;
}

std::string fault_of_numbers(at::IntArrayRef numbers) { return fault_of(rows_of(numbers)); }

// Replaces what was given for this GPU before; no rows: the built-in tables again.
void set_tuning(std::string name, int64_t family, int64_t cores, at::IntArrayRef numbers,
                std::string provenance) {
  auto rows = rows_of(numbers);
  const std::string fault = fault_of(rows);
  TORCH_CHECK_VALUE(fault.empty(), "tuned sizes are not legal: ", fault);
  const auto* given = new Tuning{std::move(name), family, cores, {std::move(rows), std::move(provenance)}};
  std::lock_guard lock(mutex);
  std::erase_if(tunings(), [&](const Tuning* tuning) { return tuning->same_gpu(*given); });
  tunings().push_back(given);
  facts = nullptr;
}

void set_archive_folder([[maybe_unused]] std::string folder) {
#ifdef FATTN_WITH_METAL
  metal::set_archive_folder(folder);
#endif
}

// Name, family and cores of the GPU of this machine. Raises where there is none.
std::tuple<std::string, int64_t, int64_t> this_gpu() {
#ifdef FATTN_WITH_METAL
  const DeviceFacts& device = metal::device_facts();
  return {device.name, device.family, device.cores};
#else
  TORCH_CHECK(false, "torch_fattn was built without Metal");
#endif
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
  if (const DeviceFacts* known = facts.load(std::memory_order_acquire)) return *known;
  const DeviceFacts& device = metal::device_facts();
  std::lock_guard lock(mutex);
  auto* found = new DeviceFacts(device);  // kept, as callers hold references
  for (const Tuning* tuning : tunings()) {
    if (tuning->same_gpu(device) && !tuning->rows.rows.empty()) found->tuned = &tuning->rows;
  }
  facts.store(found, std::memory_order_release);
  return *found;
}
#endif

TORCH_LIBRARY_FRAGMENT(fattn, library) {
  library.def("_source_digest() -> str", source_digest);
  library.def("_this_gpu() -> (str, int, int)", this_gpu);
  library.def("_set_archive_folder(str folder) -> ()", set_archive_folder);
  library.def("_tuning_fault(int[] rows) -> str", fault_of_numbers);
  library.def("_set_tuning(str chip, int family, int cores, int[] rows, str provenance) -> ()", set_tuning);
}

}  // namespace fattn
