#include "kv_format.h"

#include <string>

#include "refuse.h"

namespace fattn {
namespace {

using Kind = Refusal::Kind;

constexpr const char* kNames = "\"auto\", \"int8\", \"fp8_e4m3\" or \"int4\"";

}  // namespace

const char* name_of(KvFormat format) {
  switch (format) {
    case kKvFloat:
      return "float";
    case kKvInt8:
      return "int8";
    case kKvFp8E4M3:
      return "fp8_e4m3";
    case kKvInt4:
      return "int4";
  }
  return "float";
}

std::variant<KvFormat, Refusal> kv_format_of(const char* op, std::string_view kv_format, DType cache_dtype) {
  if (kv_format == "auto") {
    if (is_float(cache_dtype)) return kKvFloat;
    if (cache_dtype == DType::kInt8) return kKvInt8;
    if (cache_dtype == DType::kUInt8) {
      return refuse(Kind::kValue, op, "kv_format \"auto\" does not say what a torch.uint8 cache holds; ",
                    "name it: \"fp8_e4m3\" or \"int4\"");
    }
    return refuse(Kind::kType, op, "a cache of this dtype is not supported; use torch.float32, ",
                  "torch.float16, torch.bfloat16, torch.int8, or torch.uint8 with kv_format");
  }
  for (const KvFormat format : {kKvInt8, kKvFp8E4M3, kKvInt4}) {
    if (kv_format != name_of(format)) continue;
    const DType storage = storage_dtype(format, DType::kOther);
    if (cache_dtype == storage) return format;
    return refuse(
        Kind::kType, op, "kv_format \"", kv_format, "\" needs caches of torch.", name_of(storage),
        cache_dtype == DType::kOther ? "" : std::string(" and these are torch.") + name_of(cache_dtype),
        "; allocate them so, or name the format that they have");
  }
  return refuse(Kind::kValue, op, "kv_format \"", kv_format, "\" is not known; use ", kNames);
}

std::optional<Refusal> check_format_dim(const char* op, const char* what, KvFormat format, int64_t head_dim) {
  if (format != kKvInt4 || head_dim % kInt4Group == 0) return std::nullopt;
  return refuse(Kind::kValue, op, what, " head_dim ", head_dim,
                " cannot be stored as int4, which has groups of ", kInt4Group,
                " columns; use \"fp8_e4m3\" or int8");
}

}  // namespace fattn
