// Maps sources to modules in the cache, so that a known source is not compiled in a new process.
#pragma once
#include <string>
#include <vector>

namespace softmetal {

// A cached source, by the digest of its text, its compiler and all files that the compiler reads.
class IndexEntry {
 public:
  IndexEntry(const std::string& source, const std::vector<std::string>& arguments);

  // Path of the module; empty if it is not in the cache.
  std::string module() const;

  void remember(const std::string& module) const;

 private:
  std::string path_;  // empty if the source includes files, which the digest does not cover
};

// Appends the module's name to the file $SOFTMETAL_REQUESTS, once per process and file.
void log_request(const std::string& module);

}  // namespace softmetal
