// metal::cooperative_tensor: a tile distributed over the lanes of a simdgroup, in 16x16 fragments (row by
// row; tensor_fragments.h), or the reduction of its rows. Every lane holds the same number of elements, and
// all of them are valid.
#pragma once

#include "tensor_fragments.h"
// Needs the names of tensor_fragments.h.
#include "../../msl/common/matmul2d_descriptor.h"
#include "../../simt/abi.h"

namespace softmetal {

// rows x columns elements, columns inner.
template <int rows_, int columns_, typename Operation_>
struct TileLayout {
  static_assert(rows_ % 16 == 0 && columns_ % 16 == 0,
                "a cooperative tensor consists of 16x16 fragments here");
  using Operation = Operation_;
  static constexpr int rows = rows_, columns = columns_, rank = 2, capacity = rows * columns / 32;
  SOFTMETAL_INLINE static int row(int i) {
    return i / 8 / (columns / 16) * 16 + i % 8 / 4 * 8 + int(lane_group());
  }
  SOFTMETAL_INLINE static int column(int i) {
    return i / 8 % (columns / 16) * 16 + int(lane_quad()) * 4 + i % 4;
  }
  // The slot of the lane's row in a reduction of the rows.
  static constexpr int row_slot(int i) { return i / 8 / (columns / 16) * 2 + i % 8 / 4; }
};

// One element per row of a tile; four lanes hold each.
template <int rows_, typename Operation_>
struct RowLayout {
  using Operation = Operation_;
  static constexpr int rows = rows_, rank = 1, capacity = rows / 8;
  SOFTMETAL_INLINE static int row(int i) { return i * 8 + int(lane_group()); }
};

template <uint32_t role, int rows, int columns, int threads, typename Operation>
using TensorLayout = std::conditional_t<role == SOFTMETAL_TENSOR_ROW_REDUCTION, RowLayout<rows, Operation>,
                                        TileLayout<rows, columns, Operation>>;

// Whether both layouts hold the same elements in the same slots.
template <typename A, typename B>
SOFTMETAL_INLINE constexpr bool have_same_elements() {
  return A::rows == B::rows && A::columns == B::columns;
}

struct SameElements {};

}  // namespace softmetal

namespace metal {

template <typename T, typename Extents, typename Layout>
class cooperative_tensor {
 public:
  using element_type = T;
  using value_type = T;
  using layout = Layout;
  T elements[Layout::capacity];

  SOFTMETAL_INLINE cooperative_tensor() {}
  template <typename Source>
  SOFTMETAL_INLINE cooperative_tensor(softmetal::SameElements, const Source& source) {
    static_assert(softmetal::have_same_elements<typename Source::layout, Layout>(),
                  "the source is not the tile that the product takes");
#pragma unroll
    for (int i = 0; i < Layout::capacity; ++i) elements[i] = source.elements[i];
  }
  cooperative_tensor(const cooperative_tensor&) = delete;
  cooperative_tensor& operator=(const cooperative_tensor&) = delete;

  SOFTMETAL_INLINE static constexpr int get_rank() { return Layout::rank; }
  SOFTMETAL_INLINE static constexpr ushort get_capacity() { return Layout::capacity; }
  SOFTMETAL_INLINE static constexpr bool is_valid_element(int i) { return i >= 0 && i < Layout::capacity; }
  SOFTMETAL_INLINE T& operator[](int i) { return elements[i]; }
  SOFTMETAL_INLINE const T& operator[](int i) const { return elements[i]; }
  SOFTMETAL_INLINE T get(int i) const { return elements[i]; }
  SOFTMETAL_INLINE void set(int i, T value) { elements[i] = value; }
  SOFTMETAL_INLINE array<int, Layout::rank> get_multidimensional_index(int i) const {
    if constexpr (Layout::rank == 2) {
      return {Layout::column(i), Layout::row(i)};
    } else {
      return {Layout::row(i)};
    }
  }

  using iterator = softmetal::TensorIterator<cooperative_tensor, T>;
  using const_iterator = softmetal::TensorIterator<const cooperative_tensor, const T>;
  SOFTMETAL_INLINE iterator begin() { return {this, 0}; }
  SOFTMETAL_INLINE iterator end() { return {this, Layout::capacity}; }
  SOFTMETAL_INLINE const_iterator begin() const { return {this, 0}; }
  SOFTMETAL_INLINE const_iterator end() const { return {this, Layout::capacity}; }
  // This reduction's element for the row of the other's element.
  template <typename Other>
  SOFTMETAL_INLINE iterator map_iterator(Other other) {
    using Source = std::remove_cv_t<typename Other::tensor_type>;
    static_assert(Layout::rank == 1 && Source::layout::rank == 2,
                  "map_iterator maps a tile onto a reduction");
    static_assert(Source::layout::rows == Layout::rows, "the tile and the reduction differ in their rows");
    static_assert(std::is_same_v<typename Source::value_type, T>, "their element types differ");
    return {this, Source::layout::row_slot(other.slot)};
  }

  // Within the tensor's extents; elements outside are zero.
  template <typename Memory>
  SOFTMETAL_INLINE void load(const Memory& memory) {
    static_assert(std::is_same_v<typename Memory::value_type, T>, "load does not convert");
#pragma unroll
    for (int i = 0; i < Layout::capacity; ++i) {
      const T* place = element_of(memory, i);
      elements[i] = place ? *place : T(0);
    }
  }
  template <typename Memory>
  SOFTMETAL_INLINE void store(const Memory& memory) const {
    static_assert(std::is_same_v<typename Memory::value_type, T>, "store does not convert");
#pragma unroll
    for (int i = 0; i < Layout::capacity; ++i) {
      if (T* place = element_of(memory, i)) *place = elements[i];
    }
  }

 private:
  template <typename Memory>
  SOFTMETAL_INLINE T* element_of(const Memory& memory, int i) const {
    static_assert(Memory::dimensions == Layout::rank, "the tensors differ in rank");
    const auto at = get_multidimensional_index(i);
    long offset = 0;
    bool is_inside = true;
#pragma unroll
    for (int d = 0; d < Layout::rank; ++d) {
      is_inside = is_inside && at[d] < memory.sizes[d];
      offset += at[d] * memory.strides[d];
    }
    return is_inside ? memory.data + offset : nullptr;
  }
};

}  // namespace metal

namespace softmetal {

template <typename T>
constexpr bool is_cooperative_v = false;
template <typename T, typename Extents, typename Layout>
constexpr bool is_cooperative_v<metal::cooperative_tensor<T, Extents, Layout>> = true;

}  // namespace softmetal
