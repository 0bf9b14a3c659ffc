// MTLLibrary, MTLFunction and MTLComputePipelineState.
#include "library.h"

#include <algorithm>

#include "faults.h"
#include "system.h"
#include "validation.h"

NSString* const MTLLibraryErrorDomain = @"MTLLibraryErrorDomain";

namespace softmetal {
namespace {

constexpr NSUInteger kMaxThreads = 1024;

Macros read_macros(MTLCompileOptions* options) {
  Macros macros;
  NSDictionary* dictionary = options.preprocessorMacros;
  for (NSString* name in dictionary)
    macros[to_std(name)] = to_std([[dictionary objectForKey:name] description]);
  return macros;
}

std::string version_text(NSUInteger version) {
  return std::to_string(version >> 16) + "." + std::to_string(version & 0xffff);
}

// Versions older than the compiler supports are compiled as its oldest.
std::string language_of(MTLCompileOptions* options) {
  const NSUInteger version = options.languageVersion;
  if (version <= MTLLanguageVersion3_1) return "metal3.1";
  return "metal" + version_text(version);
}

CompileOptions read_options(MTLCompileOptions* given) {
  // Without options Metal uses a new object's defaults.
  MTLCompileOptions* options = given ?: [[[MTLCompileOptions alloc] init] autorelease];
  const char* modes[] = {"safe", "relaxed", "fast"};
  if (options.mathMode < MTLMathModeSafe || options.mathMode > MTLMathModeFast)
    violated("newLibraryWithSource: mathMode " + std::to_string(options.mathMode) +
             " is not a value of MTLMathMode");
  const bool precise = options.mathFloatingPointFunctions == MTLMathFloatingPointFunctionsPrecise;
  return {language_of(options), modes[options.mathMode], precise ? "precise" : "fast"};
}

void report(NSError** error, MTLLibraryError code, const std::string& text) {
  if (error) *error = make_error(MTLLibraryErrorDomain, NSInteger(code), text);
}

}  // namespace

id<MTLLibrary> new_library(NSString* source, MTLCompileOptions* options, NSError** error) {
  if (!source) violated("newLibraryWithSource: the source is nil");
  if (const NSUInteger version = options.languageVersion;
      !supports_language(version >> 16, version & 0xffff)) {
    report(error, MTLLibraryErrorUnsupported,
           "This library is using language version " + version_text(version) +
               " which is not supported on this OS.");
    return nil;
  }
  try {
    auto program = std::make_shared<Program>(to_std(source), read_macros(options), read_options(options),
                                             current_mode());
    for (const std::string& kernel : program->kernel_names()) fault_compilation(kernel, program->macros());
    SMLibrary* library = [[SMLibrary alloc] init];
    library->_program = std::move(program);
    library->_maxThreads = options.maxTotalThreadsPerThreadgroup;
    return library;
  } catch (const CompileError& failure) {
    report(error, MTLLibraryErrorCompileFailure, failure.what());
    return nil;
  }
}

id<MTLComputePipelineState> new_pipeline(MTLComputePipelineDescriptor* descriptor, NSError** error) {
  SMFunction* function = (SMFunction*)descriptor.computeFunction;
  try {
    function->_program->check_complete(function->_name, function->_constants);
    auto pipeline = std::make_unique<Pipeline>(function->_program, function->_name, function->_constants);
    const softmetal_kernel& kernel = pipeline->kernel();
    for (uint32_t i = 0; i < kernel.argument_count; ++i)
      if (kernel.arguments[i].kind == SOFTMETAL_ARG_UNSUPPORTED)
        throw CompileError("cannot create a pipeline for kernel '" + function->_name + "': its parameter '" +
                           kernel.arguments[i].name +
                           "' is a texture, sampler, tensor or function table, which softmetal does not "
                           "support; pass a buffer instead");
    NSUInteger limit = kMaxThreads;
    for (NSUInteger asked :
         {NSUInteger(kernel.max_threads), function->_maxThreads, descriptor.maxTotalThreadsPerThreadgroup})
      if (asked) limit = std::min(limit, asked);
    limit = faulty_max_threads(function->_name, pipeline->macros(), uint32_t(limit));
    SMComputePipelineState* state = [[SMComputePipelineState alloc] init];
    state->_staticThreadgroupBytes = kernel.threadgroup_bytes;
    state->_pipeline = std::move(pipeline);
    state->_name = function->_name;
    state->_maxThreads = limit;
    state->_label = [descriptor.label copy];
    return state;
  } catch (const CompileError& failure) {
    report(error, MTLLibraryErrorInternal, failure.what());
    return nil;
  }
}

}  // namespace softmetal

@interface MTLFunctionConstant (Making)
- (instancetype)initWith:(const softmetal::Program::Constant&)constant;
@end

@implementation MTLFunctionConstant
@synthesize name = _name, type = _type, index = _index, required = _required;
- (instancetype)initWith:(const softmetal::Program::Constant&)constant {
  if ((self = [super init])) {
    _name = [softmetal::to_ns(constant.name) retain];
    _type = MTLDataType(constant.type);
    _index = constant.index;
    _required = constant.required;
  }
  return self;
}
- (void)dealloc {
  [_name release];
  [super dealloc];
}
@end

@implementation SMLibrary
- (NSArray<NSString*>*)functionNames {
  NSMutableArray* names = [NSMutableArray array];
  for (const std::string& name : _program->kernel_names()) [names addObject:softmetal::to_ns(name)];
  return names;
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
  return [self newFunctionWithName:name constantValues:nil error:nullptr];
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)functionName
                        constantValues:(MTLFunctionConstantValues*)values
                                 error:(NSError**)error {
  std::string name = softmetal::to_std(functionName);
  const auto& names = _program->kernel_names();
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    softmetal::report(error, MTLLibraryErrorFunctionNotFound,
                      "the library has no function named '" + name + "'");
    return nil;
  }
  try {
    auto constants = softmetal::resolve_constants(values, *_program);
    if (values) _program->check_complete(name, constants);
    SMFunction* function = [[SMFunction alloc] init];
    function->_program = _program;
    function->_name = name;
    function->_constants = std::move(constants);
    function->_maxThreads = _maxThreads;
    return function;
  } catch (const softmetal::CompileError& failure) {
    softmetal::report(error, MTLLibraryErrorCompileFailure, failure.what());
    return nil;
  }
}
@end

@implementation SMFunction
- (MTLFunctionType)functionType {
  return MTLFunctionTypeKernel;
}
- (NSString*)name {
  return softmetal::to_ns(_name);
}
- (NSDictionary<NSString*, MTLFunctionConstant*>*)functionConstantsDictionary {
  NSMutableDictionary* dictionary = [NSMutableDictionary dictionary];
  for (const softmetal::Program::Constant& constant : _program->constants()) {
    MTLFunctionConstant* info = [[[MTLFunctionConstant alloc] initWith:constant] autorelease];
    [dictionary setObject:info forKey:info.name];
  }
  return dictionary;
}
@end

@implementation SMComputePipelineState
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  return _maxThreads;
}
- (NSUInteger)threadExecutionWidth {
  return SOFTMETAL_SIMD_WIDTH;
}
- (NSUInteger)staticThreadgroupMemoryLength {
  return _staticThreadgroupBytes;
}
@end
