#include "route.h"

#include <algorithm>
#include <cstdio>

#include "slices.h"
#include "tuned.h"

namespace fattn {
namespace {

bool is_there(const TorchKernelRow& kernel, const DeviceFacts& device) {
  if (kernel.way == TorchWay::kTensor && !device.torch_metal4) return false;
  const bool is_prefill = kernel.way == TorchWay::kTensor || kernel.way == TorchWay::kMatrices;
  return device.torch >= kernel.min_torch&& device.macos >= kernel.min_macos &&
         (device.torch_prefill || !is_prefill);
}

bool takes(const TorchKernelRow& kernel, const PlainCall& call) {
  if (kernel.way == TorchWay::kScores) return true;
  const bool mask =
      call.mask_dtype == DType::kOther || call.mask_dtype == DType::kBool || call.mask_dtype == call.dtype;
  const bool dim = call.head_dim == call.value_dim &&
                   std::find(kernel.dims.begin(), kernel.dims.end(), call.head_dim) != kernel.dims.end();
  const bool keys = kernel.way == TorchWay::kVector ? call.kv_len >= call.q_len : call.kv_len > 0;
  return mask && dim && keys && call.head_dim > 0 && (kernel.dtypes & set_of(call.dtype)) != 0 &&
         call.q_len >= kernel.min_rows && call.q_len <= kernel.max_rows;
}

bool is_of(const TunedRoute& route, const DeviceFacts& device) {
  return route.macos == device.macos && route.torch == device.torch;
}

const TunedRoute* find(Routed op, int64_t length, const PlainCall& call, const DeviceFacts& device) {
  // Only such calls were timed.
  const bool was_timed = call.mask_dtype == DType::kOther && call.head_dim == call.value_dim;
  if (device.tuned == nullptr || !was_timed) return nullptr;
  for (const TunedRoute& route : device.tuned->routes) {
    if (is_of(route, device) && route.op == op && route.dtype == call.dtype && route.dim == call.head_dim &&
        length >= route.min_length && length <= route.max_length) {
      return &route;
    }
  }
  return nullptr;
}

const TunedRoute* find(const PlainCall& call, const DeviceFacts& device) {
  const bool is_decode = call.q_len == 1 && !call.is_causal;
  return is_decode ? find(Routed::kDecode, call.kv_len, call, device)
                   : find(Routed::kPrefill, call.q_len, call, device);
}

const TunedRoute* find_training(const PlainCall& call, const DeviceFacts& device) {
  return find(call.is_causal ? Routed::kTrainingCausal : Routed::kTraining, std::min(call.q_len, call.kv_len),
              call, device);
}

}  // namespace

TorchWay torch_way(const PlainCall& call, const DeviceFacts& device) {
  for (const TorchKernelRow& kernel : kTorchKernels) {
    if (is_there(kernel, device) && takes(kernel, call)) return kernel.way;
  }
  return kTorchKernels.back().way;
}

Route route_of(const PlainCall& call, const DeviceFacts& device, RoutePolicy policy) {
  if (policy == RoutePolicy::kAlways) return {false, "FATTN_ROUTE=always"};
  if (call.products() > kMaxSlicesInTorch * max_products(device))
    return {false, "torch runs a call in one dispatch, and macOS kills one that is too long"};
  if (const TunedRoute* tuned = find(call, device))
    return {tuned->to_torch, device.tuned->provenance.c_str()};
  const uint8_t way = set_of(torch_way(call, device));
  const auto size = units_size(call.dtype, call.head_dim, call.value_dim);
  const bool on_units = size && is_on(device.units.of(*size));
  for (const RouteRow& row : kRoutes) {
    const bool matches = (row.ways & way) != 0 && device.family >= row.min_family &&
                         (!row.padded || call.is_padded()) && !(row.no_units && on_units) &&
                         call.q_len >= row.min_rows && call.q_len <= row.max_rows &&
                         call.kv_len >= row.min_keys;
    if (matches) return {row.to_torch, row.provenance};
  }
  return {false, kRoutes.back().provenance};
}

bool may_go_to_torch(const DeviceFacts& device, RoutePolicy policy) {
  if (policy == RoutePolicy::kAlways) return false;
  const auto ways = [&](uint8_t set) {
    return std::any_of(kTorchKernels.begin(), kTorchKernels.end(), [&](const TorchKernelRow& kernel) {
      return (set & set_of(kernel.way)) != 0 && is_there(kernel, device);
    });
  };
  return std::any_of(kRoutes.begin(), kRoutes.end(),
                     [&](const RouteRow& row) {
                       return row.to_torch && !row.padded&& device.family >= row.min_family && ways(row.ways);
                     }) ||
         (device.tuned != nullptr &&
          std::any_of(device.tuned->routes.begin(), device.tuned->routes.end(), [&](const TunedRoute& route) {
            return route.to_torch && !is_training(route.op) && is_of(route, device);
          }));
}

int64_t bytes_kept_by_torch(const PlainCall& call) {
  return 4 * call.batch * call.q_heads * call.q_len * call.kv_len;
}

int64_t bytes_kept(const PlainCall& call) {
  return call.batch * call.q_heads * call.q_len * 4 * (1 + call.value_dim);
}

Route training_route(const PlainCall& call, const DeviceFacts& device, TrainingPolicy policy) {
  if (policy == TrainingPolicy::kFused) return {false, "training=\"fused\""};
  if (policy == TrainingPolicy::kOff) return {true, "training=\"off\""};
  if (bytes_kept_by_torch(call) >= device.working_set_bytes / kTrainingFraction)
    return {false, "torch would keep a large matrix"};
  if (const TunedRoute* tuned = find_training(call, device))
    return {tuned->to_torch, device.tuned->provenance.c_str()};
  return {true, "torch may be faster: not timed on this GPU"};
}

int macos_of_kernel(const std::string& name, const std::string& release) {
  int kernel = 0, minor = 0;
  if (name != "Darwin" || std::sscanf(release.c_str(), "%d.%d", &kernel, &minor) != 2) return 0;
  constexpr int kFirstNumberedByYear = 25;  // is macOS 26
  return (kernel >= kFirstNumberedByYear ? kernel + 1 : kernel - 9) * 100 + minor;
}

}  // namespace fattn
