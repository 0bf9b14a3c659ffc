// <metal_cooperative_tensor>: tensors distributed over the threads of an operation. The runtime assigns
// elements to threads (simt/tensor_layouts.cpp). From MSL 4.0 on.
//
// A new tensor holds bytes of ones, NaN in every float type, and all its elements are uninitialised for the
// uninit check.
#pragma once
#pragma clang system_header
#include "simdgroup.h"
#include "texture.h"

#if __METAL_VERSION__ >= 400
#include "../common/tensor.h"

namespace metal {
template <class T, class Extents, class... Tags>
struct tensor<T, Extents, tensor_handle, Tags...> : tensor<T, Extents, tensor_inline>, softmetal::Handle {};
}  // namespace metal

namespace softmetal {

// The role of a cooperative tensor in an operation, and its tile. Apple's reductions compare `Operation_`: a
// descriptor and the types of its operands.
template <uint32_t role_, int rows_, int columns_, int threads_, class Operation_>
struct TensorLayout {
  using Operation = Operation_;
  static constexpr uint32_t role = role_;
  static constexpr int rows = rows_, columns = columns_, threads = threads_;  // of the tile
  static constexpr bool of_rows = role == SOFTMETAL_TENSOR_ROW_REDUCTION;
  static constexpr bool is_reduction = of_rows || role == SOFTMETAL_TENSOR_COLUMN_REDUCTION;
  static constexpr int rank = is_reduction ? 1 : 2;
  static constexpr int lines = of_rows ? rows : columns;  // elements of a reduction
  // Room for tiles that do not divide evenly, and for slots without an element. Iterators past the end read
  // the last slot, which is never used.
  static constexpr int share = (rows * columns + threads - 1) / threads;
  static constexpr int slots = (is_reduction ? lines : share + share / 2 + 2) + 1;

  SOFTMETAL_INLINE static const softmetal_tensor_placement* place() {
    return softmetal_tensor_place(role, rows, columns, threads);
  }
  SOFTMETAL_INLINE static int thread() { return softmetal_current_lane()->index % threads; }
};

SOFTMETAL_UNCHECKED inline int capacity_of(const softmetal_tensor_placement* placement) {
  return int(placement->capacity);
}
// The element in a slot, or -1.
SOFTMETAL_UNCHECKED inline int element_in(const softmetal_tensor_placement* placement, int thread, int slot) {
  if (slot < 0 || slot >= int(placement->capacity)) return -1;
  return placement->at[thread * placement->capacity + slot];
}

// Reports this thread's access to its elements to the checks.
template <class Tensor>
SOFTMETAL_INLINE void note_elements(Tensor& tensor, uint32_t kind) {
#if __has_feature(address_sanitizer)
  softmetal_tensor_access((void*)tensor.elements, sizeof tensor.elements[0], tensor.placement,
                          Tensor::layout::thread(), kind);
#endif
}

struct SameElements {};
}  // namespace softmetal

namespace metal {
template <class T, class Extents, class Layout>
class cooperative_tensor {
 public:
  using element_type = T;
  using value_type = T;
  using layout = Layout;

  T elements[Layout::slots];
  const softmetal_tensor_placement* placement;

  SOFTMETAL_INLINE cooperative_tensor() : placement(Layout::place()) {
    softmetal_tensor_poison((void*)elements, sizeof elements);
  }
  // The elements of a tensor with the same layout.
  template <class Source>
  SOFTMETAL_INLINE cooperative_tensor(softmetal::SameElements, const Source& source) : cooperative_tensor() {
    for (int i = 0; i < get_capacity(); ++i)
      if (is_valid_element(i)) elements[i] = source[i];
  }
  // In the headers of SDK 26 a copy copies the wrong way round, and a move nothing: no kernel can use either.
  cooperative_tensor(const cooperative_tensor&) = delete;
  cooperative_tensor& operator=(const cooperative_tensor&) = delete;

