#include "faults.h"

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

namespace softmetal {
namespace {

struct Fault {
  softmetal_fault given;
  std::string kernel, macro;
  uint64_t hits = 0;

  bool is_of(const std::string& name, const Macros& macros) const {
    if (name != kernel) return false;
    if (macro.empty()) return true;
    const size_t equals = macro.find('=');
    const auto found = macros.find(macro.substr(0, equals));
    return found != macros.end() && found->second == macro.substr(equals + 1);
  }
};

struct Faults {
  std::mutex mutex;
  std::map<int, Fault> by_number;
  int next = 0;
};
Faults& faults() {
  static Faults* instance = new Faults;
  return *instance;
}

// Calls visit(fault), which returns whether the fault took effect.
template <class Visit>
void for_each(const std::string& kernel, const Macros& macros, const Visit& visit) {
  std::lock_guard lock(faults().mutex);
  for (auto& [number, fault] : faults().by_number)
    if (fault.is_of(kernel, macros) && visit(fault.given)) ++fault.hits;
}

}  // namespace

void fault_compilation(const std::string& kernel, const Macros& macros) {
  uint32_t delay = 0;
  bool fails = false;
  for_each(kernel, macros, [&](const softmetal_fault& fault) {
    delay += fault.delay_ms;
    fails |= fault.fails != 0;
    return fault.delay_ms || fault.fails;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(delay));
  if (fails) throw CompileError("program_source: error: an injected fault of kernel '" + kernel + "'");
}

void fault_dispatch(const std::string& kernel, const Macros& macros) {
  bool stops = false;
  for_each(kernel, macros, [&](const softmetal_fault& fault) {
    stops |= fault.stops != 0;
    return fault.stops != 0;
  });
  if (stops) throw std::runtime_error("an injected fault stopped kernel '" + kernel + "'");
}

uint32_t faulty_max_threads(const std::string& kernel, const Macros& macros, uint32_t threads) {
  for_each(kernel, macros, [&](const softmetal_fault& fault) {
    if (!fault.max_threads || fault.max_threads >= threads) return false;
    threads = fault.max_threads;
    return true;
  });
  return threads;
}

void fault_results(const std::string& kernel, const Macros& macros, uint64_t groups,
                   const softmetal_arguments& arguments) {
  for_each(kernel, macros, [&](const softmetal_fault& fault) {
    if (fault.slot < 0 || groups < fault.least_groups) return false;
    char* buffer = static_cast<char*>(arguments.buffer[fault.slot]);
    uint32_t word;
    if (!buffer || fault.byte + sizeof word > arguments.buffer_length[fault.slot]) return false;
    memcpy(&word, buffer + fault.byte, sizeof word);
    word ^= fault.flipped;
    memcpy(buffer + fault.byte, &word, sizeof word);
    return true;
  });
}

}  // namespace softmetal

using softmetal::faults;

extern "C" {

int softmetal_add_fault(const softmetal_fault* fault) {
  std::lock_guard lock(faults().mutex);
  const int number = faults().next++;
  faults().by_number[number] = {*fault, fault->kernel, fault->macro};
  return number;
}

uint64_t softmetal_fault_hits(int number) {
  std::lock_guard lock(faults().mutex);
  return faults().by_number.at(number).hits;
}

void softmetal_remove_fault(int number) {
  std::lock_guard lock(faults().mutex);
  faults().by_number.erase(number);
}
}
