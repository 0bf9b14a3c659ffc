// Plans, refusals and explain facts of csrc/plan, which needs neither torch nor Metal. Prints a line for each
// expectation that does not hold and exits with 1; tests/plan/test_plan_program.py compiles and runs it.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numbers>
#include <string>
#include <string_view>
#include <variant>

#include "plan/check.h"
#include "plan/plan.h"
#include "plan/route.h"
#include "plan/supported.h"
#include "selftest/gate.h"
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

template <typename Params>
Params params_of(const Pass& pass) {
  Params params;
  std::memcpy(&params, pass.params.data(), sizeof params);
  return params;
}

bool has(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

// Whether the planner refuses it so, with these words.
template <typename AnyProblem>
bool refuses(const AnyProblem& problem, Refusal::Kind kind, std::string_view words,
             const DeviceFacts& facts = {}) {
  const auto result = plan(problem, facts);
  const Refusal* refusal = std::get_if<Refusal>(&result);
  return refusal != nullptr && refusal->kind == kind && has(refusal->message, words);
}

void test_prefill() {
  const char* place = "prefill";
  const Problem p = attention(Op::kPrefill, 1024, 1024);
  const Plan plan = planned(p);
  EXPECT(plan.pass_count == 1 && plan.scratch_out_floats == 0);
  const Pass& pass = plan.passes[0];
  EXPECT(pass.spec.kernel == Kernel::kPrefill && pass.spec.causal && !pass.spec.split);
  EXPECT(pass.threads[0] == pass.spec.simdgroups * 32u);
  // A tile for each eight rows of each row fragment of each simdgroup.
  const int64_t tile_rows = 8 * pass.spec.row_fragments * pass.spec.simdgroups;
  const int64_t rows = p.q_len * (pass.spec.grouped ? p.q_heads / p.kv_heads : 1);
  const int64_t heads = pass.spec.grouped ? p.kv_heads : p.q_heads;
  EXPECT(pass.groups() == (rows + tile_rows - 1) / tile_rows * heads * p.batch);
  const auto params = params_of<PrefillParams>(pass);
  EXPECT(pass.params_size == sizeof params && params.q_len == 1024 && params.group_size == 4);
  EXPECT(params.score_scale == float(0.125 * std::numbers::log2e));
  EXPECT(params.key.row == 64 && params.query.head == 1024 * 64);

  EXPECT(planned(attention(Op::kPrefill, 1024, 1024, 256)).passes[0].spec.kernel == Kernel::kPrefillWide);
  EXPECT(planned(attention(Op::kPrefill, 0, 1024)).pass_count == 0);

  Problem capped = p;
  capped.options.softcap = 30.0;
  const auto capped_params = params_of<PrefillParams>(planned(capped).passes[0]);
  EXPECT(capped_params.score_scale == float(0.125 / 30.0));
  EXPECT(capped_params.softcap == float(30.0 * std::numbers::log2e));
}

void test_decode() {
  const char* place = "decode";
  const Plan one = planned(attention(Op::kDecode, 1, 64));
  EXPECT(one.pass_count == 1 && one.passes[0].spec.kernel == Kernel::kDecode && !one.passes[0].spec.split);

  const Plan split = planned(attention(Op::kDecode, 1, 32768));
  EXPECT(split.pass_count == 2 && split.passes[0].spec.split);
  EXPECT(split.passes[1].spec.kernel == Kernel::kMerge);
  const auto merge = params_of<MergeParams>(split.passes[1]);
  EXPECT(merge.rows == 2 * 8 && merge.head_dim == 64 && merge.parts > 1);
  EXPECT(split.scratch_out_floats >= merge.rows * merge.parts * 64);
  // More cores want more parts of a sequence.
  const auto larger = params_of<MergeParams>(planned(attention(Op::kDecode, 1, 32768), gpu(9, 40)).passes[1]);
  EXPECT(larger.parts > merge.parts);
}

void test_small_operators() {
  const char* place = "small operators";
  const Plan merge = planned(MergeProblem{.parts = 3, .rows = 7, .head_dim = 64});
  EXPECT(merge.pass_count == 1 && merge.passes[0].grid[0] == 7);
  EXPECT(planned(MergeProblem{.parts = 3, .rows = 0, .head_dim = 64}).pass_count == 0);

  CacheWriteProblem write{.dtype = DType::kFloat16, .tokens = 5, .kv_heads = 2, .num_blocks = 4};
  write.block_size = 16;
  write.key.head_dim = write.value.head_dim = 64;
  const Plan written = planned(write);
  EXPECT(written.passes[0].grid[1] == 2 && params_of<CacheWriteParams>(written.passes[0]).slots == 64);
  write.value_in_key = true;
  EXPECT(planned(write).passes[0].grid[1] == 1);

  const Plan map = planned(MaskMapProblem{.rows = 33, .keys = 65});
  const auto cells = params_of<MaskMapParams>(map.passes[0]);
  EXPECT(cells.row_cells == 3 && cells.key_cells == 3);

  LogitsProblem logits{.rows = 10, .columns = 1000};
  EXPECT(planned(logits).passes[0].spec.kernel == Kernel::kSoftmax);
  logits.op = Op::kSoftcap;
  logits.softcap = 20.0;
  EXPECT(planned(logits).passes[0].spec.kernel == Kernel::kSoftcap);
}

void test_refusals() {
  const char* place = "refusals";
  using Kind = Refusal::Kind;
  EXPECT(refuses(attention(Op::kPrefill, 8, 8, 60), Kind::kValue, "pad query and key with zeros to 64"));
  EXPECT(!refuses(attention(Op::kPrefill, 8, 8, kMaxHeadDim), Kind::kNotImplemented, ""));
  EXPECT(refuses(attention(Op::kPrefill, 8, 8, kMaxHeadDim + 8), Kind::kNotImplemented, "is above 576"));
  EXPECT(refuses(attention(Op::kPrefill, kMaxLength + 1, 8), Kind::kValue, "query length"));
  Problem tree = attention(Op::kDecode, kMaxTreeRows, 64);
  tree.options.tree_mask = true;
  EXPECT(planned(tree).passes[0].spec.kernel == Kernel::kPrefill);
  tree.q_len = kMaxTreeRows + 1;
  EXPECT(refuses(tree, Kind::kNotImplemented, "above 64, the maximum for tree_mask; use an attn_mask"));

  Problem p = attention(Op::kPrefill, 8, 8);
  p.dtype = DType::kInt8;
  EXPECT(refuses(p, Kind::kType, "use float32, float16 or bfloat16"));
  p = attention(Op::kPrefill, 8, 8);
  p.kv_heads = 3;
  EXPECT(refuses(p, Kind::kValue, "8 query heads cannot share 3 key-value heads"));
  p = attention(Op::kPrefill, 8, 8);
  p.options.window_left = -2;
  EXPECT(refuses(p, Kind::kValue, "fattn.prefill: window_left -2 is negative"));
  p.options = {};
  p.options.softcap = -1.0;
  EXPECT(refuses(p, Kind::kValue, "softcap -1 is not a finite number >= 0"));
  EXPECT(refuses(attention(Op::kPrefill, 8, 8), Kind::kNotImplemented, "", gpu(kMinFamily - 1, 8)));
  EXPECT(!refuses(attention(Op::kPrefill, 8, 8), Kind::kNotImplemented, "", gpu(kMinFamily, 8)));
  EXPECT(refuses(MergeProblem{.parts = 0, .rows = 1, .head_dim = 8}, Kind::kValue, "leave nothing to merge"));
}

void test_explain() {
  const char* place = "explain";
  DeviceFacts device = gpu(8, 10);
  device.name = "a \"GPU\"";
  const std::string text = to_json(planned(attention(Op::kDecode, 1, 32768), device), device);
  EXPECT(has(text, R"("device":{"name":"a \"GPU\"","family":8,"cores":10,)"));
  EXPECT(has(text, R"("kernel":"fattn_decode","source":"decode.metal")"));
  EXPECT(has(text, R"("kernel":"fattn_merge","source":"merge.metal")"));
  EXPECT(has(text, R"("tuning":"16-bit, D <= 96: 32 keys per step)"));
  EXPECT(has(text, R"("FATTN_TILE_KEYS":"32")"));
  EXPECT(!has(text, R"("scratch_bytes":0,)"));
  EXPECT(has(to_json(planned(attention(Op::kDecode, 1, 64)), device), R"("scratch_bytes":0,)"));
}

void test_tuned_rows() {
  const char* place = "tuned rows";
  const TunedRow row{.kernel = Kernel::kDecode,
                     .dtype = DType::kFloat16,
                     .min_dim = 8,
                     .max_dim = 128,
                     .tile_keys = 16,
                     .simdgroups = 4,
                     .least_chunk = 192,
                     .threadgroups_per_core = 2};
  EXPECT(fault_of({row}).empty());
  TunedRow wrong = row;
  wrong.tile_keys = 24;
  EXPECT(has(fault_of({row, wrong}), "row 1: tile_keys"));
  const TunedRows tuned{.rows = {row}, .provenance = "timed here"};
  DeviceFacts device;
  device.tuned = &tuned;
  const Plan plan = planned(attention(Op::kDecode, 1, 4096), device);
  EXPECT(std::string_view(plan.tuning) == "timed here" && plan.passes[0].spec.tile_keys == 16);
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
  const auto why = [](const DeviceFacts& device, UnitsSetting setting = UnitsSetting::kAuto) {
    return why_units_are_off(device, setting);
  };
  EXPECT(why(m5).empty());
  EXPECT(why(m5, UnitsSetting::kOff) == "FATTN_TENSOR=0");

  DeviceFacts other = m5;
  other.macos = 2601;
  EXPECT(why(other) == "macOS 26.1 is not macOS 26.2 or newer");
  EXPECT(!why(other, UnitsSetting::kThreadgroup).empty());  // not by hand either
  other.macos = 0;
  EXPECT(why(other) == "this system is not macOS 26.2 or newer");
  EXPECT(why(other, UnitsSetting::kRegisters).empty());
  other = m5;
  other.macos = 2700;
  EXPECT(why(other).empty());

  other = m5;
  other.family = 9;
  EXPECT(has(why(other), "this is of Apple family 9") && why(other, UnitsSetting::kThreadgroup).empty());
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
  const UnitsSize timed{DType::kFloat16, 96};
  const auto on = [](UnitsSize size, const DeviceFacts& device, UnitsSetting setting = UnitsSetting::kAuto) {
    return passes_gate(size, device, setting);
  };
  EXPECT(on(timed, m4) && on({DType::kFloat16, 128}, m4));
  EXPECT(!on({DType::kFloat16, 64}, m4) && !on({DType::kBFloat16, 96}, m4));
  EXPECT(!on({DType::kFloat16, 96, true}, m4));  // gradients were not timed
  EXPECT(!on(timed, m4, UnitsSetting::kOff) && on({DType::kFloat16, 64}, m4, UnitsSetting::kRegisters));

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

  use(Routed::kTrainingCausal, true);  // memory decides first, and plain calls do not read it
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
  test_prefill();
  test_decode();
  test_small_operators();
  test_refusals();
  test_explain();
  test_tuned_rows();
  test_routes();
  test_tensor_gates();
  test_tensors_before_m5();
  test_training_routes();
  return failures == 0 ? 0 : 1;
}
