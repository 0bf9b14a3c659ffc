// Routes calls of torch's scaled_dot_product_attention to our ops if they compute the same.
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
  bool token_major_out = false;  // even if query is not
};

// kAbove: autograd has already run, so gradients need no check.
enum class Autograd { kAbove, kHere };

// Returns the result and counts the call, or returns none and counts the reason.
std::optional<at::Tensor> routed_sdpa(const SdpaCall& call, Autograd autograd, Reason& reason);

// "query [1, 8, 128, 64] float32, ..." for the report.
std::string text_of(const SdpaCall& call);

// During its lifetime, the next call of torch's op in this thread runs in torch, without another decision.
class NextSdpaGoesToTorch {
 public:
  NextSdpaGoesToTorch();
  ~NextSdpaGoesToTorch();
  NextSdpaGoesToTorch(const NextSdpaGoesToTorch&) = delete;
  NextSdpaGoesToTorch& operator=(const NextSdpaGoesToTorch&) = delete;
  // Returns true once.
  static bool consume();

 private:
  bool before_;
};

}  // namespace fattn
