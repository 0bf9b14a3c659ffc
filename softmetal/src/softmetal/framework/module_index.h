// Which module in the cache a source became, so that a source compiled before starts no process.
#pragma once
#include <string>
#include <vector>

namespace softmetal {

// A cached source by digest: of its text, its compiler, and all that the compiler reads.
class IndexEntry {
 public:
  IndexEntry(const std::string& source, const std::vector<std::string>& arguments);

  // Path of the module; empty if the cache does not have it.
  std::string module() const;

  void remember(const std::string& module) const;

 private:
  std::string path_;  // empty if the source includes files: its text does not have theirs
};

// Appends the module's name to the file $SOFTMETAL_REQUESTS, once per process and file.
void log_request(const std::string& module);

}  // namespace softmetal