  static constexpr int get_rank() { return Layout::rank; }
  SOFTMETAL_INLINE ushort get_capacity() const { return ushort(softmetal::capacity_of(placement)); }
  SOFTMETAL_INLINE bool is_valid_element(int i) const { return element(i) >= 0; }
  // Apple's does not check the index either.
  SOFTMETAL_INLINE T& operator[](int i) {
    note_slot(i);
    return elements[i];
  }
  SOFTMETAL_INLINE const T& operator[](int i) const {
    note_slot(i);
    return elements[i];
  }
  SOFTMETAL_INLINE T get(int i) const { return is_valid_element(i) ? (*this)[i] : T(0); }
  SOFTMETAL_INLINE void set(int i, T value) {
    if (is_valid_element(i)) (*this)[i] = value;
  }
  // {column, row}; of a reduction, the row or column.
  SOFTMETAL_INLINE array<int, Layout::rank> get_multidimensional_index(int i) const {
    const int at = element(i);
    if constexpr (Layout::is_reduction)
      return {at};
    else
      return {at < 0 ? -1 : at % Layout::columns, at < 0 ? -1 : at / Layout::columns};
  }

  using iterator = softmetal::TensorIterator<cooperative_tensor, T>;
  using const_iterator = softmetal::TensorIterator<const cooperative_tensor, const T>;
  SOFTMETAL_INLINE iterator begin() { return {this, 0}; }
  SOFTMETAL_INLINE iterator end() { return {this, get_capacity()}; }
  SOFTMETAL_INLINE const_iterator begin() const { return {this, 0}; }
  SOFTMETAL_INLINE const_iterator end() const { return {this, get_capacity()}; }

  // This reduction's element for an element of its source; the end if this thread does not hold it.
  template <class Iterator>
  SOFTMETAL_INLINE iterator map_iterator(Iterator from) {
    using Source = remove_cv_t<typename Iterator::tensor_type>;
    using SourceLayout = typename Source::layout;
    static_assert(Layout::is_reduction && SourceLayout::role == SOFTMETAL_TENSOR_DESTINATION,
                  "map_iterator maps a destination onto a reduction");
    static_assert(Layout::lines == (Layout::of_rows ? SourceLayout::rows : SourceLayout::columns),
                  "Source and destination must have a matching M or N dimension");
    static_assert(is_same_v<typename Source::value_type, T>,
                  "Source and destination element types must match");
    const int wanted = from.tensor->get_multidimensional_index(from.slot)[Layout::of_rows ? 1 : 0];
    for (int i = 0; wanted >= 0 && i < get_capacity(); ++i)
      if (element(i) == wanted) return {this, i};
    return end();
  }

  template <class E, class X>
  SOFTMETAL_INLINE void load(const tensor<E, X, tensor_inline>& memory) {
    static_assert(is_same_v<remove_addrspace_t<E>, T>, "load does not convert");
    for (int i = 0; i < get_capacity(); ++i) {
      long offset;
      if (is_valid_element(i)) elements[i] = find(memory, i, offset) ? memory.data[offset] : T(0);
    }
  }
  template <class E, class X>
  SOFTMETAL_INLINE void store(const tensor<E, X, tensor_inline>& memory) const {
    static_assert(is_same_v<remove_addrspace_t<E>, T>, "store does not convert");
    for (int i = 0; i < get_capacity(); ++i) {
      long offset;
      if (is_valid_element(i) && find(memory, i, offset)) memory.data[offset] = elements[i];
    }
  }

 private:
  SOFTMETAL_INLINE int element(int i) const { return softmetal::element_in(placement, Layout::thread(), i); }
  SOFTMETAL_INLINE void note_slot(int i) const {
#if __has_feature(address_sanitizer)
    softmetal_tensor_slot(i, uint64_t(get_capacity()));
#endif
  }
  // Whether the memory contains this slot's element, and its place.
  template <class Memory>
  SOFTMETAL_INLINE bool find(const Memory& memory, int i, long& offset) const {
    static_assert(Memory::dimensions == Layout::rank, "the tensors must have the same rank");
    const array<int, Layout::rank> index = get_multidimensional_index(i);
    offset = 0;
    for (int d = 0; d < Layout::rank; ++d) {
      if (index[d] >= memory.reach(d)) return false;
      offset += index[d] * memory.strides[d];
    }
    return true;
  }
};
}  // namespace metal

