// The layouts of cooperative tensors over threads. Apple does not document them, and GPUs differ, so a kernel
// must query its layout, and is tested under several:
//   m5        16x16 fragments, as MLX's and torch's kernels for M5 address them
//   blocks8   8x8 blocks as in simdgroup_matrix, as torch's kernels for M1 to M4 address them; for a
//             transposed input, blocks of the transposed matrix
//   random:N  a permutation. N % 4 selects the compatibilities:
//     0  nothing: reductions do not map to their source, and a destination is not a left input
//     1  reductions, because every thread holds all of one; a destination is not a left input
//     2  everything: a thread owns parts of the same rows in every tile of that height
//     3  everything, as in 2, but some slots hold no element
// Tiles that a known layout does not divide, and operations of several simdgroups, whose layout is not
// published, deal their elements to the threads in turn.
#include "tensor_layouts.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <tuple>
#include <vector>

namespace softmetal {
namespace {

constexpr int32_t kEmpty = -1;

using Slots = std::vector<std::vector<int32_t>>;  // by thread

class Random {  // splitmix64
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
  }
  template <class T>
  void shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; i--) std::swap(values[i - 1], values[next() % i]);
  }

 private:
  uint64_t state_;
};

std::vector<int32_t> count_up(uint32_t count) {
  std::vector<int32_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

// A tile cut into squares of `side`, row by row. `place` gives the {row, column} of an element of a lane's
// part of a square.
template <class Place>
Slots by_squares(const TensorShape& t, uint32_t side, uint32_t elements, Place place) {
  Slots slots(SOFTMETAL_SIMD_WIDTH);
  for (uint32_t lane = 0; lane < SOFTMETAL_SIMD_WIDTH; lane++)
    for (uint32_t row = 0; row < t.rows; row += side)
      for (uint32_t column = 0; column < t.columns; column += side)
        for (uint32_t i = 0; i < elements; i++) {
          const auto [r, c] = place(lane, i);
          slots[lane].push_back(static_cast<int32_t>((row + r) * t.columns + column + c));
        }
  return slots;
}

std::pair<uint32_t, uint32_t> in_fragment16(uint32_t lane, uint32_t i) {
  const uint32_t quad = lane / 4;
  return {((quad & 4) | (lane / 2 & 3)) + i / 4 * 8, ((quad & 2) | (lane & 1)) * 4 + i % 4};
}
std::pair<uint32_t, uint32_t> in_block8(uint32_t lane, uint32_t i) {
  const uint32_t quad = lane / 4;
  return {(quad & 4) + lane / 2 % 4, (quad & 2) * 2 + lane % 2 * 2 + i};
}

bool is_transposed(uint32_t role) {
  return role == SOFTMETAL_TENSOR_LEFT_TRANSPOSED || role == SOFTMETAL_TENSOR_RIGHT_TRANSPOSED;
}

Slots transposed_blocks(const TensorShape& t) {
  Slots slots = by_squares({t.role, t.columns, t.rows, t.threads}, 8, 2, in_block8);
  const auto rows = static_cast<int32_t>(t.rows), columns = static_cast<int32_t>(t.columns);
  for (auto& mine : slots)
    for (int32_t& at : mine) at = at % rows * columns + at / rows;
  return slots;
}

Slots in_turn(const TensorShape& t, std::vector<int32_t> order) {
  Slots slots(t.threads);
  for (size_t i = 0; i < order.size(); i++) slots[i % t.threads].push_back(order[i]);
  return slots;
}

Slots scattered(const TensorShape& t, uint64_t seed) {
  std::vector<int32_t> order = count_up(t.rows * t.columns);
  order.resize((order.size() + t.threads - 1) / t.threads * t.threads, kEmpty);
  Random(seed * 1000003 + t.role * 7919 + t.rows * 131 + t.columns).shuffle(order);
  return in_turn(t, std::move(order));
}

// Groups of lanes own rows. The assignment depends only on the height.
Slots by_rows(const TensorShape& t, uint64_t seed, bool with_empty_slots) {
  const uint32_t groups = t.rows % 8 == 0 ? 8 : 4;
  const uint32_t lanes = SOFTMETAL_SIMD_WIDTH / groups, rows = t.rows / groups;
  std::vector<int32_t> lane_order = count_up(SOFTMETAL_SIMD_WIDTH), row_order = count_up(t.rows);
  Random of_height(seed * 7 + t.rows), of_tile(seed * 11 + t.rows * 131 + t.columns);
  of_height.shuffle(lane_order);
  of_height.shuffle(row_order);
  uint32_t capacity = (rows * t.columns + lanes - 1) / lanes;
  if (with_empty_slots) capacity += 1 + static_cast<uint32_t>(of_tile.next() % 2);
  Slots slots(SOFTMETAL_SIMD_WIDTH, std::vector<int32_t>(capacity, kEmpty));
  for (uint32_t g = 0; g < groups; g++) {
    // Dealt row by row: each lane holds elements of all rows of its group.
    std::vector<int32_t> elements;
    for (uint32_t r = 0; r < rows; r++) {
      std::vector<int32_t> columns = count_up(t.columns);
      of_tile.shuffle(columns);
      for (int32_t column : columns)
        elements.push_back(row_order[g * rows + r] * static_cast<int32_t>(t.columns) + column);
    }
    for (uint32_t l = 0; l < lanes; l++) {
      const auto count = (static_cast<uint32_t>(elements.size()) - l + lanes - 1) / lanes;
      std::vector<int32_t> own_slots = count_up(with_empty_slots ? capacity : count);
      of_tile.shuffle(own_slots);
      auto& mine = slots[static_cast<size_t>(lane_order[g * lanes + l])];
      for (size_t i = l, n = 0; i < elements.size(); i += lanes, n++)
        mine[static_cast<size_t>(own_slots[n])] = elements[i];
    }
  }
  return slots;
}

Slots place_tile(uint32_t layout, uint64_t seed, const TensorShape& t) {
  auto is_divided_by = [&](uint32_t side) {
    return t.threads == SOFTMETAL_SIMD_WIDTH && t.rows % side == 0 && t.columns % side == 0;
  };
  if (layout == SOFTMETAL_LAYOUT_RANDOM) {
    const bool own_rows = seed % 4 >= 2 && t.threads == SOFTMETAL_SIMD_WIDTH && t.rows % 4 == 0;
    return own_rows ? by_rows(t, seed, seed % 4 == 3) : scattered(t, seed);
  }
  if (layout == SOFTMETAL_LAYOUT_M5 && is_divided_by(16)) return by_squares(t, 16, 8, in_fragment16);
  if (layout == SOFTMETAL_LAYOUT_BLOCKS8 && is_divided_by(8))
    return is_transposed(t.role) ? transposed_blocks(t) : by_squares(t, 8, 2, in_block8);
  return in_turn(t, count_up(t.rows * t.columns));
}

// The rows (or columns) of a tile: each thread holds the rows of its elements, except under layouts that
// match nothing or everything.
Slots place_reduction(uint32_t layout, uint64_t seed, const TensorShape& t) {
  const bool by_row = t.role == SOFTMETAL_TENSOR_ROW_REDUCTION;
  const uint32_t count = by_row ? t.rows : t.columns;
  const bool random = layout == SOFTMETAL_LAYOUT_RANDOM;
  Slots slots(t.threads);
  if (random && seed % 4 == 0) {
    for (uint32_t i = 0; i < count; i++) slots[(i + seed) % t.threads].push_back(static_cast<int32_t>(i));
    return slots;
  }
  if (random && seed % 4 == 1) {
    Random order(seed * 13 + 5);
    for (auto& mine : slots) {
      mine = count_up(count);
      order.shuffle(mine);
    }
    return slots;
  }
  TensorShape tile = t;
  tile.role = SOFTMETAL_TENSOR_DESTINATION;
  const Slots elements = place_tile(layout, seed, tile);
  for (uint32_t thread = 0; thread < t.threads; thread++) {
    std::set<int32_t> held;
    for (int32_t at : elements[thread]) {
      const int32_t columns = static_cast<int32_t>(t.columns);
      const int32_t line = by_row ? at / columns : at % columns;
      if (at != kEmpty && held.insert(line).second) slots[thread].push_back(line);
    }
  }
  return slots;
}

struct Placement : softmetal_tensor_placement {
  explicit Placement(const Slots& slots) {
    capacity = 0;
    for (const auto& mine : slots) capacity = std::max(capacity, static_cast<uint32_t>(mine.size()));
    for (const auto& mine : slots) {
      all.insert(all.end(), mine.begin(), mine.end());
      all.resize(all.size() + capacity - mine.size(), kEmpty);
    }
    at = all.data();
  }
  std::vector<int32_t> all;
};

}  // namespace

const softmetal_tensor_placement* place_tensor(uint32_t layout, uint64_t seed, const TensorShape& t) {
  static std::mutex mutex;
  static auto* known =
      new std::map<std::tuple<uint32_t, uint64_t, uint32_t, uint32_t, uint32_t, uint32_t>, const Placement*>;
  std::lock_guard lock(mutex);
  const Placement*& found = (*known)[{layout, seed, t.role, t.rows, t.columns, t.threads}];
  if (!found) {
    const bool is_reduction = t.role >= SOFTMETAL_TENSOR_ROW_REDUCTION;
    found = new Placement(is_reduction ? place_reduction(layout, seed, t) : place_tile(layout, seed, t));
  }
  return found;
}

const softmetal_tensor_placement* TensorPlaces::find(uint32_t layout, uint64_t seed, const TensorShape& t) {
  const uint32_t hash = t.role * 31 + t.rows * 7 + t.columns * 5 + t.threads;
  Answer& last = answers_[hash % std::size(answers_)];
  if (!last.placement || !(last.shape == t) || last.layout != layout || last.seed != seed)
    last = {layout, seed, t, place_tensor(layout, seed, t)};
  return last.placement;
}

}  // namespace softmetal
