// A call of torch's scaled_dot_product_attention: whether our ops compute what it means, and if so, their
// result.
#pragma once

#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "routing.h"

namespace fattn {

struct SdpaCall {
  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  const std::optional<at::Tensor>& attn_mask;
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  bool enable_gqa;
};

// Where autograd has already been seen to, gradients are not asked about.
enum class Autograd { kAbove, kHere };

// The result, counted as routed; or none, with the reason counted.
std::optional<at::Tensor> routed_sdpa(const SdpaCall& call, Autograd autograd, Reason& reason);

// "query [1, 8, 128, 64] float32, ..." for the report.
std::string text_of(const SdpaCall& call);

// Between these, the next call of torch's op in this thread is not ours to route: it has been decided on.
class NextSdpaIsTorchs {
 public:
  NextSdpaIsTorchs();
  ~NextSdpaIsTorchs();
  NextSdpaIsTorchs(const NextSdpaIsTorchs&) = delete;
  NextSdpaIsTorchs& operator=(const NextSdpaIsTorchs&) = delete;
  // True once.
  static bool consume();

 private:
  bool before_;
};

}  // namespace fattn
