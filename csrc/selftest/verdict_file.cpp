#include "verdict_file.h"

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <system_error>

#include "../metal/executor.h"
#include "../metal/hash.h"

namespace fattn {
namespace {

namespace fs = std::filesystem;

// The key of a verdict, as the first lines of its file.
std::string heading(UnitsSize size, const DeviceFacts& device) {
  return "torch_fattn: self-test of tensor operations, format 2\nsize " + name_of(size) + "\ngpu " +
         device.name + ", family " + std::to_string(device.family) + ", " + std::to_string(device.cores) +
         " cores\nsystem " + metal::system_build() + "\nsources " + metal::source_digest() + "\n";
}

std::string text_of(const std::string& heading, const Verdict& verdict) {
  const std::string text = heading + "state " + name_of(verdict.state) + "\nwhy " + verdict.why + "\n";
  return text + "end " + metal::hash_of(text) + "\n";
}

fs::path path_of(const std::string& folder, const std::string& heading) {
  return fs::path(folder) / ("tensor-" + metal::hash_of(heading) + ".txt");
}

}  // namespace

std::optional<Verdict> read_verdict(const std::string& folder, UnitsSize size, const DeviceFacts& device) {
  if (folder.empty()) return std::nullopt;
  const std::string head = heading(size, device);
  std::ifstream file(path_of(folder, head), std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  for (const UnitsState state : {UnitsState::kOff, UnitsState::kThreadgroup, UnitsState::kRegisters}) {
    const std::string begin = head + "state " + name_of(state) + "\nwhy ";
    if (!text.starts_with(begin)) continue;
    const Verdict verdict{state, text.substr(begin.size(), text.find('\n', begin.size()) - begin.size())};
    if (text == text_of(head, verdict)) return verdict;
  }
  return std::nullopt;
}

void write_verdict(const std::string& folder, UnitsSize size, const DeviceFacts& device,
                   const Verdict& verdict) noexcept {
  static std::atomic<int> files{0};
  if (folder.empty()) return;
  fs::path temporary;
  std::error_code ignored;
  try {
    const std::string head = heading(size, device);
    fs::create_directories(folder);
    temporary = fs::path(folder) / (".tensor-" + std::to_string(getpid()) + "-" + std::to_string(files++));
    std::ofstream file(temporary, std::ios::binary);
    file << text_of(head, verdict);
    file.close();
    if (!file) throw std::runtime_error("the disk may be full");
    fs::rename(temporary, path_of(folder, head));
  } catch (...) {
    fs::remove(temporary, ignored);
  }
}

}  // namespace fattn
