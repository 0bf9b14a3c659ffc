// The epoch detector: the order of two accesses, and the contents of a shadow cell. The rules are in
// checker.h.
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

Access Checker::date(const Fiber& fiber, Space space, uintptr_t pc, uint32_t kind) const {
  const Simdgroup& group = fiber.group();
  bool shared = space == Space::threadgroup;
  Access now;
  now.threadgroup = worker_->threadgroup_index;
  now.epoch = shared ? worker_->threadgroup_epoch : worker_->device_epoch;
  now.simd_epoch = shared ? group.threadgroup_epoch : group.device_epoch;
  now.execution = worker_->execution_epoch;
  now.simd_execution = group.execution_epoch;
  now.pc = static_cast<uint32_t>(pc);
  now.thread = static_cast<uint16_t>(fiber.index);
  now.write = kind & SOFTMETAL_ACCESS_WRITE;
  now.atomic = kind & SOFTMETAL_ACCESS_ATOMIC;
  return now;
}

// Whether `earlier`, which ran first, is ordered before `now` in every run.
bool Checker::ordered(const Access& earlier, const Access& now, Space space) const {
  if (earlier.threadgroup == Access::kNone) return true;
  if (earlier.threadgroup != now.threadgroup) return space == Space::threadgroup;  // not the same memory
  if (earlier.thread == now.thread || earlier.epoch < now.epoch) return true;
  return simdgroup_of(earlier) == simdgroup_of(now) && earlier.simd_epoch < now.simd_epoch;
}

bool Checker::races(const Access& earlier, const Access& now, Space space) const {
  if (ordered(earlier, now, space) || (earlier.atomic && now.atomic) || !(earlier.write || now.write))
    return false;
  // No thread passes a barrier before the earlier reads are done.
  if (earlier.write || earlier.threadgroup != now.threadgroup) return true;
  bool same_simdgroup = simdgroup_of(earlier) == simdgroup_of(now);
  return earlier.execution == now.execution &&
         !(same_simdgroup && earlier.simd_execution < now.simd_execution);
}

// Keeps two accesses that represent all accesses since the last write. An access that is ordered before a
// later one is redundant. With three unordered accesses, the two furthest apart (by threadgroup, else
// simdgroup, else lane) conflict with every writer that the third conflicts with.
void Checker::note(Cell& cell, const Access& now, Space space) const {
  if (ordered(cell.another, now, space)) cell.another = Access{};
  if (ordered(cell.other, now, space)) {
    cell.other = cell.another;
    cell.another = Access{};
  }
  auto distance = [](const Access& a, const Access& b) {
    if (a.threadgroup != b.threadgroup) return 2;
    return simdgroup_of(a) != simdgroup_of(b) ? 1 : 0;
  };
  if (cell.other.threadgroup == Access::kNone)
    cell.other = now;
  else if (cell.another.threadgroup == Access::kNone ||
           distance(cell.other, now) > distance(cell.other, cell.another))
    cell.another = now;
}

void Checker::check_order(const Fiber& fiber, const Place& place, uint32_t size, uint32_t kind,
                          uintptr_t pc) {
  Access now = date(fiber, place.space, pc, kind);
  const bool race_check = dispatch_.settings.checks & SOFTMETAL_CHECK_RACE;
  const bool reads_value = !(kind & SOFTMETAL_ACCESS_COPY) && (!now.write || kind & SOFTMETAL_ACCESS_UPDATE);
  const bool uninit_check =
      dispatch_.settings.checks & SOFTMETAL_CHECK_UNINIT && place.space == Space::threadgroup && reads_value;
  bool uninitialised = false, race = false;
  Access other;
  shadow_.visit(place.real, size, [&](Cell& cell) {
    if (uninit_check && cell.write.threadgroup != now.threadgroup) {
      uninitialised = true;
    } else if (race_check && !uninitialised) {
      for (const Access& earlier : {cell.write, cell.other, cell.another})
        if (!race && races(earlier, now, place.space)) {
          race = true;
          other = earlier;
        }
    }
    if (!now.write) {
      note(cell, now, place.space);
    } else if (now.atomic && cell.write.atomic && !ordered(cell.write, now, place.space)) {
      note(cell, cell.write, place.space);
      cell.write = now;
    } else {
      cell = Cell{now, {}, {}};
    }
  });
  auto word = [](const Access& a) {
    return std::string(a.atomic ? "atomic " : "") + (a.write ? "write" : "read");
  };
  if (uninitialised)
    add("uninitialised", now, {}, "read of " + bytes(size) + " at " + describe(place), "");
  else if (race && now.write && other.write && !now.atomic && !other.atomic &&
           !(kind & SOFTMETAL_ACCESS_LATER))
    hold(place, size, now, other);
  else if (race)
    add("race", now, other, word(now) + " of " + bytes(size) + " at " + describe(place),
        "races with the " + word(other));
}

// Defers a write that conflicts with an earlier write until it has happened.
void Checker::hold(const Place& place, uint32_t size, const Access& now, const Access& other) {
  Pending& held = pending_.emplace_back(Pending{size, {}, now, other, place});
  memcpy(held.before, reinterpret_cast<const void*>(place.real), size);
}

void Checker::settle() {
  for (const Pending& held : pending_)
    if (memcmp(held.before, reinterpret_cast<const void*>(held.place.real), held.size) != 0)
      add("race", held.mine, held.other, "write of " + bytes(held.size) + " at " + describe(held.place),
          "races with the write");
  pending_.clear();
}

}  // namespace softmetal
