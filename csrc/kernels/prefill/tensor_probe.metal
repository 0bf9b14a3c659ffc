// Queries the layout of the tensor kernels' cooperative tensors, for the self-test. kTensorHeadFacts in
// sizes.h describes the output. One simdgroup.
#define FATTN_COLUMN_SHARES (FATTN_SIMDGROUPS / FATTN_ROW_GROUPS)

#include "tensor_products.h"

namespace fattn {

// Lists the coordinates of the elements of all lanes, as far as they fit; returns the place after them.
template <class Tensor>
inline long list_elements(thread Tensor& held, device int* facts, long place, long most, ushort lane) {
  const long count = 2 * held.get_capacity();
  for (ushort i = 0; i < held.get_capacity(); i++) {
    const bool valid = held.is_valid_element(i);
    const auto at = held.get_multidimensional_index(i);
    const long here = place + lane * count + 2 * i;
    if (here + 1 < most) {
      facts[here] = valid ? int(at[0]) : -1;
      facts[here + 1] = valid ? int(at[1]) : -1;
    }
  }
  return place + kSimdWidth * count;
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kSimdWidth)]] void fattn_tensor_probe(
    device int* facts [[buffer(fattn::kSlotOut)]],
    constant TensorProbeParams& params [[buffer(fattn::kSlotParams)]],
    ushort lane [[thread_index_in_simdgroup]]) {
  FATTN_TENSOR_PRODUCTS
  int rows = 0;
  int rows_of_scores = 0;
  int rows_of_output = 0;
  int is_left_input = 0;
#if FATTN_REGISTERS
  auto reduced = FATTN_TENSOR_REDUCED;
  rows = reduced.get_capacity();
  rows_of_scores = is_iterator_compatible(scores, reduced);
  rows_of_output = is_iterator_compatible(output, reduced);
  is_left_input = output_product.template is_compatible_as_left_input<float, Element, float>(scores);
#endif
  if (lane == 0) {
    facts[0] = scores.get_capacity();
    facts[1] = rows;
    facts[2] = output.get_capacity();
    facts[3] = rows_of_scores;
    facts[4] = rows_of_output;
    facts[5] = is_left_input;
  }
  const long place = list_elements(scores, facts, kTensorHeadFacts, params.max_facts, lane);
  list_elements(output, facts, place, params.max_facts, lane);
}