namespace softmetal {
template <class T>
struct is_cooperative : metal::false_type {};
template <class T, class X, class L>
struct is_cooperative<metal::cooperative_tensor<T, X, L>> : metal::true_type {};
template <class T>
constexpr bool is_cooperative_v = is_cooperative<T>::value;

// Whether both layouts hold the same elements in the same slots.
template <class A, class B>
SOFTMETAL_UNCHECKED bool have_same_elements() {
  if (A::threads != B::threads || A::rows != B::rows || A::columns != B::columns) return false;
  const softmetal_tensor_placement *a = A::place(), *b = B::place();
  if (a->capacity != b->capacity) return false;
  for (uint32_t i = 0; i < A::threads * a->capacity; ++i)
    if (a->at[i] != b->at[i]) return false;
  return true;
}
// Whether every thread holds the rows (or columns) of its elements in a reduction.
template <class Layout>
SOFTMETAL_UNCHECKED bool holds_lines(const softmetal_tensor_placement* tile,
                                     const softmetal_tensor_placement* reduction, bool by_row) {
  for (int t = 0; t < Layout::threads; ++t)
    for (int i = 0; i < capacity_of(tile); ++i) {
      const int at = element_in(tile, t, i);
      const int wanted = by_row ? at / Layout::columns : at % Layout::columns;
      bool is_held = at < 0;
      for (int k = 0; k < capacity_of(reduction); ++k) is_held |= element_in(reduction, t, k) == wanted;
      if (!is_held) return false;
    }
  return true;
}

SOFTMETAL_UNCHECKED inline int simdgroups_of_threadgroup() {
  return int(softmetal_current_lane()->threadgroup->simdgroups);
}

// The frames of an operation's threads: each stores a pointer to its operands.
template <class Frame>
struct Frames {
  softmetal_simdgroup* group;
  int first;  // lane
  SOFTMETAL_INLINE Frame& operator[](int thread) const {
    softmetal_simdgroup* g = group;
    for (int i = thread / SOFTMETAL_SIMD_WIDTH; i > 0; --i) g = g->next;
    return **(Frame**)g->in[first + thread % SOFTMETAL_SIMD_WIDTH];
  }
};

template <class Operation>
SOFTMETAL_UNCHECKED void run_for_lane(softmetal_lane* lane) {
  Operation::run(Frames<typename Operation::Frame>{lane->simdgroup, int(lane->lane)});
}
template <class Operation>
SOFTMETAL_UNCHECKED void run_for_all(softmetal_simdgroup* first) {
  Operation::run(Frames<typename Operation::Frame>{first, 0});
}
template <class Frame>
SOFTMETAL_UNCHECKED void leave_frame(softmetal_lane* lane, Frame* frame) {
  *(Frame**)lane->simdgroup->in[lane->lane] = frame;
}

// Calls Operation::run once for all `threads` of an operation, when the last frame has arrived.
template <class Operation, int threads>
SOFTMETAL_INLINE void run_together(typename Operation::Frame& frame, Line line) {
  softmetal_lane* lane = softmetal_current_lane();
  leave_frame(lane, &frame);
  if constexpr (threads == 1)
    run_for_lane<Operation>(lane);
  else if constexpr (threads == SOFTMETAL_SIMD_WIDTH)
    softmetal_rendezvous_all(run_for_all<Operation>, line.number);
  else
    softmetal_rendezvous_threadgroup(run_for_all<Operation>, line.number);
}
}  // namespace softmetal
#endif
