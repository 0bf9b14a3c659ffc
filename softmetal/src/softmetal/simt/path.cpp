// Lexicographic order of paths.
#include "path.h"

#include <algorithm>
#include <vector>

namespace softmetal {
namespace {

std::vector<const softmetal_call*> outermost_first(const softmetal_call* innermost) {
  std::vector<const softmetal_call*> calls;
  for (const softmetal_call* call = innermost; call; call = call->caller) calls.push_back(call);
  std::reverse(calls.begin(), calls.end());
  return calls;
}

const uint32_t* loops(const softmetal_site* site) { return reinterpret_cast<const uint32_t*>(site + 1); }
const uint32_t* iterations(const softmetal_call* call) { return reinterpret_cast<const uint32_t*>(call + 1); }

// Negative if `a` is behind, positive if `b` is. Both are calls in the same execution of one function.
int compare(const softmetal_call* a, const softmetal_call* b) {
  uint32_t depth = std::min(a->site->depth, b->site->depth);
  for (uint32_t i = 0; i < depth && loops(a->site)[i] == loops(b->site)[i]; i++)
    if (iterations(a)[i] != iterations(b)[i]) return iterations(a)[i] < iterations(b)[i] ? -1 : 1;
  return static_cast<int>(a->site->position) - static_cast<int>(b->site->position);
}

}  // namespace

bool is_behind(const softmetal_call* a, const softmetal_call* b) {
  std::vector<const softmetal_call*> first = outermost_first(a), second = outermost_first(b);
  for (size_t i = 0; i < std::min(first.size(), second.size()); i++)
    if (int order = compare(first[i], second[i])) return order < 0;
  return false;
}

}  // namespace softmetal
