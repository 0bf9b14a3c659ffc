#include "tensor_file.h"

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "../metal/executor.h"
#include "../metal/hash.h"
#include "../metal/system.h"

namespace fattn {
namespace {

namespace fs = std::filesystem;
using metal::hash_of;

// What a verdict belongs to, as the first lines of its file.
std::string heading(TensorSize size, const DeviceFacts& device) {
  return "torch_fattn: self-test of tensor operations, format 1\nsize " + name_of(size) + "\ngpu " +
         device.name + ", family " + std::to_string(device.family) + ", " + std::to_string(device.cores) +
         " cores\nsystem " + metal::system_build() + "\nsources " + metal::source_digest() + "\n";
}

std::string ending(const std::string& text) { return "end " + hash_of(text) + "\n"; }

fs::path path_of(const std::string& folder, const std::string& heading) {
  return fs::path(folder) / ("tensor-" + hash_of(heading) + ".txt");
}

// The rest of a line that begins like this, from `text`, from which it is removed.
std::optional<std::string> take_line(std::string& text, const std::string& begin) {
  const size_t end = text.find('\n');
  if (end == std::string::npos || text.compare(0, begin.size(), begin) != 0) return std::nullopt;
  const std::string rest = text.substr(begin.size(), end - begin.size());
  text.erase(0, end + 1);
  return rest;
}

}  // namespace

std::optional<TensorVerdict> read_verdict(const std::string& folder, TensorSize size,
                                          const DeviceFacts& device) {
  if (folder.empty()) return std::nullopt;
  const std::string head = heading(size, device);
  std::ifstream file(path_of(folder, head), std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(file), {});
  const std::string whole = text;
  if (text.compare(0, head.size(), head) != 0) return std::nullopt;
  text.erase(0, head.size());
  const auto state = take_line(text, "state ");
  const auto why = state ? take_line(text, "why ") : std::nullopt;
  if (!why || text != ending(whole.substr(0, whole.size() - text.size()))) return std::nullopt;
  for (const TensorState known : {TensorState::kOff, TensorState::kThreadgroup, TensorState::kRegisters}) {
    if (*state == name_of(known)) return TensorVerdict{known, *why};
  }
  return std::nullopt;
}

void write_verdict(const std::string& folder, TensorSize size, const DeviceFacts& device,
                   const TensorVerdict& verdict) noexcept {
  static std::atomic<int> files{0};
  if (folder.empty()) return;
  fs::path temporary;
  std::error_code ignored;
  try {
    const std::string head = heading(size, device);
    const std::string text = head + "state " + name_of(verdict.state) + "\nwhy " + verdict.why + "\n";
    fs::create_directories(folder);
    temporary = fs::path(folder) / (".tensor-" + std::to_string(getpid()) + "-" + std::to_string(files++));
    {
      std::ofstream file(temporary, std::ios::binary);
      file << text << ending(text);
      file.close();
      if (!file) throw std::runtime_error("the disk may be full");
    }
    fs::rename(temporary, path_of(folder, head));
  } catch (...) {
    fs::remove(temporary, ignored);
  }
}

}  // namespace fattn
