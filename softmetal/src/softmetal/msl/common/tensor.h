// <metal_tensor>: extents, and tensors over memory that the kernel has a pointer to. Dimension 0 is the
// innermost.
#pragma once

namespace metal {
constexpr size_t dynamic_extent = size_t(-1);

template <size_t N>
struct execution_threads {
  static_assert(N == 1, "only execution_threads<1> is supported");
};
template <size_t N>
struct execution_simdgroups {
  static_assert(N != 0, "execution_simdgroups<0> is not supported");
};
using execution_thread = execution_threads<1>;
using execution_simdgroup = execution_simdgroups<1>;

template <class Index, size_t... Sizes>
struct extents {
  using index_type = Index;
  Index sizes[sizeof...(Sizes)];

  static constexpr size_t rank() { return sizeof...(Sizes); }
  static constexpr size_t rank_dynamic() { return (size_t(Sizes == dynamic_extent) + ... + 0); }
  SOFTMETAL_INLINE static constexpr size_t static_extent(size_t i) {
    const size_t fixed[] = {Sizes...};
    return fixed[i];
  }
  SOFTMETAL_INLINE constexpr Index extent(size_t i) const { return sizes[i]; }

  SOFTMETAL_INLINE constexpr extents() : sizes{Index(Sizes)...} {
    static_assert(rank_dynamic() == 0, "dynamic extents need values");
  }
  // A value for each dynamic extent, or for each extent.
  template <class... I, class = enable_if_t<sizeof...(I) == rank() || sizeof...(I) == rank_dynamic()>>
  SOFTMETAL_INLINE constexpr extents(I... given) : sizes{Index(Sizes)...} {
    const Index values[] = {Index(given)...};
    size_t next = 0;
    SOFTMETAL_UNROLL for (size_t i = 0; i < rank();
                          ++i) if (sizeof...(I) == rank() || static_extent(i) == dynamic_extent) sizes[i] =
        values[next++];
  }
};
}  // namespace metal

namespace softmetal {
template <class Index, size_t Rank, size_t... Sizes>
struct DynamicExtents : DynamicExtents<Index, Rank - 1, Sizes..., metal::dynamic_extent> {};
template <class Index, size_t... Sizes>
struct DynamicExtents<Index, 0, Sizes...> {
  using type = metal::extents<Index, Sizes...>;
};
}  // namespace softmetal

namespace metal {
template <class Index, size_t Rank>
using dextents = typename softmetal::DynamicExtents<Index, Rank>::type;

struct tensor_inline {};
struct tensor_handle {};
struct tensor_offset {};

// Tensors with a handle, which hosts bind: host/cooperative_tensor.h has their names.
template <class T, class Extents, class Descriptor = tensor_handle, class... Tags>
struct tensor;

template <class T, class Extents>
struct tensor<T, Extents, tensor_inline> {
  static_assert(!is_const_v<remove_addrspace_t<T>>, "the element type of a tensor must not be const");
  using element_type = T;
  using value_type = remove_addrspace_t<T>;
  using extents_type = Extents;
  using index_type = typename Extents::index_type;
  using data_handle_type = T*;
  static constexpr size_t dimensions = Extents::rank();

  T* data;
  int sizes[dimensions];
  // Extents of the memory: a slice of static extents may exceed its source.
  int limits[dimensions];
  long strides[dimensions];

  tensor() = default;
  SOFTMETAL_INLINE tensor(T* pointer, Extents e) : data(pointer) {
    long stride = 1;
    SOFTMETAL_UNROLL for (size_t i = 0; i < dimensions; ++i) {
      sizes[i] = limits[i] = int(e.extent(i));
      strides[i] = stride;
      stride *= sizes[i];
    }
  }
  template <class I>
  SOFTMETAL_INLINE tensor(T* pointer, Extents e, array<I, dimensions> given) : tensor(pointer, e) {
    SOFTMETAL_UNROLL for (size_t i = 0; i < dimensions; ++i) strides[i] = long(given[i]);
  }

  static constexpr size_t get_rank() { return dimensions; }
  SOFTMETAL_INLINE index_type get_extent(size_t i) const { return index_type(sizes[i]); }
  SOFTMETAL_INLINE index_type get_stride(size_t i) const { return index_type(strides[i]); }
  // The existing elements of an extent.
  SOFTMETAL_INLINE int reach(size_t i) const { return sizes[i] < limits[i] ? sizes[i] : limits[i]; }

  // The part from `origin` on: with the given extents, or to the end of each dimension.
  template <size_t... Sizes, class... I>
  SOFTMETAL_INLINE auto slice(I... origin) const {
    static_assert(sizeof...(I) == dimensions, "slice needs an index for each dimension");
    static_assert(sizeof...(Sizes) == 0 || sizeof...(Sizes) == dimensions,
                  "slice needs an extent for each dimension, or none");
    if constexpr (sizeof...(Sizes) == 0)
      return part<dextents<index_type, dimensions>>(array<long, dimensions>{long(origin)...});
    else
      return part<extents<index_type, Sizes...>>(array<long, dimensions>{long(origin)...});
  }

 private:
  template <class Part>
  SOFTMETAL_INLINE auto part(array<long, dimensions> origin) const {
    tensor<T, Part, tensor_inline> to;
    to.data = data;
    SOFTMETAL_UNROLL for (size_t i = 0; i < dimensions; ++i) {
      const int rest = int(max(sizes[i] - origin[i], 0L));
      to.data += origin[i] * strides[i];
      to.strides[i] = strides[i];
      to.limits[i] = int(max(limits[i] - origin[i], 0L));
      to.sizes[i] = Part::static_extent(i) == dynamic_extent ? rest : int(Part::static_extent(i));
    }
    return to;
  }
};
template <class T, class Extents>
tensor(T*, Extents) -> tensor<T, Extents, tensor_inline>;
template <class T, class Extents, class I, size_t N>
tensor(T*, Extents, array<I, N>) -> tensor<T, Extents, tensor_inline>;
}  // namespace metal

namespace softmetal {
// An iterator over the slots of a cooperative tensor.
template <class Tensor, class Element>
struct TensorIterator {
  using tensor_type = Tensor;
  Tensor* tensor;
  int slot;
  SOFTMETAL_INLINE Element& operator*() const { return (*tensor)[slot]; }
  SOFTMETAL_INLINE TensorIterator& operator++() {
    ++slot;
    return *this;
  }
  SOFTMETAL_INLINE TensorIterator operator++(int) { return {tensor, slot++}; }
  SOFTMETAL_INLINE TensorIterator operator+(int n) const { return {tensor, slot + n}; }
  SOFTMETAL_INLINE int operator-(TensorIterator other) const { return slot - other.slot; }
  SOFTMETAL_INLINE bool operator==(TensorIterator other) const { return slot == other.slot; }
  SOFTMETAL_INLINE bool operator!=(TensorIterator other) const { return slot != other.slot; }
  SOFTMETAL_INLINE bool is_valid_element() const { return tensor->is_valid_element(slot); }
};
}  // namespace softmetal
