#include "tensor_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

namespace fattn {
namespace {

using at::Tensor;

constexpr int64_t kGuardBytes = 4096;

template <typename T>
void store(uint8_t* to, T value) {
  std::memcpy(to, &value, sizeof value);
}
template <typename T>
double load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return double(value);
}

}  // namespace

Place Memory::add(at::ScalarType type, std::vector<int64_t> sizes, std::vector<int64_t> strides) {
  Place place{type, std::move(sizes), std::move(strides), int64_t(bytes_.size()) + kGuardBytes};
  bytes_.resize(size_t(place.byte + (place.bytes() + 255) / 256 * 256 + kGuardBytes), 0xff);
  return place;
}

void Memory::set(const Place& place, int64_t element, double value) {
  uint8_t* to = bytes_.data() + place.byte + element * int64_t(c10::elementSize(place.type));
  switch (place.type) {
    case at::kHalf:
      return store(to, c10::Half(float(value)));
    case at::kBFloat16:
      return store(to, c10::BFloat16(float(value)));
    case at::kFloat:
      return store(to, float(value));
    case at::kInt:
      return store(to, int32_t(value));
    case at::kLong:
      return store(to, int64_t(value));
    default:  // bool, bytes
      return store(to, uint8_t(value));
  }
}

double Memory::get(const Place& place, int64_t element) const {
  const uint8_t* from = bytes_.data() + place.byte + element * int64_t(c10::elementSize(place.type));
  if (place.type == at::kFloat) return load<float>(from);
  return place.type == at::kHalf ? load<c10::Half>(from) : load<c10::BFloat16>(from);
}

bool Memory::is_guarded(const Place& place) const {
  const auto is_kept = [&](int64_t begin, int64_t end) {
    return std::all_of(bytes_.begin() + begin, bytes_.begin() + end, [](uint8_t b) { return b == 0xff; });
  };
  const int64_t end = place.byte + place.bytes();
  return is_kept(place.byte - kGuardBytes, place.byte) && is_kept(end, end + kGuardBytes);
}

void Memory::upload() {
  device_ = at::empty({int64_t(bytes_.size())}, at::device(at::kMPS).dtype(at::kByte));
  device_.copy_(at::from_blob(bytes_.data(), {int64_t(bytes_.size())}, at::kByte));
}

void Memory::download() { at::from_blob(bytes_.data(), {int64_t(bytes_.size())}, at::kByte).copy_(device_); }

Tensor Memory::on_device(const Place& place) const {
  const int64_t offset = place.byte / int64_t(c10::elementSize(place.type));
  return device_.view(place.type).as_strided(place.sizes, place.strides, offset);
}

}  // namespace fattn
