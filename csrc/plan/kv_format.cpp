#include "kv_format.h"

#include <string>

#include "refuse.h"

namespace fattn {
namespace {

using Kind = Refusal::Kind;

#define FATTN_ENUMERATOR(number, id, ...) kKv##id,
constexpr KvFormat kKvFormats[] = {FATTN_KV_FORMATS(FATTN_ENUMERATOR)};
#undef FATTN_ENUMERATOR

}  // namespace

const char* name_of(KvFormat format) {
  switch (format) {
#define FATTN_CASE(number, id, name, ...) \
  case kKv##id:                           \
    return name;
    FATTN_KV_FORMATS(FATTN_CASE)
#undef FATTN_CASE
  }
  return "";
}

DType storage_dtype(KvFormat format, DType rows) {
  const DType kRows = rows, kInt8 = DType::kInt8, kUInt8 = DType::kUInt8;
  switch (format) {
#define FATTN_CASE(number, id, name, storage, ...) \
  case kKv##id:                                    \
    return k##storage;
    FATTN_KV_FORMATS(FATTN_CASE)
#undef FATTN_CASE
  }
  return rows;
}

std::string formats_where(bool (*is_one)(KvFormat)) {
  std::string names, last;
  for (const KvFormat format : kKvFormats) {
    if (format == kKvFloat || !is_one(format)) continue;
    if (!last.empty()) names += (names.empty() ? "" : ", ") + last;
    last = std::string("\"") + name_of(format) + "\"";
  }
  return names.empty() ? last : names + " or " + last;
}

std::variant<KvFormat, Refusal> kv_format_of(const char* op, std::string_view kv_format, DType cache_dtype) {
  if (kv_format == "auto") {
    if (is_float(cache_dtype)) return kKvFloat;
    if (cache_dtype == DType::kInt8) return kKvInt8;
    if (cache_dtype == DType::kUInt8) {
      return refuse(Kind::kValue, op, "kv_format \"auto\" is ambiguous for a torch.uint8 cache; ",
                    "name it: ", formats_where([](KvFormat format) {
                      return storage_dtype(format, DType::kOther) == DType::kUInt8;
                    }));
    }
    return refuse(Kind::kType, op, "a cache of this dtype is not supported; use torch.float32, ",
                  "torch.float16, torch.bfloat16, torch.int8, or torch.uint8 with kv_format");
  }
  for (const KvFormat format : kKvFormats) {
    if (format == kKvFloat || kv_format != name_of(format)) continue;
    const DType storage = storage_dtype(format, DType::kOther);
    if (cache_dtype == storage) return format;
    return refuse(
        Kind::kType, op, "kv_format \"", kv_format, "\" needs caches of torch.", name_of(storage),
        cache_dtype == DType::kOther ? "" : std::string(" and these are torch.") + name_of(cache_dtype),
        "; allocate them so, or name the format that they have");
  }
  return refuse(Kind::kValue, op, "kv_format \"", kv_format, "\" is not known; use \"auto\", ",
                formats_where([](KvFormat) { return true; }));
}

std::optional<Refusal> check_format_dim(const char* op, const char* what, KvFormat format, int64_t head_dim) {
  if (scales_kind(format) != kScalesGroup || head_dim % kInt4Group == 0) return std::nullopt;
  return refuse(Kind::kValue, op, what, " head_dim ", head_dim, " cannot be stored as ", name_of(format),
                ", which has groups of ", kInt4Group, " columns; use ",
                formats_where([](KvFormat other) { return has_row_scales(other); }));
}

}  // namespace fattn
