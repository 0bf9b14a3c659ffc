// MTLCompileOptions, MTLComputePipelineDescriptor, MTLFunctionConstantValues and their resolution.
#include <cstring>

#include "library.h"
#include "system.h"
#include "validation.h"

namespace softmetal {
struct ConstantValues;
}

@interface MTLFunctionConstantValues (Values)
@property(readonly) softmetal::ConstantValues* values;
@end

namespace {

using softmetal::ConstantValue;

size_t type_size(MTLDataType type) {
  switch (type) {
    case MTLDataTypeBool:
    case MTLDataTypeChar:
    case MTLDataTypeUChar:
      return 1;
    case MTLDataTypeHalf:
    case MTLDataTypeBFloat:
    case MTLDataTypeShort:
    case MTLDataTypeUShort:
      return 2;
    case MTLDataTypeFloat:
    case MTLDataTypeInt:
    case MTLDataTypeUInt:
    case MTLDataTypeHalf2:
    case MTLDataTypeShort2:
    case MTLDataTypeUShort2:
      return 4;
    case MTLDataTypeLong:
    case MTLDataTypeULong:
    case MTLDataTypeFloat2:
    case MTLDataTypeInt2:
    case MTLDataTypeUInt2:
    case MTLDataTypeHalf3:
    case MTLDataTypeHalf4:
      return 8;
    default:
      softmetal::violated("a function constant cannot have MTLDataType ", NSUInteger(type),
                          " in softmetal: scalars and vectors up to 8 bytes only");
  }
}

ConstantValue read_value(const void* value, MTLDataType type) {
  if (!value) softmetal::violated("setConstantValue: the value is null");
  ConstantValue constant{uint32_t(type), 0};
  memcpy(&constant.bits, value, type_size(type));
  return constant;
}

}  // namespace

namespace softmetal {
struct ConstantValues {
  ConstantsByIndex by_index;
  std::map<std::string, ConstantValue> by_name;
};
struct CountedConstantValues : ConstantValues {
  Counted<MetalClass::kFunctionConstantValues> counted;
};
}  // namespace softmetal

