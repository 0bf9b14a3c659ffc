// Binds the arguments of a launch to the parameters of a kernel. One structure holds all arguments: a slot
// per buffer index, with a device pointer or the bytes of a `constant` argument.
#pragma once

#include "simdgroup_matrix.h"
// Needs the names of simdgroup_matrix.h.
#include "../../msl/common/binding.h"

namespace softmetal {

constexpr int kSlots = 31;
constexpr int kSlotBytes = 512;

struct Arguments {
  alignas(16) unsigned char slot[kSlots][kSlotBytes];
};

// `device T*`: the slot holds the pointer.
template <uint slot>
struct DeviceBuffer {
  template <typename Pointer>
  SOFTMETAL_INLINE static Pointer get(const Arguments& arguments) {
    return *reinterpret_cast<const Pointer*>(arguments.slot[slot]);
  }
};

// `constant T&` and `constant T*`: the slot holds the bytes.
template <uint slot>
struct ConstantBytes {
  template <typename Parameter>
  SOFTMETAL_INLINE static Parameter get(const Arguments& arguments) {
    typedef std::remove_pointer_t<std::remove_reference_t<Parameter>> T;
    static_assert(sizeof(T) <= kSlotBytes, "a constant argument has at most 512 bytes here");
    const T* bytes = reinterpret_cast<const T*>(arguments.slot[slot]);
    if constexpr (std::is_pointer_v<Parameter>) {
      return bytes;
    } else {
      return *bytes;
    }
  }
};

struct Length {
  uint index, bytes;
};

// Bytes of the [[threadgroup(index)]] argument; 0 if absent.
template <size_t count>
constexpr uint length_of(uint index, const Length (&lengths)[count]) {
  for (Length one : lengths) {
    if (one.index == index) return one.bytes;
  }
  return 0;
}

// `threadgroup T* [[threadgroup(n)]]`: an array of the bytes that the launch gives for it.
template <uint index, uint bytes>
struct ThreadgroupArgument {
  static_assert(bytes > 0, "threadgroup_memory names no bytes for this [[threadgroup(index)]] argument");
  template <typename Pointer>
  SOFTMETAL_INLINE static Pointer get(const Arguments&) {
    alignas(16) __shared__ unsigned char memory[bytes];
    return reinterpret_cast<Pointer>(memory);
  }
};

// Threads of a threadgroup in Metal's order: x fastest, and lanes permuted within each simdgroup.
SOFTMETAL_INLINE uint linear_thread() {
  const uint cuda = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  return (cuda & ~31u) | metal_lane(cuda & 31u);
}

SOFTMETAL_INLINE metal::uint3 thread_in_threadgroup() {
  const uint linear = linear_thread();
  if (blockDim.x % 32 == 0) {
    return metal::uint3((threadIdx.x & ~31u) | (linear & 31u), threadIdx.y, threadIdx.z);
  }
  return metal::uint3(linear % blockDim.x, linear / blockDim.x % blockDim.y,
                      linear / blockDim.x / blockDim.y);
}

template <typename To>
SOFTMETAL_INLINE To shrunk(metal::uint3 v) {
  if constexpr (Scalar<To>) {
    return To(v.x);
  } else if constexpr (sizeof(To) == 2 * sizeof(To().x)) {
    return To(v.x, v.y);
  } else {
    return To(v.x, v.y, v.z);
  }
}

#define SOFTMETAL_ATTRIBUTE(name, value)                              \
  struct name {                                                       \
    template <typename Parameter>                                     \
    SOFTMETAL_INLINE static Parameter get(const Arguments&) {         \
      return shrunk<std::remove_cv_t<Parameter>>(metal::uint3 value); \
    }                                                                 \
  };
SOFTMETAL_ATTRIBUTE(ThreadgroupPositionInGrid, (blockIdx.x, blockIdx.y, blockIdx.z))
SOFTMETAL_ATTRIBUTE(ThreadgroupsPerGrid, (gridDim.x, gridDim.y, gridDim.z))
SOFTMETAL_ATTRIBUTE(ThreadsPerThreadgroup, (blockDim.x, blockDim.y, blockDim.z))
SOFTMETAL_ATTRIBUTE(ThreadPositionInThreadgroup, (thread_in_threadgroup()))
SOFTMETAL_ATTRIBUTE(ThreadPositionInGrid,
                    (thread_in_threadgroup() + metal::uint3(blockIdx.x, blockIdx.y, blockIdx.z) *
                                                   metal::uint3(blockDim.x, blockDim.y, blockDim.z)))
SOFTMETAL_ATTRIBUTE(ThreadsPerGrid, (gridDim.x * blockDim.x, gridDim.y* blockDim.y, gridDim.z* blockDim.z))
SOFTMETAL_ATTRIBUTE(ThreadIndexInThreadgroup, (linear_thread()))
SOFTMETAL_ATTRIBUTE(ThreadIndexInSimdgroup, (linear_thread() & 31u))
// The value of lane 0 is uniform in the warp for the compiler, and so are branches on it.
SOFTMETAL_ATTRIBUTE(SimdgroupIndexInThreadgroup, (__shfl_sync(kAllLanes, linear_thread() >> 5, 0)))
SOFTMETAL_ATTRIBUTE(SimdgroupsPerThreadgroup, ((blockDim.x * blockDim.y * blockDim.z + 31) / 32))
SOFTMETAL_ATTRIBUTE(ThreadsPerSimdgroup, (32u))
#undef SOFTMETAL_ATTRIBUTE

template <auto kernel>
struct Entry;

template <typename... Parameters, void (*kernel)(Parameters...)>
struct Entry<kernel> {
  template <typename... Bindings>
  SOFTMETAL_INLINE static void run(const Arguments& arguments, Bindings...) {
    kernel(Bindings::template get<Parameters>(arguments)...);
  }
};

}  // namespace softmetal
