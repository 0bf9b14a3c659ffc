// Gates and routes of csrc/plan, which needs neither torch nor Metal. Prints a line for each
// expectation that does not hold and exits with 1; tests/plan/test_plan_program.py compiles and runs it.
#include <cmath>
#include <cstdio>
#include <string>
#include <string_view>
#include <variant>

#include "plan/check.h"
#include "plan/plan.h"
#include "plan/route.h"
#include "plan/supported.h"
#include "plan/tensor_gate.h"
#include "plan/tuned.h"

namespace {

using namespace fattn;

int failures = 0;

#define EXPECT(condition)                                                    \
  do {                                                                       \
    if (!(condition)) {                                                      \
      ++failures;                                                            \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, place, #condition); \
    }                                                                        \
  } while (false)

DeviceFacts gpu(int family, int cores) {
  DeviceFacts facts;
  facts.family = family;
  facts.cores = cores;
  return facts;
}

// Contiguous, with eight query heads over two key-value heads.
Problem attention(Op op, int64_t q_len, int64_t kv_len, int64_t dim = 64) {
  Problem p;
  p.op = op;
  p.dtype = DType::kFloat16;
  p.batch = 2;
  p.q_heads = 8;
  p.kv_heads = 2;
  p.q_len = q_len;
  p.kv_len = kv_len;
  p.head_dim = p.value_dim = dim;
  p.query = {8 * q_len * dim, q_len * dim, dim};
  p.key = p.value = {2 * kv_len * dim, kv_len * dim, dim};
  p.vector_aligned = true;
  p.is_causal = true;
  p.q_offset = kv_len - q_len;
  p.scale = 1.0 / std::sqrt(double(dim));
  return p;
}

template <typename AnyProblem>
Plan planned(const AnyProblem& problem, const DeviceFacts& facts = {}) {
  const auto result = plan(problem, facts);
  if (const Refusal* refusal = std::get_if<Refusal>(&result)) {
    ++failures;
    std::printf("refused: %s\n", refusal->message.c_str());
    return {};
  }
  return std::get<Plan>(result);
}

bool has(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

void test_explain() {
  const char* place = "explain";
  DeviceFacts device = gpu(8, 10);
  device.name = "a \"GPU\"";
  const std::string text = to_json(planned(attention(Op::kDecode, 1, 32768), device), device);
  EXPECT(has(text, R"("device":{"name":"a \"GPU\"","family":8,"cores":10,)"));
  EXPECT(has(text, R"("kernel":"fattn_decode","source":"decode.metal")"));
}

void test_routes() {
  const char* place = "routes";
  EXPECT(macos_of_kernel("Darwin", "25.2.0") == 2602 && macos_of_kernel("Darwin", "23.6.0") == 1406);
  EXPECT(macos_of_kernel("Linux", "6.1") == 0);
  DeviceFacts m5 = gpu(10, 10);
  m5.macos = 2602;
  m5.torch = 214;
  PlainCall call{.dtype = DType::kFloat16, .q_len = 512, .kv_len = 512, .head_dim = 64, .value_dim = 64};
  EXPECT(torch_way(call, m5) == TorchWay::kTensor && route_of(call, m5, RoutePolicy::kAuto).to_torch);
  EXPECT(!route_of(call, m5, RoutePolicy::kAlways).to_torch);
  m5.torch = 213;
  EXPECT(torch_way(call, m5) == TorchWay::kMatrices && !route_of(call, m5, RoutePolicy::kAuto).to_torch);
}

void test_tensor_gates() {
  const char* place = "gates of tensor operations";
  DeviceFacts m5 = gpu(10, 10);
  m5.macos = 2602;
  m5.metal4 = true;
  m5.architecture = "applegpu_g17g";
  const auto why = [](const DeviceFacts& device, TensorSetting setting = TensorSetting::kAuto) {
    return why_tensors_are_off(device, setting);
  };
  EXPECT(why(m5).empty());
  EXPECT(why(m5, TensorSetting::kOff) == "FATTN_TENSOR=0");

  DeviceFacts other = m5;
  other.macos = 2601;
  EXPECT(why(other) == "macOS 26.1 is not macOS 26.2 or newer");
  EXPECT(!why(other, TensorSetting::kThreadgroup).empty());  // not by hand either
  other.macos = 0;
  EXPECT(why(other) == "this system is not macOS 26.2 or newer");
  EXPECT(why(other, TensorSetting::kRegisters).empty());
  other = m5;
  other.macos = 2700;
  EXPECT(why(other).empty());

  other = m5;
  other.family = 9;
  EXPECT(has(why(other), "this is of Apple family 9") && why(other, TensorSetting::kThreadgroup).empty());
  other = m5;
  other.metal4 = false;
  EXPECT(why(other) == "the GPU does not support Metal 4");
  other = m5;
  for (const char* architecture : {"applegpu_g16s", "applegpu_g17p", "applegpu_g", "g17s", ""}) {
    other.architecture = architecture;
    EXPECT(has(why(other), "the GPU's architecture, '" + std::string(architecture) + "'"));
  }
  for (const char* architecture : {"applegpu_g17s", "applegpu_g18p", "applegpu_g20d"}) {
    other.architecture = architecture;
    EXPECT(why(other).empty());
  }
}

// Prefills in float16 with heads of 65 to 128 were faster on tensor operations.
void test_tensors_before_m5() {
  const char* place = "tensor operations before M5";
  const TunedRow row{.kernel = Kernel::kPrefillTensor,
                     .dtype = DType::kFloat16,
                     .min_dim = 65,
                     .max_dim = 128,
                     .macos = 2602};
  EXPECT(fault_of({row}).empty());
  TunedRow wrong = row;
  wrong.simdgroups = 4;
  EXPECT(has(fault_of({row, wrong}), "row 1: a row of prefill_tensor has no sizes"));

  const TunedRows tuned{.rows = {row}, .provenance = "timed here", .routes = {}};
  DeviceFacts m4 = gpu(9, 10);
  m4.macos = 2602;
  m4.metal4 = true;
  m4.tuned = &tuned;
  const TensorSize timed{DType::kFloat16, 96};
  const auto on = [](TensorSize size, const DeviceFacts& device,
                     TensorSetting setting = TensorSetting::kAuto) {
    return is_decided_by_test(size, device, setting);
  };
  EXPECT(on(timed, m4) && on({DType::kFloat16, 128}, m4));
  EXPECT(!on({DType::kFloat16, 64}, m4) && !on({DType::kBFloat16, 96}, m4));
  EXPECT(!on({DType::kFloat16, 96, true}, m4));  // gradients were not timed
  EXPECT(!on(timed, m4, TensorSetting::kOff) && on({DType::kFloat16, 64}, m4, TensorSetting::kRegisters));

  DeviceFacts other = m4;
  other.family = 10;  // with an older architecture
  EXPECT(on(timed, other) && !on({DType::kFloat16, 64}, other));
  other = m4;
  other.tuned = nullptr;
  EXPECT(!on(timed, other));
  other = m4;
  other.metal4 = false;
  EXPECT(!on(timed, other));
  other = m4;
  other.macos = 2603;
  EXPECT(!on(timed, other));
  TunedRows earlier = tuned;
  earlier.rows[0].macos = other.macos = 2601;
  other.tuned = &earlier;
  EXPECT(!on(timed, other));
}

void test_training_routes() {
  const char* place = "training routes";
  DeviceFacts device = gpu(8, 10);
  TrainingCall call;
  call.dtype = DType::kFloat16;
  call.head_dim = call.value_dim = 64;
  call.batch = 1;
  call.q_heads = 8;
  const auto to_torch = [&](int64_t rows, int64_t keys, TrainingPolicy policy = TrainingPolicy::kAuto) {
    call.q_len = rows;
    call.kv_len = keys;
    return training_route(call, device, policy).to_torch;
  };
  device.working_set_bytes = kTrainingShare * 4 * 8 * 600 * 600;
  EXPECT(bytes_kept_by_torch(call) == 0 && to_torch(600, 599) && !to_torch(600, 600));
  EXPECT(!to_torch(9, 9, TrainingPolicy::kFused) && to_torch(600, 600, TrainingPolicy::kOff));

  TunedRows tuned{.rows = {}, .provenance = "timed here", .routes = {}};
  const auto use = [&](Routed op, bool torch) {
    tuned.routes = {{.op = op,
                     .dtype = DType::kFloat16,
                     .dim = 64,
                     .min_length = 64,
                     .max_length = 512,
                     .macos = 0,
                     .torch = 0,
                     .to_torch = torch}};
  };
  device.tuned = &tuned;
  use(Routed::kTraining, false);
  EXPECT(fault_of(tuned.routes).empty() && !may_go_to_torch(device, RoutePolicy::kAuto));
  EXPECT(!to_torch(64, 64) && to_torch(63, 63) && !to_torch(512, 512) && to_torch(513, 513));
  EXPECT(!to_torch(4096, 77) && !to_torch(64, 4096) && to_torch(4096, 63));  // the fewer of rows and keys
  EXPECT(to_torch(64, 64, TrainingPolicy::kOff));
  (void)to_torch(64, 64);
  EXPECT(std::string_view(training_route(call, device, TrainingPolicy::kAuto).provenance) == "timed here");
  call.is_causal = true;
  EXPECT(to_torch(64, 64));
  use(Routed::kTrainingCausal, false);
  EXPECT(!to_torch(64, 64));
  call.mask_dtype = DType::kBool;
  EXPECT(to_torch(64, 64));
  call.mask_dtype = DType::kOther;
  use(Routed::kPrefill, false);
  EXPECT(to_torch(64, 64));

  use(Routed::kTrainingCausal, true);  // memory is checked first, and plain calls do not read it
  EXPECT(to_torch(64, 64) && !to_torch(64, 6000) && !may_go_to_torch(device, RoutePolicy::kAuto));
  use(Routed::kPrefill, true);
  EXPECT(may_go_to_torch(device, RoutePolicy::kAuto));
  tuned.routes[0].dim = kMaxBackwardHeadDim + 8;
  EXPECT(fault_of(tuned.routes).empty());
  tuned.routes[0].op = Routed::kTraining;
  EXPECT(has(fault_of(tuned.routes), "route 0: the kernels do not support this head size"));
}

}  // namespace

int main() {
  test_explain();
  test_routes();
  test_tensor_gates();
  test_tensors_before_m5();
  test_training_routes();
  return failures == 0 ? 0 : 1;
}
