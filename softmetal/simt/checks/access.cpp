// Where an access goes and whether it may: classification of addresses, bounds, alignment, counts of bytes.
#include <algorithm>

#include "../dispatch.h"
#include "../module.h"
#include "../report.h"
#include "../worker.h"
#include "checker.h"

namespace softmetal {

namespace {

constexpr uintptr_t kNear = 1 << 20;  // how far from a buffer an address still looks like an overrun of it
constexpr size_t kMaxFindings = 32;

uintptr_t distance(uintptr_t address, uintptr_t low, uintptr_t high) {
  return address < low ? low - address : address >= high ? address - high + 1 : 0;
}

template <class T>
bool inside(uintptr_t address, const T* first, size_t count) {
  return address - reinterpret_cast<uintptr_t>(first) < count * sizeof(T);
}

}  // namespace

std::string bytes(uint32_t size) { return std::to_string(size) + (size == 1 ? " byte" : " bytes"); }

Checker::Checker(Dispatch& dispatch) : dispatch_(dispatch) {
  const softmetal_kernel& kernel = *dispatch.launch.kernel;
  const softmetal_arguments& bound = *dispatch.launch.arguments;
  for (uint32_t i = 0; i < kernel.argument_count; i++) {
    const softmetal_argument& a = kernel.arguments[i];
    if (!a.used || a.kind == SOFTMETAL_ARG_THREADGROUP || !bound.buffer[a.index]) continue;
    auto low = reinterpret_cast<uintptr_t>(bound.buffer[a.index]);
    regions_.push_back({low, low + bound.buffer_length[a.index],
                        a.kind == SOFTMETAL_ARG_CONSTANT ? Space::constant : Space::device,
                        a.kind == SOFTMETAL_ARG_DEVICE, a.index, a.name});
  }
  // Slots may alias. Memory that is also bound as device counts as device, and may be written if any slot
  // allows it.
  auto rank = [](const Region& r) { return r.writable ? 0 : r.space == Space::device ? 1 : 2; };
  std::sort(regions_.begin(), regions_.end(), [&](const Region& a, const Region& b) {
    return std::pair(rank(a), a.index) < std::pair(rank(b), b.index);
  });
}

void Checker::begin_threadgroup(Worker& worker) { worker_ = &worker; }

Checker::Place Checker::locate_in_arena(uintptr_t address, uint32_t size) const {
  Place place;
  place.space = Space::threadgroup;
  uint32_t offset = worker_->arena.offset_of(address);
  const auto& arrays = worker_->arena.arrays();
  for (size_t i = 0; i < arrays.size(); i++)
    if (offset >= arrays[i].offset && offset + size <= arrays[i].offset + arrays[i].size) {
      place.valid = place.writable = true;
      place.array = static_cast<int>(i);
    }
  return place;
}

Checker::Place Checker::locate(uintptr_t address, uint32_t size) const {
  if (worker_->arena.contains(address)) return locate_in_arena(address, size);
  for (const Region& r : regions_)
    if (address >= r.low && address + size <= r.high) return {r.space, true, r.writable, &r, -1};
  if (dispatch_.module->contains(address)) return {Space::constant, true, true, nullptr, -1};
  return {Space::other, belongs_to_runtime(address), true, nullptr, -1};
}

// Code of metal_stdlib for the host reads its lane, its operands and the argument table.
bool Checker::belongs_to_runtime(uintptr_t address) const {
  return inside(address, worker_, 1) || inside(address, worker_->groups.data(), worker_->groups.size()) ||
         inside(address, worker_->fibers.data(), worker_->fibers.size()) ||
         inside(address, softmetal_thread_counters(), 1);
}

void Checker::access(Fiber& fiber, uintptr_t address, uint32_t size, bool write, uintptr_t pc) {
  settle();
  Place place = locate(address, size);
  softmetal_counters& counters = *softmetal_thread_counters();
  (write ? counters.bytes_written : counters.bytes_read)[static_cast<int>(place.space)] += size;
  if (place.region) (write ? counters.buffer_written : counters.buffer_read)[place.region->index] += size;
  uint32_t checks = dispatch_.settings.checks;
  pc -= dispatch_.module->base;
  if (checks & SOFTMETAL_CHECK_BOUNDS && (!place.valid || (write && !place.writable)))
    report_stray(fiber, place, address, size, write, pc);
  if (!place.valid || (!place.region && place.array < 0)) return;
  if (checks & (SOFTMETAL_CHECK_RACE | SOFTMETAL_CHECK_UNINIT) && place.space != Space::constant)
    check_order(fiber, place, address, size, write, pc);
}

// Accesses of packed types look like those of vectors to the callbacks, so the compiler checks alignment, by
// type.
void Checker::misaligned(Fiber& fiber, uintptr_t address, uint32_t alignment, uintptr_t pc) {
  Place place = locate(address, 1);
  if (!(dispatch_.settings.checks & SOFTMETAL_CHECK_BOUNDS) || (!place.region && place.array < 0)) return;
  add("misaligned", date(fiber, place.space, pc - dispatch_.module->base), {},
      "access to " + describe(place, address) + ", as a type that is aligned to " + bytes(alignment), "");
  worker_->stop(&fiber);  // vector instructions fault on it
}

// Ends the dispatch: going on would corrupt the host's memory.
void Checker::report_stray(Fiber& fiber, const Place& place, uintptr_t address, uint32_t size, bool write,
                           uintptr_t pc) {
  Access now = date(fiber, place.space, pc);
  if (place.valid)
    add("bounds", now, {},
        "write of " + bytes(size) + " at " + describe(place, address) + ", which is read-only", "");
  else
    add("bounds", now, {}, (write ? "write of " : "read of ") + describe_stray(address, size), "");
  worker_->stop(&fiber);
}

// ---- words

std::string Checker::describe(const Place& place, uintptr_t address) const {
  std::string text = "byte ";
  if (place.array >= 0) {
    const Arena::Array& array = worker_->arena.arrays()[static_cast<size_t>(place.array)];
    return text + std::to_string(worker_->arena.offset_of(address) - array.offset) +
           " of threadgroup array '" + array.name + "'";
  }
  return text + std::to_string(address - place.region->low) + " of buffer " +
         std::to_string(place.region->index) + " '" + place.region->name + "'";
}

// An address in no array or buffer is described by the nearest one.
std::string Checker::describe_stray(uintptr_t address, uint32_t size) const {
  std::string text = bytes(size) + " at byte ";
  if (worker_->arena.contains(address)) {
    uint32_t offset = worker_->arena.offset_of(address);
    const Arena::Array* nearest = nullptr;
    auto gap = [&](const Arena::Array& a) { return distance(offset, a.offset, a.offset + a.size); };
    for (const Arena::Array& a : worker_->arena.arrays())
      if (!nearest || gap(a) < gap(*nearest)) nearest = &a;
    if (!nearest) return bytes(size) + " of threadgroup memory that no array owns";
    return text + std::to_string(int64_t{offset} - nearest->offset) + " of threadgroup array '" +
           nearest->name + "', which has " + bytes(nearest->size);
  }
  const Region* nearest = nullptr;
  for (const Region& r : regions_)
    if (!nearest || distance(address, r.low, r.high) < distance(address, nearest->low, nearest->high))
      nearest = &r;
  if (nearest && distance(address, nearest->low, nearest->high) <= kNear)
    return text + std::to_string(static_cast<int64_t>(address - nearest->low)) + " of buffer " +
           std::to_string(nearest->index) + " '" + nearest->name + "', which has " +
           std::to_string(nearest->high - nearest->low) + " bytes";
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
