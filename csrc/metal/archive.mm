// A file name is <hash of its description>-<hash of its bytes>.metalarchive, in a folder named by GPU, system
// and sources, so that truncated or changed files are detected before Metal reads them. Each process writes a
// temporary file and renames it, so several may write the same archive.
#include "pipelines.h"

#include <unistd.h>

#include <atomic>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <string_view>
#include <system_error>

#include "executor.h"
#include "foundation.h"
#include "hash.h"
#include "mps_bridge.h"

namespace fattn::metal {
namespace {

namespace fs = std::filesystem;

constexpr const char* kEnding = ".metalarchive";

std::string hash_of_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return hash_of(std::string(std::istreambuf_iterator<char>(file), {}));
}

struct Folder {
  std::mutex mutex;
  std::string path;
};
Folder& chosen_folder() {
  static auto& folder = *new Folder;
  return folder;
}

std::string words_of(NSString* text) {
  std::string words = utf8(text);
  for (char& c : words) {
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '.') c = '-';
  }
  return words;
}

// The folder for this GPU, system and sources. Empty: archives are off.
fs::path folder() {
  Folder& chosen = chosen_folder();
  std::lock_guard lock(chosen.mutex);
  if (chosen.path.empty()) return {};
  static const std::string here =
      words_of([metal_device() name]) + "-family" + std::to_string(device_facts().family) + "-" +
      words_of([[NSProcessInfo processInfo] operatingSystemVersionString]) + "-" + source_digest();
  return fs::path(chosen.path) / here;
}

NSURL* url_of(const fs::path& path) {
  return [NSURL fileURLWithPath:[NSString stringWithUTF8String:path.c_str()]];
}

id<MTLBinaryArchive> new_archive(NSURL* url) {
  MTLBinaryArchiveDescriptor* descriptor = [[[MTLBinaryArchiveDescriptor alloc] init] autorelease];
  descriptor.url = url;
  NSError* error = nil;
  return [metal_device() newBinaryArchiveWithDescriptor:descriptor error:&error];
}

id<MTLComputePipelineState> new_pipeline_of(MTLComputePipelineDescriptor* descriptor, const fs::path& path) {
  id<MTLBinaryArchive> archive = new_archive(url_of(path));
  if (archive == nil) return nil;
  descriptor.binaryArchives = [NSArray arrayWithObject:archive];
  [archive release];
  NSError* error = nil;
  id<MTLComputePipelineState> state =
      [metal_device() newComputePipelineStateWithDescriptor:descriptor
                                                    options:MTLPipelineOptionFailOnBinaryArchiveMiss
                                                 reflection:nil
                                                      error:&error];
  descriptor.binaryArchives = nil;
  return state;
}

void write_archive(MTLComputePipelineDescriptor* descriptor, const fs::path& path) {
  id<MTLBinaryArchive> archive = [new_archive(nil) autorelease];
  NSError* error = nil;
  if (archive == nil || ![archive addComputePipelineFunctionsWithDescriptor:descriptor error:&error]) return;
  [archive serializeToURL:url_of(path) error:&error];
}

}  // namespace

void set_archive_folder(const std::string& path) {
  Folder& chosen = chosen_folder();
  std::lock_guard lock(chosen.mutex);
  chosen.path = path;
}

id<MTLComputePipelineState> new_archived_pipeline(MTLComputePipelineDescriptor* descriptor,
                                                  const std::string& what) noexcept {
  try {
    const AutoreleasePool pool;
    const fs::path place = folder();
    if (place.empty()) return nil;
    const std::string begin = hash_of(what) + "-";
    for (const fs::directory_entry& entry : fs::directory_iterator(place)) {
      const std::string name = entry.path().filename().string();
      if (name.rfind(begin, 0) != 0 || entry.path().extension() != kEnding) continue;
      std::error_code ignored;
      if (!entry.is_regular_file(ignored)) continue;
      const bool whole = name == begin + hash_of_file(entry.path()) + kEnding;
      if (id<MTLComputePipelineState> state = whole ? new_pipeline_of(descriptor, entry.path()) : nil) {
        return state;
      }
      fs::remove(entry.path(), ignored);  // keep_pipeline writes another
    }
  } catch (...) {  // no folder, no permission; on macOS also Objective-C exceptions
    descriptor.binaryArchives = nil;
  }
  return nil;
}

void keep_pipeline(MTLComputePipelineDescriptor* descriptor, const std::string& what) noexcept {
  static std::atomic<int> files{0};
  fs::path temporary;
  try {
    const AutoreleasePool pool;
    const fs::path place = folder();
    if (place.empty()) return;
    fs::create_directories(place);
    temporary = place / (".writing-" + std::to_string(getpid()) + "-" + std::to_string(files++));
    write_archive(descriptor, temporary);
    if (fs::exists(temporary)) {
      fs::rename(temporary, place / (hash_of(what) + "-" + hash_of_file(temporary) + kEnding));
    }
  } catch (...) {
    std::error_code ignored;
    fs::remove(temporary, ignored);
  }
}

}  // namespace fattn::metal
