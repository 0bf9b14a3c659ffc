// <metal_logging>, from Metal 3.2 on: messages are discarded, as without an MTLLogState.
#pragma once
#pragma clang system_header
#include "types.h"

#if __METAL_VERSION__ >= 320
namespace metal {
class os_log {
 public:
  os_log() = default;
  SOFTMETAL_INLINE constexpr os_log(SOFTMETAL_CONSTANT char*, SOFTMETAL_CONSTANT char*) {}
#define SOFTMETAL_LOG(NAME) \
  template <class... A>     \
  SOFTMETAL_INLINE void NAME(SOFTMETAL_CONSTANT char*, A...) const {}
  SOFTMETAL_LOG(log)
  SOFTMETAL_LOG(log_debug)
  SOFTMETAL_LOG(log_info)
  SOFTMETAL_LOG(log_error)
  SOFTMETAL_LOG(log_fault)
#undef SOFTMETAL_LOG
};
constexpr os_log os_log_default;
}  // namespace metal
#endif
