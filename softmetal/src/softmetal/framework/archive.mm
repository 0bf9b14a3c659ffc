// MTLBinaryArchive: a list of compiled pipelines, without their code, because the MSL compiler has its own
// cache. Hits, misses, and files read and refused are as on a Mac.
//
// The file is a line of text, a line for each pipeline, and their number.
#include <fstream>

#include "host.h"
#include "library.h"
#include "validation.h"

NSString* const MTLBinaryArchiveDomain = @"MTLBinaryArchiveDomain";

namespace softmetal {
namespace {

constexpr char kFirstLine[] = "softmetal binary archive 1";
constexpr char kLastLine[] = "pipelines: ";

void report(NSError** error, MTLBinaryArchiveError code, const std::string& text) {
  if (error) *error = make_error(MTLBinaryArchiveDomain, NSInteger(code), text);
}

// Everything that determines the code: the GPU, the compiled source, the function, its constants and threads.
std::string archive_key(MTLComputePipelineDescriptor* descriptor) {
  SMFunction* function = (SMFunction*)descriptor.computeFunction;
  const std::string& path = function->_program->module_path(Mode::kFast);
  std::string key =
      text("family ", apple_family(), " ", path.substr(path.rfind('/') + 1), " ", function->_name);
  for (const auto& [index, value] : function->_constants)
    key += text(" ", index, ":", value.type, "=", value.bits);
  return key + text(" threads ", function->_maxThreads, " ", descriptor.maxTotalThreadsPerThreadgroup);
}

// Returns false if the file is incomplete.
bool read_archive(const std::string& path, std::set<std::string>& pipelines) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line) || line != kFirstLine) return false;
  while (std::getline(file, line)) {
    if (line == kLastLine + std::to_string(pipelines.size())) return !std::getline(file, line);
    pipelines.insert(line);
  }
  return false;
}

bool write_archive(const std::string& path, const std::set<std::string>& pipelines) {
  std::ofstream file(path);
  file << kFirstLine << '\n';
  for (const std::string& pipeline : pipelines) file << pipeline << '\n';
  file << kLastLine << pipelines.size() << '\n';
  return bool(file.flush());
}

std::string path_of(NSURL* url) { return url && [url isFileURL] ? to_std([url path]) : ""; }

}  // namespace

id<MTLBinaryArchive> new_archive(MTLBinaryArchiveDescriptor* descriptor, NSError** error) {
  if (!descriptor) violated("newBinaryArchiveWithDescriptor: the descriptor is nil");
  SMBinaryArchive* archive = [[SMBinaryArchive alloc] init];
  if (descriptor.url && !read_archive(path_of(descriptor.url), archive->_pipelines)) {
    report(error, MTLBinaryArchiveErrorInvalidFile, "the file at this URL is not a complete binary archive");
    [archive release];
    return nil;
  }
  return archive;
}

bool is_archived(MTLComputePipelineDescriptor* descriptor) {
  if (descriptor.binaryArchives.count == 0) return false;
  const std::string key = archive_key(descriptor);
  for (id<MTLBinaryArchive> archive in descriptor.binaryArchives)
    if (((SMBinaryArchive*)archive)->_pipelines.count(key)) return true;
  return false;
}

void report_archive_miss(NSError** error) {
  report(error, MTLBinaryArchiveErrorUnexpectedElement, "no binary archive has this pipeline");
}

}  // namespace softmetal

@implementation MTLBinaryArchiveDescriptor
@synthesize url = _url;
- (instancetype)init {
  if ((self = [super init])) ++softmetal::live_count(softmetal::MetalClass::kBinaryArchiveDescriptor);
  return self;
}
- (id)copyWithZone:(NSZone*)zone {
  MTLBinaryArchiveDescriptor* copy = [[MTLBinaryArchiveDescriptor alloc] init];
  copy.url = _url;
  return copy;
}
- (void)dealloc {
  [_url release];
  --softmetal::live_count(softmetal::MetalClass::kBinaryArchiveDescriptor);
  [super dealloc];
}
@end

@implementation SMBinaryArchive
- (BOOL)addComputePipelineFunctionsWithDescriptor:(MTLComputePipelineDescriptor*)descriptor
                                            error:(NSError**)error {
  if (!descriptor.computeFunction) {
    softmetal::report(error, MTLBinaryArchiveErrorUnexpectedElement,
                      "the descriptor has no compute function");
    return NO;
  }
  // As on a Mac, a pipeline that does not compile cannot be added.
  id<MTLComputePipelineState> state = softmetal::new_pipeline(descriptor, error);
  if (!state) return NO;
  [state release];
  _pipelines.insert(softmetal::archive_key(descriptor));
  return YES;
}
- (BOOL)serializeToURL:(NSURL*)url error:(NSError**)error {
  if (_pipelines.empty()) {
    softmetal::report(error, MTLBinaryArchiveErrorUnexpectedElement,
                      "an archive without pipelines has no file");
    return NO;
  }
  if (!softmetal::write_archive(softmetal::path_of(url), _pipelines)) {
    softmetal::report(error, MTLBinaryArchiveErrorInternalError, "the archive cannot be written to this URL");
    return NO;
  }
  return YES;
}
@end
