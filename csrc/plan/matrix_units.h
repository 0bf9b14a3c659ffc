// The matrix units of M5 and later GPUs ("neural accelerators"), which kernels use through Metal 4's tensor
// operations (matmul2d). They multiply several times as fast as simdgroup matrices (published). Apple does
// not document the layout of their operands, so a self-test on the user's machine enables them for each dtype
// and head size.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "problem.h"

namespace fattn {

enum class UnitsState : uint8_t {
  kOff,          // the GPU or the system lacks them, or they failed the self-test
  kUntested,     // the self-test has not run; planned as kOff
  kThreadgroup,  // scores pass through threadgroup memory
  kRegisters,    // scores stay in registers
};
inline bool is_on(UnitsState state) { return state >= UnitsState::kThreadgroup; }
const char* name_of(UnitsState state);

// The first GPUs and system with matrix units.
inline constexpr int kMinUnitsFamily = 10;
inline constexpr int kMinUnitsMacos = 2602;

// Keys and values of multi-head latent attention with absorbed projections. Their kernel has one variant:
// scores pass through threadgroup memory.
inline constexpr uint16_t kLatentKeyDim = 576, kLatentValueDim = 512;
// The head sizes of the kernels, ascending, and the sizes that they pad to the next one.
inline constexpr std::array<uint16_t, 6> kUnitsDims{64, 96, 128, 192, 256, kLatentKeyDim};
inline constexpr std::array<uint16_t, 2> kPaddedDims{72, 80};
// The smallest of kUnitsDims that holds the head size; 0 if none does.
uint16_t padded_dim(int64_t dim);

// The self-test has one verdict for each of these: float16 or bfloat16, the padded head size, and forward or
// backward.
struct UnitsSize {
  DType dtype = DType::kFloat16;
  uint16_t dim = 0;
  bool is_backward = false;

  bool is_latent() const { return dim == kLatentKeyDim; }
  uint16_t value_dim() const { return is_latent() ? kLatentValueDim : dim; }
  bool operator==(const UnitsSize&) const = default;
};
std::vector<UnitsSize> all_units_sizes();
const char* call_of(UnitsSize size);  // "prefill" or "backward"
std::string name_of(UnitsSize size);  // "prefill float16 64"

class UnitsStates {
 public:
  UnitsState of(UnitsSize size) const { return states_[index(size)]; }
  void set(UnitsSize size, UnitsState state) { states_[index(size)] = state; }
  void set_all(UnitsState state) { states_.fill(state); }
  bool any() const;  // is not off

 private:
  static size_t index(UnitsSize size);

  std::array<UnitsState, 2 * 2 * kUnitsDims.size()> states_{};
};

// Why calls of these sizes cannot use matrix units on any GPU; null if they can.
const char* why_no_units(DType dtype, int64_t head_dim, int64_t value_dim);
// The same for a call. The planner follows this and the state of the size.
const char* why_no_units(const Problem& problem);
// The size whose state applies; none if why_no_units() has a reason.
std::optional<UnitsSize> units_size(DType dtype, int64_t head_dim, int64_t value_dim);
std::optional<UnitsSize> units_size(const Problem& problem);

// The state of a call's size; off also for calls that cannot use matrix units.
UnitsState units_state(const Problem& problem, const UnitsStates& states);
// The note in explain; "" on a GPU without matrix units.
const char* units_note(const Problem& problem, const UnitsStates& states);

// Whether the call is a step of generation, which never waits for the self-test.
bool is_step(const Problem& problem);

}  // namespace fattn
