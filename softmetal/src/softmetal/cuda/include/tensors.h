// metal::tensor over memory that a kernel has a pointer to (tensor_inline), and its extents. Dimension 0 is
// the inner one; as operands of a product, tensors have an inner stride of 1.
#pragma once

#include "simdgroup.h"

namespace metal {

constexpr size_t dynamic_extent = size_t(-1);

template <size_t N>
struct execution_threads {
  static constexpr size_t static_size = N;
};
template <size_t N>
struct execution_simdgroups {
  static constexpr size_t static_size = N;
};
using execution_thread = execution_threads<1>;
using execution_simdgroup = execution_simdgroups<1>;

template <typename Index, size_t... sizes_>
struct extents {
  using index_type = Index;
  static constexpr size_t rank = sizeof...(sizes_);
  static constexpr size_t dynamic_rank = (size_t(sizes_ == dynamic_extent) + ... + 0);
  static constexpr size_t static_sizes[rank] = {sizes_...};
  Index sizes[rank];

  SOFTMETAL_INLINE constexpr extents() : sizes{Index(sizes_)...} {
    static_assert(dynamic_rank == 0, "dynamic extents need their sizes");
  }
  // All sizes, or those that are dynamic.
  template <typename... I>
    requires(sizeof...(I) == rank || sizeof...(I) == dynamic_rank)
  SOFTMETAL_INLINE constexpr extents(I... given) : sizes{Index(sizes_)...} {
    const Index values[] = {Index(given)...};
    constexpr size_t fixed[rank] = {sizes_...};
    size_t next = 0;
#pragma unroll
    for (size_t i = 0; i < rank; ++i) {
      if (sizeof...(I) == rank || fixed[i] == dynamic_extent) sizes[i] = values[next++];
    }
  }
  SOFTMETAL_INLINE constexpr Index extent(size_t i) const { return sizes[i]; }
};

}  // namespace metal

namespace softmetal {

template <typename Index, size_t rank, size_t... sizes>
struct AllDynamic : AllDynamic<Index, rank - 1, sizes..., metal::dynamic_extent> {};
template <typename Index, size_t... sizes>
struct AllDynamic<Index, 0, sizes...> {
  using type = metal::extents<Index, sizes...>;
};

}  // namespace softmetal

namespace metal {

template <typename Index, size_t rank>
using dextents = typename softmetal::AllDynamic<Index, rank>::type;

struct tensor_inline {};
struct tensor_handle {};

template <typename T, typename Extents, typename Descriptor = tensor_handle, typename... Tags>
struct tensor;

template <typename T, typename Extents>
struct tensor<T, Extents, tensor_inline> {
  static_assert(!std::is_const_v<T>, "a tensor's elements are not const");
  using element_type = T;
  using value_type = T;
  using extents_type = Extents;
  using data_handle_type = T*;
  static constexpr size_t rank = Extents::rank;
  T* data;
  int size[rank];
  long stride[rank];

  tensor() = default;
  SOFTMETAL_INLINE tensor(T* pointer, Extents sizes) : data(pointer) {
    long step = 1;
#pragma unroll
    for (size_t i = 0; i < rank; ++i) {
      size[i] = int(sizes.sizes[i]);
      stride[i] = step;
      step *= size[i];
    }
  }
  template <typename I>
  SOFTMETAL_INLINE tensor(T* pointer, Extents sizes, array<I, rank> strides) : data(pointer) {
#pragma unroll
    for (size_t i = 0; i < rank; ++i) {
      size[i] = int(sizes.sizes[i]);
      stride[i] = strides[i];
    }
  }

  // A part of the tensor, up to its end or of the given extents.
  template <size_t... sizes, typename... I>
  SOFTMETAL_INLINE auto slice(I... origin) const {
    static_assert(sizeof...(I) == rank && (sizeof...(sizes) == rank || sizeof...(sizes) == 0));
    if constexpr (sizeof...(sizes) == 0) {
      return sliced<dextents<typename Extents::index_type, rank>>(array<long, rank>{long(origin)...});
    } else {
      return sliced<extents<typename Extents::index_type, sizes...>>(array<long, rank>{long(origin)...});
    }
  }
  SOFTMETAL_INLINE int extent(int i) const { return size[i]; }
  SOFTMETAL_INLINE int get_extent(int i) const { return size[i]; }

 private:
  template <typename Part>
  SOFTMETAL_INLINE auto sliced(array<long, rank> origin) const {
    tensor<T, Part, tensor_inline> part;
    part.data = data;
#pragma unroll
    for (size_t i = 0; i < rank; ++i) {
      part.data += origin[i] * stride[i];
      part.stride[i] = stride[i];
      const int rest = int(size[i] - origin[i]);
      part.size[i] = Part::static_sizes[i] == dynamic_extent ? rest : int(Part::static_sizes[i]);
    }
    return part;
  }
};

template <typename T, typename Extents>
tensor(T*, Extents) -> tensor<T, Extents, tensor_inline>;
template <typename T, typename Extents, typename I, size_t N>
tensor(T*, Extents, array<I, N>) -> tensor<T, Extents, tensor_inline>;

}  // namespace metal
