// A step of the tensor kernels whose tiles are query rows: its keys, and products with them, in place or from
// threadgroup memory.
#pragma once

#include "tensor_staging.h"

namespace fattn {

// The keys of a step, and their visibility for the rows of this simdgroup.
struct TensorStep {
  int first_key;
  StepKeys keys;
  uint exist;  // see StepKeys
  KeyPlace first;
  bool active;    // some row may see a key
  bool whole;     // every row sees every key
  bool in_place;  // products can read the keys in place

  void find(thread const PrefillTile& tile, int key) thread {
    first_key = key;
    const KeyTable table = tile.source.blocks();
    keys.look_up(table, key, tile.at.lane);
    first = keys.find(table, 0);
    exist = keys.exist(table, tile.at.lane);
    const StepView view = tile.view_of(key, exist);
    active = view.fragments.any();
    whole = view.whole;
    in_place = is_in_place(tile, key, exist);
  }

  // Multiplies rows of this simdgroup by the keys or the values. All threads call it. Staged rows are valid
  // until the next call.
  template <class Product, class Scores>
  void multiply(thread Product& product, thread SharedTensor& rows, StoredOperand operand,
                constant Strides3& strides, thread const PrefillTile& tile, threadgroup uint4* storage,
                ushort thread_index, thread Scores& scores) const thread {
    if (!in_place) {
      stage(operand, strides, tile, kAllKeys, storage, thread_index);
    }
    if (active && in_place) {
      CacheTensor right = tensor_in_place(operand, strides, first, 0, kTensorDim);
      product.run(rows, right, scores);
    } else if (active) {
      SharedTensor right = staged_tensor(storage, 0, kTensorDim, kTileKeys);
      product.run(rows, right, scores);
    }
  }

  // `kept`: see stage_step().
  void stage(StoredOperand operand, constant Strides3& strides, thread const PrefillTile& tile, uint kept,
             threadgroup uint4* storage, ushort thread_index) const thread {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous staged rows have been read
    stage_step(storage, operand, strides, tile, keys, kept, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
};

}  // namespace fattn
