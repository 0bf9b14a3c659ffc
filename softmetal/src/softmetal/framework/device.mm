// MTLDevice: properties of this machine, and factories of all other objects.
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "buffer.h"
#include "host.h"
#include "library.h"
#include "objects.h"
#include "system.h"
#include "validation.h"

namespace softmetal {
namespace {

constexpr NSUInteger kMaxThreads = 1024;

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "this CPU";
}

// The architecture of the base model, such as applegpu_g17g for M5.
std::string architecture_name() {
  const unsigned family = apple_family();
  const unsigned generation = family == 9 ? 15 : family >= 10 ? family + 7 : family + 6;
  return "applegpu_g" + std::to_string(generation) + "g";
}

}  // namespace

NSString* to_ns(const std::string& text) {
  NSString* string = [NSString stringWithUTF8String:text.c_str()];
  return string ? string : @"(text that is not UTF-8)";
}
std::string to_std(NSString* text) { return text ? [text UTF8String] : ""; }
NSError* make_error(NSString* domain, NSInteger code, const std::string& text) {
  return [NSError errorWithDomain:domain code:code userInfo:@{NSLocalizedDescriptionKey : to_ns(text)}];
}

id<MTLDevice> system_device() {
  static SMDevice* device = [[SMDevice alloc] init];
  return device;
}

const char* device_name() {
  static const std::string name = "Software Metal on " + cpu_model();
  return name.c_str();
}
size_t device_memory() {
  static const size_t bytes = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE)) / 4 * 3;
  return bytes;
}
static unsigned claimed(const char* variable, unsigned usual) {
  const char* value = getenv(variable);
  return value && *value ? unsigned(atoi(value)) : usual;
}
unsigned core_count() { return claimed("SOFTMETAL_GPU_CORES", 8); }
unsigned apple_family() { return claimed("SOFTMETAL_GPU_FAMILY", 8); }

}  // namespace softmetal

extern "C" id<MTLDevice> MTLCreateSystemDefaultDevice(void) { return [softmetal::system_device() retain]; }

@implementation SMObject
@synthesize label = _label;
- (id<MTLDevice>)device {
  return softmetal::system_device();
}
- (void)dealloc {
  [_label release];
  [super dealloc];
}
@end

@implementation MTLArchitecture
- (NSString*)name {
  return _name;
}
- (instancetype)init {
  if ((self = [super init])) _name = [softmetal::to_ns(softmetal::architecture_name()) retain];
  return self;
}
- (id)copyWithZone:(NSZone*)zone {
  return [self retain];
}
- (void)dealloc {
  [_name release];
  [super dealloc];
}
@end

@implementation SMDevice
- (NSString*)name {
  return softmetal::to_ns(softmetal::device_name());
}
- (MTLArchitecture*)architecture {
  if (softmetal::apple_family() < 7) return nil;  // a virtual machine's GPU may have none
  return [[[MTLArchitecture alloc] init] autorelease];
}
- (uint64_t)registryID {
  return 1;
}
- (MTLSize)maxThreadsPerThreadgroup {
  return MTLSizeMake(softmetal::kMaxThreads, softmetal::kMaxThreads, softmetal::kMaxThreads);
}
- (NSUInteger)maxThreadgroupMemoryLength {
  return SOFTMETAL_MAX_THREADGROUP_BYTES;
}
- (NSUInteger)maxBufferLength {
  return softmetal::device_memory();
}
- (uint64_t)recommendedMaxWorkingSetSize {
  return softmetal::device_memory();
}
- (NSUInteger)currentAllocatedSize {
  return softmetal::allocated_bytes();
}
- (BOOL)hasUnifiedMemory {
  return YES;
}
- (BOOL)isLowPower {
  return NO;
}
- (BOOL)isHeadless {
  return YES;
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  const unsigned apple = softmetal::apple_family();
  return (family >= MTLGPUFamilyApple1 && family < MTLGPUFamilyApple1 + NSInteger(apple)) ||
         family == MTLGPUFamilyMac2 || (family >= MTLGPUFamilyCommon1 && family <= MTLGPUFamilyCommon3) ||
         (family == MTLGPUFamilyMetal3 && apple >= 7) ||
         (family == MTLGPUFamilyMetal4 && apple >= 7 && softmetal::supports_language(4, 0));
}

- (id<MTLCommandQueue>)newCommandQueue {
  return [[SMCommandQueue alloc] init];
}
- (id<MTLCommandQueue>)newCommandQueueWithMaxCommandBufferCount:(NSUInteger)count {
  return [self newCommandQueue];
}

- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  if (length == 0) softmetal::violated("newBufferWithLength:options: needs a length above 0");
  if (length > self.maxBufferLength)
    softmetal::violated("newBufferWithLength:options: length ", length, " exceeds maxBufferLength ",
                        self.maxBufferLength);
  return softmetal::new_buffer(length, options);
}
- (id<MTLBuffer>)newBufferWithBytes:(const void*)pointer
                             length:(NSUInteger)length
                            options:(MTLResourceOptions)options {
  SMBuffer* buffer = (SMBuffer*)[self newBufferWithLength:length options:options];
  if (buffer) memcpy(buffer->_contents, pointer, length);
  return buffer;
}
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void*)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void*, NSUInteger))deallocator {
  if ((uintptr_t)pointer % 4096 || length % 4096 || length == 0)
    softmetal::violated("newBufferWithBytesNoCopy: pointer and length must be multiples of the page size");
  id block = deallocator ? (id)Block_copy(deallocator) : nil;
  return softmetal::new_buffer_over(pointer, length, options, [=] {
    if (!block) return;
    ((void (^)(void*, NSUInteger))block)(pointer, length);
    Block_release((void*)block);
  });
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function
                                                             error:(NSError**)error {
  MTLComputePipelineDescriptor* descriptor = [[[MTLComputePipelineDescriptor alloc] init] autorelease];
  descriptor.computeFunction = function;
  return [self newComputePipelineStateWithDescriptor:descriptor
                                             options:MTLPipelineOptionNone
                                          reflection:nullptr
                                               error:error];
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source
                               options:(MTLCompileOptions*)options
                                 error:(NSError**)error {
  return softmetal::new_library(source, options, error);
}
- (id<MTLComputePipelineState>)
    newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor*)descriptor
                                  options:(MTLPipelineOption)options
                               reflection:(MTLAutoreleasedComputePipelineReflection*)reflection
                                    error:(NSError**)error {
  if (!descriptor.computeFunction)
    softmetal::violated("newComputePipelineState: the compute function is nil");
  if (reflection) *reflection = nil;
  if ((options & MTLPipelineOptionFailOnBinaryArchiveMiss) && !softmetal::is_archived(descriptor)) {
    softmetal::report_archive_miss(error);
    return nil;
  }
  return softmetal::new_pipeline(descriptor, error);
}
- (id<MTLBinaryArchive>)newBinaryArchiveWithDescriptor:(MTLBinaryArchiveDescriptor*)descriptor
                                                 error:(NSError**)error {
  return softmetal::new_archive(descriptor, error);
}
@end
