// Plans fattn.decode and fattn.paged_decode: a pass over the chunks of all sequences, then a pass that merges
// the chunks of each. Short caches take one pass, in which one threadgroup processes a whole sequence. Large
// trees, and many rows on matrix units, run as prefill.
#include "planners.h"
#include "slices.h"
#include "tuned.h"

namespace fattn {
namespace {

// Groups of eight rows per threadgroup: the smallest power of 2 that holds the rows, at most `most`.
int64_t row_groups_for(int64_t packed_rows, int64_t most) {
  int64_t groups = 1;
  while (groups < most && groups * kFragment < packed_rows) groups *= 2;
  return groups;
}

constexpr int64_t kFewChunks = 32;
// A step of one row has twice as many keys as a step of two, and costs as much as the end of a chunk.
constexpr int64_t kFewChunksOfOneRow = 16;

// How the threadgroups of the first pass divide their work.
struct Shape {
  Kernel kernel;
  int64_t row_groups;
  int64_t group_rows = kFragment;
  int64_t tile_keys;
  int64_t simdgroups;
  int64_t chunk_unit;
  int64_t min_chunk;  // grows with the rows, like the partial result
  int64_t threadgroups_per_core;
  int64_t threadgroup_bytes;
  int64_t few_chunks = kFewChunks;
  int64_t max_rounds = 0;  // of chunks in flight; 0: a threadgroup cannot take several
  Scope scope;
};

// A threadgroup processes `chunks` chunks of a sequence at once, in `rounds` rounds.
struct AtOnce {
  int64_t chunks;
  int64_t rounds;
  const char* launches;  // their number and the reason, for explain

