// Classifies accesses by address, checks bounds and alignment, and counts bytes.
#include <algorithm>

#include "../dispatch.h"
#include "../module.h"
#include "../report.h"
#include "../worker.h"
#include "checker.h"

namespace softmetal {

namespace {

constexpr uintptr_t kNear = 1 << 20;  // below, an address is an offset from a null pointer
constexpr size_t kMaxFindings = 32;
constexpr uint32_t kPiece = 16;  // bytes per entry of the detector

// Addresses of buffers, described in checker.h. Addresses that begin with 01 exist on no machine.
constexpr int kRangeShift = 48;
constexpr uintptr_t kFirst = uintptr_t{1} << 62, kMiddle = uintptr_t{1} << 47, kPage = 4096;

uintptr_t distance(uintptr_t address, uintptr_t low, uintptr_t high) {
  return address < low ? low - address : address >= high ? address - high + 1 : 0;
}

template <class T>
bool inside(uintptr_t address, const T* first, size_t count) {
  return address - reinterpret_cast<uintptr_t>(first) < count * sizeof(T);
}

}  // namespace

std::string bytes(uint64_t size) { return std::to_string(size) + (size == 1 ? " byte" : " bytes"); }

Checker::Checker(Dispatch& dispatch)
    : dispatch_(dispatch),
      private_(dispatch.launch.threads.x * dispatch.launch.threads.y * dispatch.launch.threads.z) {
  const softmetal_kernel& kernel = *dispatch.launch.kernel;
  const softmetal_arguments& bound = *dispatch.launch.arguments;
  for (uint32_t i = 0; i < kernel.argument_count; i++) {
    const softmetal_argument& a = kernel.arguments[i];
    if (!a.used || a.kind == SOFTMETAL_ARG_THREADGROUP || !bound.buffer[a.index]) continue;
    regions_[a.index] = {reinterpret_cast<uintptr_t>(bound.buffer[a.index]),
                         bound.buffer_length[a.index],
                         a.kind == SOFTMETAL_ARG_CONSTANT ? Space::constant : Space::device,
                         a.kind == SOFTMETAL_ARG_DEVICE,
                         a.index,
                         a.name};
  }
  for (Region& r : regions_) {
    if (!r.name) continue;
    r.range = r.index;
    r.first = r.low;
    for (const Region& other : regions_) {
      if (&other == &r || !shares_range(r, other)) continue;
      r.is_shared = true;
      r.writable = r.writable || other.writable;
      r.range = std::min(r.range, other.index);
      r.first = std::min(r.first, other.low);
    }
  }
}

// A slot is bound to its buffer from an offset to the end.
bool Checker::shares_range(const Region& a, const Region& b) {
  return a.name && b.name && a.low + a.size == b.low + b.size;
}

// Keeps the buffer's alignment.
uintptr_t Checker::seen_as(const Region& r) const {
  return kFirst + (uintptr_t{r.range} << kRangeShift) + kMiddle + r.first % kPage + (r.low - r.first);
}

void Checker::rename(softmetal_arguments& arguments) const {
  for (const Region& r : regions_)
    if (r.name) arguments.buffer[r.index] = reinterpret_cast<void*>(seen_as(r));
}

// The slot that an address belongs to: the last one whose binding begins before it.
const Checker::Region* Checker::nearest(uint32_t range, uintptr_t address) const {
  if (!regions_[range].is_shared) return &regions_[range];
  const Region* found = nullptr;
  for (const Region& r : regions_) {
    if (!r.name || r.range != range) continue;
    const bool is_behind = seen_as(r) <= address;
    if (!found || (is_behind ? seen_as(*found) > address || r.low > found->low : r.low < found->low))
      found = &r;
  }
  return found;
}

void Checker::begin_threadgroup(Worker& worker) {
  worker_ = &worker;
  footprint_.clear();
}

Checker::Place Checker::locate_in_arena(uintptr_t address, uint64_t size) const {
  Place place;
  place.space = Space::threadgroup;
  place.real = address;
  uint32_t offset = worker_->arena.offset_of(address);
  const auto& arrays = worker_->arena.arrays();
  for (size_t i = 0; i < arrays.size(); i++)
    if (offset >= arrays[i].offset && offset + size <= arrays[i].offset + arrays[i].size) {
      place.valid = place.writable = true;
      place.array = static_cast<int>(i);
      place.offset = offset - arrays[i].offset;
    }
  return place;
}

Checker::Place Checker::locate(uintptr_t address, uint64_t size) const {
  if (worker_->arena.contains(address)) return locate_in_arena(address, size);
  const uintptr_t range = (address - kFirst) >> kRangeShift;
  if (address >= kFirst && range < SOFTMETAL_MAX_BUFFERS && regions_[range].name) {
    const Region& r = *nearest(static_cast<uint32_t>(range), address);
    const auto offset = static_cast<int64_t>(address - seen_as(r));
    const bool valid = offset >= 0 && static_cast<uint64_t>(offset) + size <= r.size;
    return {r.space, valid, r.writable, &r, -1, offset, r.low + static_cast<uintptr_t>(offset)};
  }
  if (dispatch_.module->contains(address)) return {Space::constant, true, true, nullptr, -1, 0, address};
  return {Space::other, belongs_to_runtime(address), true, nullptr, -1, 0, address};
}

// The host's metal_stdlib reads its lane, its operands and the argument table.
bool Checker::belongs_to_runtime(uintptr_t address) const {
  return inside(address, worker_, 1) || inside(address, worker_->groups.data(), worker_->groups.size()) ||
         inside(address, worker_->fibers.data(), worker_->fibers.size()) ||
         inside(address, softmetal_thread_counters(), 1);
}

void* Checker::access(Fiber& fiber, void* pointer, uint64_t size, uint32_t kind, uintptr_t pc) {
  settle();
  auto address = reinterpret_cast<uintptr_t>(pointer);
  Place place = locate(address, size);
  const bool write = kind & SOFTMETAL_ACCESS_WRITE;
  auto count = [&](bool written) {
    softmetal_counters& counters = *softmetal_thread_counters();
    (written ? counters.bytes_written : counters.bytes_read)[static_cast<int>(place.space)] += size;
    if (place.space == Space::device) (written ? counters.device_stores : counters.device_loads)++;
    if (place.space == Space::threadgroup)
      (written ? counters.threadgroup_stores : counters.threadgroup_loads)++;
    if (place.region) (written ? counters.buffer_written : counters.buffer_read)[place.region->index] += size;
  };
  const bool is_counted = !(kind & SOFTMETAL_ACCESS_AGAIN);
  if (is_counted) count(write);
  if (is_counted && kind & SOFTMETAL_ACCESS_UPDATE) count(false);
  const uint32_t checks = dispatch_.settings.checks;
  const bool read = !write || kind & SOFTMETAL_ACCESS_UPDATE;
  if (checks & SOFTMETAL_COUNT_DISTINCT && read && place.region && place.valid)
    softmetal_thread_counters()->buffer_distinct[place.region->index] += footprint_.add(place.real, size);
  pc -= dispatch_.module->base;
  if (checks & SOFTMETAL_CHECK_BOUNDS) {
    if (!place.valid || (write && !place.writable)) report_stray(fiber, place, address, size, kind, pc);
    require_alignment(fiber, place, uint64_t{1} << (kind >> 8 & 0xff), kind, pc);
  }
  auto* real = reinterpret_cast<void*>(place.real);
  if (!place.valid || (!place.region && place.array < 0)) return real;
  const bool is_written = place.space != Space::constant || place.region->writable;
  if (checks & (SOFTMETAL_CHECK_RACE | SOFTMETAL_CHECK_UNINIT) && is_written)
    for (uint64_t left = size; left;) {
      auto piece = static_cast<uint32_t>(std::min<uint64_t>(left, kPiece));
      check_order(fiber, place, piece, kind, pc);
      place.real += piece;
      place.offset += piece;
      left -= piece;
    }
  return real;
}

void Checker::check_alignment(Fiber& fiber, void* pointer, uint64_t alignment, uintptr_t pc) {
  if (!(dispatch_.settings.checks & SOFTMETAL_CHECK_BOUNDS)) return;
  Place place = locate(reinterpret_cast<uintptr_t>(pointer), 1);
  require_alignment(fiber, place, alignment, 0, pc - dispatch_.module->base);
}

// Ends the dispatch: vector instructions fault.
void Checker::require_alignment(Fiber& fiber, const Place& place, uint64_t alignment, uint32_t kind,
                                uintptr_t pc) {
  if ((!place.region && place.array < 0) || place.real % alignment == 0) return;
  add("misaligned", date(fiber, place.space, pc, kind), {},
      "access to " + describe(place) + ", as a type that is aligned to " + bytes(alignment), "");
  worker_->stop(&fiber);
}

// Ends the dispatch: continuing would corrupt the host's memory.
void Checker::report_stray(Fiber& fiber, const Place& place, uintptr_t address, uint64_t size, uint32_t kind,
                           uintptr_t pc) {
  Access now = date(fiber, place.space, pc, kind);
  if (place.valid)
    add("bounds", now, {}, "write of " + bytes(size) + " at " + describe(place) + ", which is read-only", "");
  else
    add("bounds", now, {}, (now.write ? "write of " : "read of ") + describe_stray(place, address, size), "");
  worker_->stop(&fiber);
}

// ---- words

std::string Checker::describe(const Place& place) const {
  std::string text = "byte " + std::to_string(place.offset) + " of ";
  if (place.array >= 0)
    return text + "threadgroup array '" + worker_->arena.arrays()[static_cast<size_t>(place.array)].name +
           "'";
  return text + "buffer " + std::to_string(place.region->index) + " '" + place.region->name + "'";
}

// Describes an address outside threadgroup arrays by the nearest one.
std::string Checker::describe_stray(const Place& place, uintptr_t address, uint64_t size) const {
  std::string text = bytes(size) + " at byte ";
  if (place.space == Space::threadgroup) {
    uint32_t offset = worker_->arena.offset_of(address);
    const Arena::Array* nearest = nullptr;
    auto gap = [&](const Arena::Array& a) { return distance(offset, a.offset, a.offset + a.size); };
    for (const Arena::Array& a : worker_->arena.arrays())
      if (!nearest || gap(a) < gap(*nearest)) nearest = &a;
    if (!nearest) return bytes(size) + " of threadgroup memory that no array owns";
    return text + std::to_string(int64_t{offset} - nearest->offset) + " of threadgroup array '" +
           nearest->name + "', which has " + bytes(nearest->size);
  }
  if (place.region)
    return bytes(size) + " at " + describe(place) + ", which has " + bytes(place.region->size);
  if (address < kNear)
    return bytes(size) + " through an unbound buffer (byte " + std::to_string(address) + ")";
  return bytes(size) + " outside every buffer";
}

std::string Checker::who(const Access& a) const {
  const softmetal_uint3 n = worker_->size, g = worker_->grid;
  softmetal_uint3 thread = {a.thread % n.x, a.thread / n.x % n.y, a.thread / n.x / n.y};
  softmetal_uint3 group = {a.threadgroup % g.x, a.threadgroup / g.x % g.y, a.threadgroup / g.x / g.y};
  return "thread " + to_string(thread) + " of threadgroup " + to_string(group);
}

void Checker::add(const char* kind, const Access& mine, const Access& other, std::string what,
                  std::string joint) {
  if (findings_.size() >= kMaxFindings || !seen_.insert({kind, mine.pc, other.pc}).second) return;
  findings_.push_back({kind, std::move(what), std::move(joint), mine, other});
}

std::vector<std::string> Checker::findings() const {
  std::vector<std::string> lines;
  auto at = [&](const Access& a) {
    return " at " + source_of(dispatch_.module, {dispatch_.module->base + a.pc}) + " by " + who(a);
  };
  for (const Finding& f : findings_) {
    std::string line =
        std::string(f.kind) + ": kernel '" + dispatch_.launch.kernel->name + "': " + f.what + at(f.mine);
    if (!f.joint.empty()) line += " " + f.joint + at(f.other);
    if (std::find(lines.begin(), lines.end(), line) == lines.end()) lines.push_back(line);
  }
  return lines;
}

}  // namespace softmetal
