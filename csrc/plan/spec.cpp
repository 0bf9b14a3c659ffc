// Names, macros and function constants of a KernelSpec: the host's side of kernels/common/config.h.
#include "kv_format.h"
#include "plan.h"

namespace fattn {

const char* name_of(Op op) {
  switch (op) {
    case Op::kPrefill:
      return "fattn.prefill";
    case Op::kDecode:
      return "fattn.decode";
    case Op::kPagedDecode:
      return "fattn.paged_decode";
    case Op::kPagedPrefill:
      return "fattn.paged_prefill";
    case Op::kVarlenPrefill:
      return "fattn.varlen_prefill";
    case Op::kMerge:
      return "fattn.merge";
    case Op::kCacheWrite:
      return "fattn.cache_write";
    case Op::kSoftmax:
      return "fattn.softmax";
    case Op::kSoftcap:
      return "fattn.softcap";
    case Op::kMaskMap:
      return "fattn.mask_map";
  }
  return "fattn";
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kBool:
      return "bool";
    case DType::kInt8:
      return "int8";
    case DType::kUInt8:
      return "uint8";
    case DType::kOther:
      return "other";
  }
  return "other";
}

int size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kBool:
    case DType::kInt8:
    case DType::kUInt8:
      return 1;
    case DType::kOther:
      return 0;
  }
  return 0;
}

const char* function_name(Kernel kernel) {
  switch (kernel) {
    case Kernel::kPrefill:
      return "fattn_prefill";
    case Kernel::kPrefillWide:
      return "fattn_prefill_wide";
    case Kernel::kDecode:
      return "fattn_decode";
    case Kernel::kDecodeWide:
      return "fattn_decode_wide";
    case Kernel::kMerge:
      return "fattn_merge";
    case Kernel::kCacheWrite:
      return "fattn_cache_write";
    case Kernel::kSoftmax:
      return "fattn_softmax";
    case Kernel::kSoftcap:
      return "fattn_softcap";
    case Kernel::kMaskMap:
      return "fattn_mask_map";
  }
  return "";
}

const char* source_name(Kernel kernel) {
  switch (kernel) {
    case Kernel::kPrefill:
      return "prefill";
    case Kernel::kPrefillWide:
      return "prefill_wide";
    case Kernel::kDecode:
      return "decode";
    case Kernel::kDecodeWide:
      return "decode_wide";
    case Kernel::kMerge:
      return "merge";
    case Kernel::kCacheWrite:
      return "cache";
    case Kernel::kSoftmax:
    case Kernel::kSoftcap:
      return "logits";
    case Kernel::kMaskMap:
      return "mask_map";
  }
  return "";
}

const char* name_of(Buffer buffer) {
  switch (buffer) {
    case Buffer::kQuery:
      return "query";
    case Buffer::kKey:
      return "key";
    case Buffer::kValue:
      return "value";
    case Buffer::kMask:
      return "attn_mask";
    case Buffer::kMaskMap:
      return "mask_map";
    case Buffer::kSeqLens:
      return "seq_lens";
    case Buffer::kBlockTables:
      return "block_tables";
    case Buffer::kSinks:
      return "sinks";
    case Buffer::kAlibiSlopes:
      return "alibi_slopes";
    case Buffer::kTreeMask:
      return "tree_mask";
    case Buffer::kCuSeqlens:
      return "cu_seqlens_q";
    case Buffer::kCuSeqlensK:
      return "cu_seqlens_k";
    case Buffer::kKeyCache:
      return "key_cache";
    case Buffer::kValueCache:
      return "value_cache";
    case Buffer::kSlotMapping:
      return "slot_mapping";
    case Buffer::kKeyScales:
      return "key_scales";
    case Buffer::kValueScales:
      return "value_scales";
    case Buffer::kLogits:
      return "logits";
    case Buffer::kOut:
      return "out";
    case Buffer::kLse:
      return "lse";
    case Buffer::kScratchOut:
      return "partial_out";
    case Buffer::kScratchSum:
      return "partial_sum";
    case Buffer::kCount:
      break;
  }
  return "";
}

const char* constant_name(FunctionConstant index) {
  switch (index) {
    case kConstMask:
      return "mask";
    case kConstCausal:
      return "causal";
    case kConstVectorLoads:
      return "vector_loads";
    case kConstSplit:
      return "split";
    case kConstHasSeqLens:
      return "has_seq_lens";
    case kConstBlockSize:
      return "block_size";
    case kConstWindow:
      return "window";
    case kConstSoftcap:
      return "softcap";
    case kConstAlibi:
      return "alibi";
    case kConstSinks:
      return "sinks";
    case kConstTree:
      return "tree";
    case kConstScales:
      return "scales";
    case kConstPacked:
      return "packed";
    case kConstSliced:
      return "sliced";
    case kConstPackedKeys:
      return "packed_keys";
    case kConstMaskMap:
      return "mask_map";
    case kConstTokenMajorOut:
      return "token_major_out";
    case kConstGrouped:
      return "grouped";
  }
  return "";
}

