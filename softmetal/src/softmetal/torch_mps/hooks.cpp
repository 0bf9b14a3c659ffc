// torch's interface of a device type: the guard, and the hooks behind torch.mps.* and torch::mps::*.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "../framework/host.h"
#include "../framework/memory.h"
#include "../framework/validation.h"
#include "allocator.h"
#include "generator.h"
#include "stream.h"

namespace softmetal {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

const Device kDevice(c10::DeviceType::MPS, 0);
constexpr unsigned kMacOSMajor = 15, kMacOSMinor = 2;  // the release that softmetal's Metal corresponds to

void synchronize_device() {
  finish_streams();
  raise_deferred_violations();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::MPS;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return static_type; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.is_mps(), "Expected a MPS device, but got ", device);
  }
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return current_stream(); }
  Stream getNewStream(Device, int) const override { return stream_from_pool(); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream exchangeStream(Stream stream) const override { return exchange_stream(stream); }
  DeviceIndex deviceCount() const noexcept override { return 1; }

  // A recorded event has already happened, because recording runs the streams.
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override { finish_streams(); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { finish_streams(); }
  bool queryStream(const Stream&) const override {
    finish_streams();
    return true;
  }
  void synchronizeStream(const Stream&) const override { synchronize_device(); }
  void synchronizeDevice(DeviceIndex) const override { synchronize_device(); }
};
C10_REGISTER_GUARD_IMPL(MPS, Guard)

class Events {  // the recording times of torch.mps.Event
 public:
  uint32_t acquire() {
    std::lock_guard lock(mutex_);
    times_[++last_] = {};
    return last_;
  }
  void release(uint32_t id) {
    std::lock_guard lock(mutex_);
    times_.erase(id);
  }
  void record(uint32_t id) {
    finish_streams();
    std::lock_guard lock(mutex_);
    times_[id] = Clock::now();
  }
  double milliseconds(uint32_t start, uint32_t end) {
    std::lock_guard lock(mutex_);
    return std::chrono::duration<double, std::milli>(times_.at(end) - times_.at(start)).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  std::mutex mutex_;
  std::map<uint32_t, Clock::time_point> times_;
  uint32_t last_ = 0;
};
Events& events() {
  static Events instance;
  return instance;
}

// A program linked against this library loads it even with SOFTMETAL=0, which only affects `import torch`.
bool switched_off() {
  const char* value = std::getenv("SOFTMETAL");
  return value && std::strcmp(value, "0") == 0;
}

struct MPSHooks final : at::MPSHooksInterface {
  void init() const override {}
  bool hasMPS() const override { return !switched_off(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return hasMPS(); }
  bool isOnMacOSorNewer(unsigned major, unsigned minor) const override {
    return major < kMacOSMajor || (major == kMacOSMajor && minor <= kMacOSMinor);
  }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return kDevice; }

  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return new_generator(); }

  void deviceSynchronize() const override { synchronize_device(); }
  void commitStream() const override { commit_streams(); }
  void* getCommandBuffer() const override { return stream_command_buffer(); }
  void* getDispatchQueue() const override { return stream_dispatch_queue(); }

  at::Allocator* getMPSDeviceAllocator() const override { return allocator(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  void emptyCache() const override { drop_cached_blocks(); }
  size_t getCurrentAllocatedMemory() const override { return allocated_bytes(); }
  size_t getDriverAllocatedMemory() const override { return allocated_bytes() + cached_bytes(); }
  size_t getRecommendedMaxMemory() const override { return device_memory(); }
  size_t getMaxBufferLength() const override { return device_memory(); }
  void setMemoryFraction(double) const override {}  // the operating system limits memory here

  uint32_t acquireEvent(bool) const override { return events().acquire(); }
  void releaseEvent(uint32_t id) const override { events().release(id); }
  void recordEvent(uint32_t id) const override { events().record(id); }
  void waitForEvent(uint32_t) const override {}
  void synchronizeEvent(uint32_t) const override { synchronize_device(); }
  bool queryEvent(uint32_t) const override { return true; }
  double elapsedTimeOfEvents(uint32_t start, uint32_t end) const override {
    return events().milliseconds(start, end);
  }
};

// A torch built for CUDA, like the default wheels for Linux, counts CUDA as an accelerator and refuses a
// second one. If it finds no GPU, its existing hooks get the virtual table of a torch without CUDA, and so
// its answers.
const bool g_without_cuda = [] {
  at::CUDAHooksInterface& hooks = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  static const at::CUDAHooksInterface none;
  if (hooks.hasCUDA()) return false;
  std::memcpy(static_cast<void*>(&hooks), static_cast<const void*>(&none), sizeof(void*));
  return true;
}();

}  // namespace
}  // namespace softmetal

namespace at {
using softmetal::MPSHooks;
REGISTER_MPS_HOOKS(MPSHooks)
}  // namespace at