@implementation MTLFunctionConstantValues
- (instancetype)init {
  if ((self = [super init])) _values = new softmetal::CountedConstantValues;
  return self;
}
- (softmetal::ConstantValues*)values {
  return static_cast<softmetal::CountedConstantValues*>(_values);
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type atIndex:(NSUInteger)index {
  if (index > 65535) softmetal::violated("function constant index ", index, " is above 65535");
  self.values->by_index[uint32_t(index)] = read_value(value, type);
}
- (void)setConstantValues:(const void*)values type:(MTLDataType)type withRange:(NSRange)range {
  auto* bytes = static_cast<const char*>(values);
  for (NSUInteger i = 0; i < range.length; ++i)
    [self setConstantValue:bytes + i * type_size(type) type:type atIndex:range.location + i];
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type withName:(NSString*)name {
  self.values->by_name[softmetal::to_std(name)] = read_value(value, type);
}
- (void)reset {
  self.values->by_index.clear();
  self.values->by_name.clear();
}
- (id)copyWithZone:(NSZone*)zone {
  MTLFunctionConstantValues* copy = [[MTLFunctionConstantValues alloc] init];
  copy.values->by_index = self.values->by_index;
  copy.values->by_name = self.values->by_name;
  return copy;
}
- (void)dealloc {
  delete static_cast<softmetal::CountedConstantValues*>(_values);
  [super dealloc];
}
@end

namespace softmetal {

ConstantsByIndex resolve_constants(MTLFunctionConstantValues* values, const Program& program) {
  static const ConstantValues none;
  const ConstantValues& given = values ? *values.values : none;
  ConstantsByIndex resolved = given.by_index;
  for (const Program::Constant& constant : program.constants()) {
    auto named = given.by_name.find(constant.name);
    if (named != given.by_name.end()) resolved[constant.index] = named->second;
    auto found = resolved.find(constant.index);
    if (found == resolved.end()) continue;
    if (found->second.type != constant.type)
      throw CompileError(text("function constant '", constant.name, "' (index ", constant.index,
                              ") was set with MTLDataType ", found->second.type, " but is declared with ",
                              constant.type));
  }
  return resolved;
}

}  // namespace softmetal

@implementation MTLCompileOptions
@synthesize preprocessorMacros = _preprocessorMacros, fastMathEnabled = _fastMathEnabled,
            mathMode = _mathMode, mathFloatingPointFunctions = _mathFloatingPointFunctions,
            languageVersion = _languageVersion, preserveInvariance = _preserveInvariance,
            maxTotalThreadsPerThreadgroup = _maxTotalThreadsPerThreadgroup;
- (instancetype)init {
  if ((self = [super init])) {
    ++softmetal::live_count(softmetal::MetalClass::kCompileOptions);
    _fastMathEnabled = YES;
    _mathMode = MTLMathModeFast;
    _languageVersion = softmetal::supports_language(3, 2) ? MTLLanguageVersion3_2 : MTLLanguageVersion3_1;
  }
  return self;
}
// The older switch, which sets both newer options.
- (void)setFastMathEnabled:(BOOL)enabled {
  _fastMathEnabled = enabled;
  _mathMode = enabled ? MTLMathModeFast : MTLMathModeSafe;
  _mathFloatingPointFunctions =
      enabled ? MTLMathFloatingPointFunctionsFast : MTLMathFloatingPointFunctionsPrecise;
}
- (id)copyWithZone:(NSZone*)zone {
  MTLCompileOptions* copy = [[MTLCompileOptions alloc] init];
  copy.preprocessorMacros = _preprocessorMacros;
  copy.fastMathEnabled = self.fastMathEnabled;
  copy.mathMode = self.mathMode;
  copy.mathFloatingPointFunctions = self.mathFloatingPointFunctions;
  copy.languageVersion = self.languageVersion;
  copy.preserveInvariance = self.preserveInvariance;
  copy.maxTotalThreadsPerThreadgroup = self.maxTotalThreadsPerThreadgroup;
  return copy;
}
- (void)dealloc {
  [_preprocessorMacros release];
  --softmetal::live_count(softmetal::MetalClass::kCompileOptions);
  [super dealloc];
}
@end

@implementation MTLComputePipelineDescriptor
@synthesize label = _label, computeFunction = _computeFunction,
            threadGroupSizeIsMultipleOfThreadExecutionWidth =
                _threadGroupSizeIsMultipleOfThreadExecutionWidth,
            maxTotalThreadsPerThreadgroup = _maxTotalThreadsPerThreadgroup, binaryArchives = _binaryArchives;
- (instancetype)init {
  if ((self = [super init])) ++softmetal::live_count(softmetal::MetalClass::kComputePipelineDescriptor);
  return self;
}
- (void)reset {
  self.label = nil;
  self.computeFunction = nil;
  self.threadGroupSizeIsMultipleOfThreadExecutionWidth = NO;
  self.maxTotalThreadsPerThreadgroup = 0;
  self.binaryArchives = nil;
}
- (id)copyWithZone:(NSZone*)zone {
  MTLComputePipelineDescriptor* copy = [[MTLComputePipelineDescriptor alloc] init];
  copy.label = _label;
  copy.computeFunction = _computeFunction;
  copy.threadGroupSizeIsMultipleOfThreadExecutionWidth = self.threadGroupSizeIsMultipleOfThreadExecutionWidth;
  copy.maxTotalThreadsPerThreadgroup = self.maxTotalThreadsPerThreadgroup;
  copy.binaryArchives = _binaryArchives;
  return copy;
}
- (void)dealloc {
  [_label release];
  [_computeFunction release];
  [_binaryArchives release];
  --softmetal::live_count(softmetal::MetalClass::kComputePipelineDescriptor);
  [super dealloc];
}
@end
