// The epoch detector: what orders two accesses, and what a shadow cell remembers. The rules are in checker.h.
#include <string.h>

#include "../dispatch.h"
#include "../worker.h"
#include "checker.h"

namespace softmetal {

namespace {

uint32_t simdgroup_of(const Access& a) { return a.thread / SOFTMETAL_SIMD_WIDTH; }

}  // namespace

void Shadow::clear() {
  pages_.clear();
  memset(recent_, 0, sizeof recent_);
}

void Shadow::refine(Page& page, uint32_t boundary) {
  uint32_t shift = boundary & 1 ? 0 : 1;
  std::vector<Cell> finer(kPageBytes >> shift);
  for (size_t i = 0; i < finer.size(); i++) finer[i] = page.cells[i >> (page.shift - shift)];
  page.cells = std::move(finer);
  page.shift = shift;
}

Access Checker::date(const Fiber& fiber, Space space, uintptr_t pc) const {
  const Simdgroup& group = fiber.group();
  bool shared = space == Space::threadgroup;
  Access now;
  now.threadgroup = worker_->threadgroup_index;
  now.epoch = shared ? worker_->threadgroup_epoch : worker_->device_epoch;
  now.simd_epoch = shared ? group.threadgroup_epoch : group.device_epoch;
  now.pc = static_cast<uint32_t>(pc);
  now.thread = static_cast<uint16_t>(fiber.index);
  return now;
}

// Whether `earlier`, which ran first, is also ordered before `now` in every other run.
bool Checker::ordered(const Access& earlier, const Access& now, Space space) const {
  if (earlier.threadgroup == Access::kNone) return true;
  if (earlier.threadgroup != now.threadgroup) return space == Space::threadgroup;  // not the same memory
  if (earlier.thread == now.thread || earlier.epoch < now.epoch) return true;
  return simdgroup_of(earlier) == simdgroup_of(now) && earlier.simd_epoch < now.simd_epoch;
}

// Keeps two reads that stand for all since the last write: a read that is ordered before a later one adds
// nothing to it; of three unordered ones, two that lie furthest apart (threadgroups, else simdgroups, else
// lanes) conflict with every writer that the third conflicts with.
void Checker::note_read(Cell& cell, const Access& now, Space space) const {
  if (ordered(cell.other_read, now, space)) cell.other_read = Access{};
  if (ordered(cell.read, now, space)) {
    cell.read = cell.other_read;
    cell.other_read = Access{};
  }
  auto distance = [](const Access& a, const Access& b) {
    if (a.threadgroup != b.threadgroup) return 2;
    return simdgroup_of(a) != simdgroup_of(b) ? 1 : 0;
  };
  if (cell.read.threadgroup == Access::kNone)
    cell.read = now;
  else if (cell.other_read.threadgroup == Access::kNone ||
           distance(cell.read, now) > distance(cell.read, cell.other_read))
    cell.other_read = now;
}

void Checker::check_order(const Fiber& fiber, const Place& place, uintptr_t address, uint32_t size,
                          bool write, uintptr_t pc) {
  Access now = date(fiber, place.space, pc);
  const bool races = dispatch_.settings.checks & SOFTMETAL_CHECK_RACE;
  const bool uninitialised =
      dispatch_.settings.checks & SOFTMETAL_CHECK_UNINIT && place.space == Space::threadgroup && !write;
  const char* kind = nullptr;
  Access other;
  shadow_.visit(address, size, [&](Cell& cell) {
    if (uninitialised && cell.write.threadgroup != now.threadgroup && !kind) {
      kind = "uninitialised";
    } else if (races && !ordered(cell.write, now, place.space)) {
      if (!kind) other = cell.write;
      kind = "race with a write";
    } else if (races && write && !kind) {
      for (const Access& read : {cell.read, cell.other_read})
        if (!ordered(read, now, place.space)) {
          kind = "race with a read";
          other = read;
        }
    }
    if (write)
      cell = Cell{now, {}, {}};
    else
      note_read(cell, now, place.space);
  });
  if (!kind) return;
  if (!strcmp(kind, "uninitialised"))
    add("uninitialised", now, {}, "read of " + bytes(size) + " at " + describe(place, address), "");
  else if (!strcmp(kind, "race with a read"))
    add("race", now, other, "write of " + bytes(size) + " at " + describe(place, address),
        "races with the read");
  else if (!write)
    add("race", now, other, "read of " + bytes(size) + " at " + describe(place, address),
        "races with the write");
  else
    hold(place, address, size, now, other);
}

// Puts a write that conflicts with an earlier write aside until it has happened.
void Checker::hold(const Place& place, uintptr_t address, uint32_t size, const Access& now,
                   const Access& other) {
  pending_.set = true;
  pending_.place = place;
  pending_.address = address;
  pending_.size = size;
  pending_.mine = now;
  pending_.other = other;
  memcpy(pending_.before, reinterpret_cast<const void*>(address), size);
}

void Checker::settle() {
  if (!pending_.set) return;
  pending_.set = false;
  if (memcmp(pending_.before, reinterpret_cast<const void*>(pending_.address), pending_.size) != 0)
    add("race", pending_.mine, pending_.other,
        "write of " + bytes(pending_.size) + " at " + describe(pending_.place, pending_.address),
        "races with the write");
}

}  // namespace softmetal