namespace {
const char* metal_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "half";
    case DType::kBFloat16:
      return "bfloat";
    case DType::kInt8:
      return "char";
    case DType::kUInt8:
      return "uchar";
    default:
      return "float";
  }
}
}  // namespace

std::vector<std::pair<std::string, std::string>> macros_of(const KernelSpec& spec) {
  if (spec.kernel == Kernel::kMaskMap) return {};
  std::vector<std::pair<std::string, std::string>> macros{
      {"FATTN_T", metal_type(spec.dtype)}, {"FATTN_SIMDGROUPS", std::to_string(spec.simdgroups)}};
  if (spec.kernel == Kernel::kMerge) {
    macros.emplace_back("FATTN_OUT_T", metal_type(spec.out_dtype));
    return macros;
  }
  if (spec.kernel == Kernel::kSoftmax || spec.kernel == Kernel::kSoftcap) {
    macros.emplace_back("FATTN_ROW_SIMDGROUPS", std::to_string(spec.row_simdgroups));
    macros.emplace_back("FATTN_VECTORS", std::to_string(spec.vectors));
    return macros;
  }
  macros.emplace_back("FATTN_HEAD_DIM", std::to_string(spec.head_dim));
  macros.emplace_back("FATTN_VALUE_DIM", std::to_string(spec.value_dim));
  if (spec.kernel == Kernel::kCacheWrite) {
    macros.emplace_back("FATTN_KV_FORMAT", std::to_string(spec.kv_format));
    macros.emplace_back("FATTN_STORED_T", metal_type(storage_dtype(spec.kv_format, spec.dtype)));
    macros.emplace_back("FATTN_SCALE_T", metal_type(scale_dtype(spec.kv_format)));
    macros.emplace_back("FATTN_SLOT_T", spec.long_slots ? "long" : "int");
    return macros;
  }
  macros.emplace_back("FATTN_ROW_FRAGMENTS", std::to_string(spec.row_fragments));
  macros.emplace_back("FATTN_TILE_KEYS", std::to_string(spec.tile_keys));
  macros.emplace_back("FATTN_ROW_GROUPS", std::to_string(spec.row_groups));
  macros.emplace_back("FATTN_KV_FORMAT", std::to_string(spec.kv_format));
  macros.emplace_back("FATTN_NATIVE_BFLOAT", spec.native_bfloat ? "true" : "false");
  if (spec.kernel == Kernel::kDecodeWide) {
    macros.emplace_back("FATTN_VALUE_IN_KEY", spec.value_in_key ? "true" : "false");
  }
  if (is_prefill(spec.kernel)) {
    macros.emplace_back("FATTN_EARLY_LOADS", spec.early_loads ? "true" : "false");
  }
  return macros;
}

std::vector<ConstantValue> constants_of(const KernelSpec& spec) {
  if (spec.kernel == Kernel::kCacheWrite) {
    return {{kConstVectorLoads, true, spec.vector_loads}, {kConstScales, true, spec.scales}};
  }
  if (spec.kernel == Kernel::kSoftmax || spec.kernel == Kernel::kSoftcap) {
    return {{kConstVectorLoads, true, spec.vector_loads},
            {kConstSoftcap, true, spec.softcap},
            {kConstSliced, true, spec.sliced}};
  }
  return {
      {kConstMask, false, static_cast<uint32_t>(spec.mask)},
      {kConstCausal, true, spec.causal},
      {kConstVectorLoads, true, spec.vector_loads},
      {kConstSplit, true, spec.split},
      {kConstHasSeqLens, true, spec.has_seq_lens},
      {kConstBlockSize, false, spec.block_size},
      {kConstWindow, true, spec.window},
      {kConstSoftcap, true, spec.softcap},
      {kConstAlibi, true, spec.alibi},
      {kConstSinks, true, spec.sinks},
      {kConstTree, true, spec.tree},
      {kConstScales, true, spec.scales},
      {kConstPacked, true, spec.packed},
      {kConstSliced, true, spec.sliced},
      {kConstPackedKeys, true, spec.packed_keys},
      {kConstMaskMap, true, spec.mask_map},
      {kConstTokenMajorOut, true, spec.token_major_out},
      {kConstGrouped, true, spec.grouped},
  };
}

}  // namespace fattn