  int64_t all() const { return chunks * rounds; }
};

// decode.metal: a simdgroup holds whole rows.
Shape shape_of_rows(const Problem& p, const DeviceFacts& device, int64_t packed_rows, const AtOnce& at_once) {
  const auto& [scope, sizes] =
      tuned_or(tuning_row(kDecodeTuning, device, p, p.dtype), Kernel::kDecode, device, p);
  const int64_t row_groups = row_groups_for(packed_rows, sizes.simdgroups);
  // Packed query rows, the states of simdgroups that share rows, and the scales of their steps.
  const int64_t query_bytes = row_groups * kFragment * p.head_dim * size_of(operand_dtype(p, device));
  const int64_t simdgroups = at_once.chunks * sizes.simdgroups;
  const int64_t state_floats = shared_state_rows(int(at_once.chunks), sizes.simdgroups, int(row_groups)) *
                                   (state_pitch(int(at_once.chunks), int(p.value_dim)) + 2) +
                               chunk_sum_floats(int(at_once.all()), int(row_groups * kFragment));
  const int64_t state_bytes = state_floats * int64_t(sizeof(float));
  const int64_t saved_bytes = simdgroups * int64_t(sizeof(SavedWork));
  const int64_t pairs = scale_pairs(has_row_scales(p.kv_format), int(simdgroups * sizes.tile_keys));
  const int64_t scale_bytes = ceil_div(pairs, 2) * 16;  // the states follow at a multiple of 16
  return {.kernel = Kernel::kDecode,
          .row_groups = row_groups,
          .tile_keys = sizes.tile_keys,
          .simdgroups = sizes.simdgroups,
          .chunk_unit = sizes.tile_keys * sizes.simdgroups,
          .min_chunk = std::max<int64_t>(sizes.min_chunk, sizes.tile_keys * sizes.simdgroups) * row_groups,
          .threadgroups_per_core = sizes.threadgroups_per_core,
          .threadgroup_bytes = ceil_div(query_bytes + state_bytes + scale_bytes + saved_bytes, 16) * 16,
          .max_rounds = row_groups < sizes.simdgroups ? 1 : 0,
          .scope = scope};
}

// decode_wide.metal: a simdgroup holds some columns of all rows.
Shape shape_of_columns(const Problem& p, const DeviceFacts& device, int64_t packed_rows, const AtOnce&) {
  const auto& [scope, sizes] = tuned_or(tuning_row(kDecodeWideTuning, device, p, operand_dtype(p, device)),
                                        Kernel::kDecodeWide, device, p);
  const int64_t row_groups = row_groups_for(packed_rows, kMaxRowGroups);
  int64_t simdgroups =
      std::max<int64_t>(sizes.simdgroups, 2 * row_groups);  // a thread holds scores of one row
  while (simdgroups < kMaxWideSimdgroups && row_groups * p.value_dim > simdgroups * kMaxGroupColumns) {
    simdgroups *= 2;
  }
  const int64_t tile_keys = std::max<int64_t>(sizes.tile_keys / row_groups, kFragment);
  // The products of every simdgroup, the scores, and the scales of a step.
  const int64_t scores = step_scores(int(row_groups), int(tile_keys));
  const int64_t score_bytes = scores * (simdgroups + 1) * int64_t(sizeof(float));
  const int64_t scale_bytes =
      scale_pairs(has_row_scales(p.kv_format), int(tile_keys)) * 2 * int64_t(sizeof(float));
  return {.kernel = Kernel::kDecodeWide,
          .row_groups = row_groups,
          .tile_keys = tile_keys,
          .simdgroups = simdgroups,
          .chunk_unit = tile_keys,
          .min_chunk = sizes.min_chunk * row_groups,
          .threadgroups_per_core =
              std::max<int64_t>(sizes.threadgroups_per_core * sizes.simdgroups / simdgroups, 1),
          .threadgroup_bytes = ceil_div(score_bytes + scale_bytes, 16) * 16,
          .scope = scope};
}

// decode_vector.metal: a simdgroup holds whole rows, a lane one score of a step.
Shape shape_of_lanes(const Problem& p, const DeviceFacts& device, int64_t packed_rows,
                     const AtOnce& at_once) {
  const auto& [scope, sizes] =
      tuned_or(tuning_row(kDecodeVectorTuning, device, p, p.dtype), Kernel::kDecodeVector, device, p);
  const int64_t tile_keys = sizes.tile_keys / packed_rows;
  // The states of the simdgroups, the weights of their steps, and their saved state.
  const int64_t simdgroups = at_once.chunks * sizes.simdgroups;
  const int64_t state_floats =
      simdgroups * packed_rows * (p.value_dim + 2) + chunk_sum_floats(int(at_once.all()), int(packed_rows)) +
      waiting_floats(int(at_once.chunks), int(at_once.rounds), int(packed_rows), int(p.value_dim));
  const int64_t state_bytes = state_floats * int64_t(sizeof(float));
  const int64_t weight_bytes = simdgroups * kSimdWidth * int64_t(sizeof(float));
  const int64_t saved_bytes = simdgroups * int64_t(sizeof(SavedWork) + sizeof(SavedScales));
  return {.kernel = Kernel::kDecodeVector,
          .row_groups = packed_rows,
          .group_rows = 1,
          .tile_keys = tile_keys,
          .simdgroups = sizes.simdgroups,
          .chunk_unit = tile_keys * sizes.simdgroups,
          .min_chunk = std::max<int64_t>(sizes.min_chunk, tile_keys * sizes.simdgroups),
          .threadgroups_per_core = sizes.threadgroups_per_core,
          .threadgroup_bytes = ceil_div(state_bytes + weight_bytes + saved_bytes, 16) * 16,
          .few_chunks = packed_rows == 1 ? kFewChunksOfOneRow : kFewChunks,
          .max_rounds = kShortRounds,
          .scope = scope};
}

Shape shape_of(const Problem& p, const DeviceFacts& device, int64_t packed_rows, const AtOnce& at_once) {
  const int64_t dim = std::max(p.head_dim, p.value_dim);
  const bool by_lanes = packed_rows <= kMaxVectorRows && dim <= kMaxVectorDim && !p.value_in_key;
  if (by_lanes) return shape_of_lanes(p, device, packed_rows, at_once);
  const bool wide = p.value_in_key || dim > kMaxRowDim;
  return (wide ? shape_of_columns : shape_of_rows)(p, device, packed_rows, at_once);
}

// Upper bound of the visible keys of a sequence.
int64_t max_visible_keys(const Problem& p) {
  if (p.options.window_left < 0) return p.kv_len;
  const int64_t window_keys = std::min(p.options.window_left, p.kv_len) + p.q_len;
  return std::min(p.kv_len, window_keys + std::min(p.options.sink_tokens, p.kv_len));
}

// Products per key and threadgroup. A single row counts as eight: it reads as many bytes.
int64_t products_per_key(const Problem& p, const Shape& shape) {
  const int64_t rows = std::max<int64_t>(shape.row_groups * shape.group_rows, kFragment);
  return rows * (p.head_dim + p.value_dim);
}

// Upper bound of the chunks of a sequence: chunks_of in kernels/common/schedule.h. Both ranges of a window
// may begin and end within a chunk.
int64_t parts_of(const Problem& p, const CausalSpan& span) {
  const int64_t all = std::max<int64_t>(ceil_div(p.kv_len, span.min_chunk), 1);
  const int64_t large = std::max<int64_t>(span.few_chunks, ceil_div(max_visible_keys(p), kLargeChunk));
  const int64_t most = std::max<int64_t>(std::min<int64_t>(span.max_chunks, large),
                                         ceil_div(max_visible_keys(p), span.largest_chunk));
  if (p.options.window_left < 0) return std::min(all, most);
  const int64_t window_keys = std::min(p.options.window_left, p.kv_len) + p.q_len;
  const int64_t sink_keys = std::min(p.options.sink_tokens, p.kv_len);
  const int64_t of_window = ceil_div(window_keys, span.min_chunk) + ceil_div(sink_keys, span.min_chunk) + 1;
  return std::min({all, of_window, most + 3});
}

CausalSpan span_of(const Problem& p, const Shape& shape, int64_t max_chunks, double max_products_of_group) {
  CausalSpan span{};
  span.q_len = int32_t(p.q_len);
  span.window_left =
      p.options.window_left < 0 ? kNoWindow : int32_t(std::min<int64_t>(p.options.window_left, kNoWindow));
  span.sink_tokens = int32_t(std::min<int64_t>(p.options.sink_tokens, kNoWindow));
  span.capacity = int32_t(p.kv_len);
  span.chunk_unit = int32_t(shape.chunk_unit);
  span.min_chunk = int32_t(shape.min_chunk);
  span.max_chunks = int32_t(max_chunks);
  span.few_chunks = int32_t(shape.few_chunks);
  const double keys = std::min(max_products_of_group / double(products_per_key(p, shape)), double(kNoWindow));
  span.largest_chunk =
      int32_t(std::max(int64_t(keys) / shape.chunk_unit * shape.chunk_unit, shape.min_chunk));
  span.seq_lens_stride = p.seq_lens_stride;
  return span;
}

// Short caches take one launch. A second launch that waits for the first costs 2 to 4 us, and a threadgroup
// with several chunks can merge them itself. But it reads all their keys while other cores idle.
constexpr int64_t kMaxChunkThreads = 512;  // leaves 208 half registers per lane on M1 and M2
constexpr int64_t kMaxShortKeys = 1024;    // threads then differ by only a few steps
// Threadgroups per core. Their last steps do not overlap, and with more of them a launch is relatively cheap.
constexpr int64_t kShortGroupsPerCore = 2;
// Bytes that a core may read beyond an even part: 16 per cycle for 4,000 cycles, the time of a launch. By
// lanes for 10,000 cycles: there merging the chunks is also faster than a second launch (H200: 32/8 heads of
// 256 keys take 8.6 us in one launch and 8.1 in two; 32/16 heads 6.2 and 7.4).
constexpr int64_t kLaunchBytes = 64 * 1024;
constexpr int64_t kLaunchBytesByLanes = 160 * 1024;

// Query rows of a sequence that the decode kernels take.
constexpr int64_t kMaxDecodeRows = 16;

// Bytes of a key and its value in one head.
int64_t bytes_of_key(const Problem& p) {
  const int64_t element = size_of(storage_dtype(p.kv_format, p.dtype));
  return (stored_columns(p.kv_format, p.head_dim) + stored_columns(p.kv_format, p.value_dim)) * element;
}

// For sequences of up to `parts` chunks. With one chunk at once, a threadgroup takes them one by one.
AtOnce chunks_at_once(const Problem& p, const DeviceFacts& device, const Shape& shape, int64_t parts,
                      int64_t columns) {
  if (parts == 1) return {1, 1, "one: a sequence has one chunk"};
  if (shape.max_rounds == 0) return {1, 1, "two: the simdgroups of a threadgroup have no rows in common"};
  const AtOnce all{kShortChunks, ceil_div(parts, kShortChunks),
                   "one: a threadgroup has all chunks of a sequence"};
  if (all.rounds > shape.max_rounds) return {1, 1, "two: a sequence may have more chunks than a threadgroup"};
  const int64_t keys = max_visible_keys(p);
  if (keys > kMaxShortKeys) return {1, 1, "two: a sequence may be too long for one threadgroup"};
  const int64_t threads = kShortChunks * shape.simdgroups * kSimdWidth;
  const int64_t packed_rows = p.q_heads / p.kv_heads * p.q_len;
  if (threads > kMaxChunkThreads ||
      shape_of(p, device, packed_rows, all).threadgroup_bytes > device.max_threadgroup_bytes) {
    return {1, 1, "two: the chunks of a sequence do not fit in a threadgroup"};
  }
  const int64_t groups = p.batch * columns;
  const int64_t cores = cores_of(device);
  if (groups > kShortGroupsPerCore * cores) return {1, 1, "two: there is work for more than one launch"};
  const int64_t of_core = std::max(ceil_div(keys * groups, cores), ceil_div(keys, parts));
  const int64_t max_bytes = shape.kernel == Kernel::kDecodeVector ? kLaunchBytesByLanes : kLaunchBytes;
  if ((keys - of_core) * bytes_of_key(p) > max_bytes) {
    return {1, 1, "two: a threadgroup would read longer than a launch takes"};
  }
  return all;
}

// Whether the call is a causal prefill of dense operands.
bool is_prefill(const Problem& p) {
  return p.q_len > kMaxDecodeRows && p.op == Op::kDecode && !p.has_seq_lens && p.kv_format == kKvFloat &&
         !p.options.tree_mask;
}

// A decode as a prefill of its newest rows.
Plan plan_as_prefill(Problem p, const DeviceFacts& device) {
  if (is_prefill(p)) p.op = Op::kPrefill;
  p.q_offset = p.kv_len - p.q_len;  // unused with seq_lens
  Plan plan = plan_prefill(p, device);
  plan.launches = plan.pass_count == 1 ? "one: the keys of a sequence are one part"
                                       : "two: the keys of a sequence are cut into parts";
  return plan;
}

}  // namespace

Plan plan_decode(const Problem& p, const DeviceFacts& device) {
  Plan plan;
  if (is_empty(p)) return plan;
  if (is_prefill(p)) return plan_as_prefill(p, device);
  plan.units = units_note(p, device.units);
  if (is_on(units_state(p, device.units))) {
    if (!device.only_prefills_on_units) return plan_as_prefill(p, device);
    plan.units = "only prefills were timed on this GPU";
  }
  if (p.q_len > kMaxDecodeRows) return plan_as_prefill(p, device);
  const int64_t group_size = p.q_heads / p.kv_heads;
  const int64_t packed_rows = group_size * p.q_len;
  const AtOnce one_by_one{1, 1, ""};
  Shape shape = shape_of(p, device, packed_rows, one_by_one);
  plan.tuning = shape.scope;

  const int64_t row_groups = shape.row_groups;
  const int64_t row_blocks = ceil_div(packed_rows, row_groups * shape.group_rows);
  const int64_t columns = p.kv_heads * row_blocks;                      // of the grid
  const int64_t held = cores_of(device) * shape.threadgroups_per_core;  // resident threadgroups
  const int64_t filling = std::max<int64_t>(held / columns, 1);         // workers that fill the GPU
  const double max_products_of_group = max_products(device) / double(held);
  const CausalSpan span = span_of(p, shape, filling, max_products_of_group);
  const AtOnce at_once = chunks_at_once(p, device, shape, parts_of(p, span), columns);
  plan.launches = at_once.launches;
  const bool together = at_once.chunks > 1;
  if (together) shape = shape_of(p, device, packed_rows, at_once);
  const int64_t parts = together ? 1 : parts_of(p, span);  // partial results
  // Products of one column of the grid.
  const double products = double(p.batch) * double(max_visible_keys(p)) * double(products_per_key(p, shape));
  const bool sliced = products * double(columns) > max_products(device);
  const int64_t wanted = sliced ? int64_t(std::ceil(products / max_products_of_group)) : filling;
  const int64_t workers = together ? p.batch : std::min(std::max(wanted, filling), p.batch * parts);

  Pass& pass = plan.add_pass();
  pass.spec = attention_spec(shape.kernel, p, device);
  pass.spec.row_fragments = 1;
  pass.spec.row_groups = uint16_t(row_groups);
  pass.spec.value_in_key = p.value_in_key;
  pass.spec.tile_keys = uint16_t(shape.tile_keys);
  pass.spec.simdgroups = uint16_t(shape.simdgroups);
  pass.spec.chunks = uint16_t(at_once.chunks);
  pass.spec.chunk_rounds = uint16_t(at_once.rounds);
  pass.spec.split = parts > 1 || p.part;
  pass.spec.token_major_out = is_token_major(p) && parts == 1;
  pass.spec.window = p.options.window_left >= 0;
  pass.grid = {uint32_t(workers), uint32_t(columns), 1};
  limit_groups(pass, double(sliced ? held : kMaxAlong));
  pass.threads = {uint32_t(at_once.chunks * shape.simdgroups * kSimdWidth), 1, 1};
  pass.threadgroup_bytes = uint32_t(shape.threadgroup_bytes);

  bind_attention(pass, p);

  DecodeParams params{};
  set_attention_params(params, p);
  params.span = span;
  params.row_blocks = int32_t(row_blocks);
  params.workers = int32_t(workers);
  pass.set_params(params);

  if (parts == 1) {
    pass.bind(kSlotOut, p.part ? kSlotPartialOut : kSlotOut);
    pass.bind(kSlotLse, p.part ? kSlotPartialSum : kSlotLse);
    return plan;
  }
  pass.bind(kSlotPartialOut);
  pass.bind(kSlotPartialSum);
  // The number of simdgroups determines the summation order, so it must not depend on the capacity.
  Pass& merge = add_merge_of_parts(plan, p, parts, merge_simdgroups(span.max_chunks), span);
  merge.spec.has_seq_lens = p.has_seq_lens;
  merge.spec.window = p.options.window_left >= 0;
  if (p.has_seq_lens) merge.bind(kSlotSeqLens);
  return plan;
}

}  // namespace fattn
