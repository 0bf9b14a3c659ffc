// The MPS stream of each thread: the default stream, or from torch 2.14 on one from a pool of 32.
#include <ATen/mps/MPSStream.h>

#include <array>
#include <atomic>
#include <mutex>

#include "stream.h"
#include "torch_version.h"

namespace at::mps {
namespace {

constexpr int64_t kPoolStreams = 32;

struct Streams {
  std::mutex mutex;
  std::array<std::atomic<MPSStream*>, kPoolStreams + 1> made{};  // by id; 0 is the default one
  std::atomic<int64_t> next{0};
};

Streams& streams() {
  static auto& all = *new Streams;
  return all;
}

MPSStream* stream_of(int64_t id) {
  TORCH_CHECK(id >= 0 && id <= kPoolStreams, "there is no MPS stream ", id,
              ": 0 is the default stream, 1 to ", kPoolStreams, " are those of the pool");
  std::atomic<MPSStream*>& place = streams().made[size_t(id)];
  if (MPSStream* stream = place.load(std::memory_order_acquire)) return stream;
  std::lock_guard lock(streams().mutex);
  if (!place.load(std::memory_order_relaxed)) {
    place.store(new MPSStream(Stream(Stream::UNSAFE, Device(DeviceType::MPS, 0), id)),
                std::memory_order_release);
  }
  return place.load(std::memory_order_relaxed);
}

void synchronize_streams(SyncType type) {
  for (const auto& place : streams().made) {
    MPSStream* stream = place.load(std::memory_order_acquire);
    if (!stream) continue;
    dispatch_sync_with_rethrow(stream->queue(), ^{
      stream->synchronize(type);
    });
  }
}

}  // namespace

MPSStream* MPSStreamImpl::_stream = nullptr;
MPSStream* MPSStreamImpl::getInstance() { return getDefaultMPSStream(); }
MPSStream* getDefaultMPSStream() { return stream_of(0); }

#if SOFTMETAL_TORCH_HAS_STREAMS
namespace {
thread_local MPSStream* g_current = nullptr;
}
MPSStream* getCurrentMPSStream() { return g_current ? g_current : getDefaultMPSStream(); }
void setCurrentMPSStream(MPSStream* stream) { g_current = stream; }
MPSStream* getStreamFromPool() { return stream_of(1 + streams().next++ % kPoolStreams); }
MPSStream* getStreamByID(int64_t id);  // declared in torch's header from 2.15 on
MPSStream* getStreamByID(int64_t id) { return stream_of(id); }
void synchronizeAllMPSStreams(SyncType type) { synchronize_streams(type); }
#else
MPSStream* getCurrentMPSStream() { return getDefaultMPSStream(); }
#endif

}  // namespace at::mps

namespace softmetal {

void synchronize_all_streams(bool wait) {
  at::mps::synchronize_streams(wait ? at::mps::SyncType::COMMIT_AND_WAIT : at::mps::SyncType::COMMIT);
}

c10::Stream current_stream() { return at::mps::getCurrentMPSStream()->unwrap(); }

#if SOFTMETAL_TORCH_HAS_STREAMS
c10::Stream stream_from_pool() { return at::mps::getStreamFromPool()->unwrap(); }

c10::Stream exchange_stream(c10::Stream stream) {
  const c10::Stream previous = current_stream();
  at::mps::setCurrentMPSStream(at::mps::getStreamByID(stream.id()));
  return previous;
}
#else
c10::Stream stream_from_pool() { return current_stream(); }
c10::Stream exchange_stream(c10::Stream) { return current_stream(); }
#endif

}  // namespace softmetal
