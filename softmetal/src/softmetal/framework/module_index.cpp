// The index is a file per source in the cache's folder: the module's name, and the SHA-1 of its content.
#include "module_index.h"

#include <c10/util/hash.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>
#include <utility>

#include "environment.h"

namespace softmetal {
namespace {
namespace fs = std::filesystem;

fs::path cache_folder() {
  return environment("SOFTMETAL_CACHE", environment("HOME", "/") + "/.cache/softmetal");
}

// A digest of the translator, its headers, the ABI, clang and its plugins: what toolchain_version in
// msl/compile.py reads.
std::string read_toolchain() {
  fs::path package = fs::path(package_parent()) / "softmetal";
  std::vector<fs::path> files{package / "simt" / "abi.h"};
  std::error_code missing;
  for (const fs::directory_entry& entry : fs::directory_iterator(package / "msl", missing))
    if (entry.path().extension() == ".py") files.push_back(entry.path());
  for (const char* folder : {"common", "host", "stub"})
    for (const fs::directory_entry& entry :
         fs::recursive_directory_iterator(package / "msl" / folder, missing))
      if (entry.is_regular_file()) files.push_back(entry.path());
  for (const char* library : {"rules", "passes", "arithmetic"})
    files.push_back(package / "_build" / ("libsoftmetal_" + std::string(library) + ".so"));
  std::sort(files.begin(), files.end());
  std::string text;
  for (const fs::path& file : files) text += content_of(file);
  std::istringstream folders(environment("PATH", ""));
  for (std::string folder; std::getline(folders, folder, ':');)
    if (auto time = fs::last_write_time(folder + "/clang++-19", missing); !missing) {
      text += std::to_string(time.time_since_epoch().count());
      break;
    }
#ifdef __x86_64__
  text += std::to_string(bool(__builtin_cpu_supports("x86-64-v3")));
#endif
  return c10::sha1(text).str();
}

const std::string& toolchain() {
  static const std::string digest = read_toolchain();
  return digest;
}

bool includes_files(const std::string& source) {
  for (size_t at = source.find("include"); at != std::string::npos; at = source.find("include", at + 1)) {
    size_t quote = source.find_first_not_of(" \t", at + 7);
    if (quote != std::string::npos && source[quote] == '"') return true;
  }
  return false;
}

}  // namespace

IndexEntry::IndexEntry(const std::string& source, const std::vector<std::string>& arguments) {
  if (includes_files(source)) return;
  std::string key = toolchain();
  for (const char* name : {"SOFTMETAL_CONTRACT", "SOFTMETAL_FAST_MATH", "SOFTMETAL_REFUSE"})
    key += environment(name, "") + '\0';
  for (const std::string& argument : arguments) key += argument + '\0';
  path_ = cache_folder() / ("source-" + c10::sha1(key + source).str());
}

std::string IndexEntry::module() const {
  std::string name, digest;
  if (path_.empty() || !(std::ifstream(path_) >> name >> digest)) return "";
  fs::path module = cache_folder() / name;
  return c10::sha1(content_of(module)).str() == digest ? module.string() : "";
}

void IndexEntry::remember(const std::string& module) const {
  if (path_.empty() || read_toolchain() != toolchain()) return;  // another compiler made it
  std::string scratch = path_ + "." + std::to_string(getpid());
  std::ofstream(scratch) << fs::path(module).filename().string() << " " << c10::sha1(content_of(module)).str()
                         << "\n";
  std::error_code failed;  // then the next process compiles the source again
  fs::rename(scratch, path_, failed);
}

void log_request(const std::string& module) {
  std::string path = environment("SOFTMETAL_REQUESTS", "");
  if (path.empty()) return;
  static std::mutex* mutex = new std::mutex;
  static std::set<std::pair<std::string, std::string>>* logged =
      new std::set<std::pair<std::string, std::string>>;
  std::lock_guard lock(*mutex);
  if (!logged->emplace(path, module).second) return;
  std::string line = fs::path(module).filename().string() + "\n";
  int file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file < 0) return;
  [[maybe_unused]] ssize_t written = write(file, line.data(), line.size());
  close(file);
}

}  // namespace softmetal
