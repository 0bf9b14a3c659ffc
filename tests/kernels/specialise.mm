// Compiles a kernel as csrc/metal/pipelines.mm does, up to the function with its constants:
//   specialise SOURCE VERSION FUNCTION [-DNAME=VALUE ...] [INDEX=VALUE ...]
// A VALUE of a constant is True, False or a number. Exit status 3: there is no device.
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

static NSString* text(const std::string& bytes) { return [NSString stringWithUTF8String:bytes.c_str()]; }

int main(int count, char** words) {
  NSAutoreleasePool* pool = [[NSAutoreleasePool alloc] init];
  id<MTLDevice> device = MTLCreateSystemDefaultDevice();
  if (device == nil || count < 4) return device == nil ? 3 : 2;
  NSMutableDictionary* macros = [NSMutableDictionary dictionary];
  MTLFunctionConstantValues* values = [[[MTLFunctionConstantValues alloc] init] autorelease];
  for (int i = 4; i < count; ++i) {
    const std::string word = words[i];
    const size_t equals = word.find('=');
    const std::string value = word.substr(equals + 1);
    if (word.rfind("-D", 0) == 0) {
      [macros setObject:text(value) forKey:text(word.substr(2, equals - 2))];
      continue;
    }
    const bool flag = value == "True", is_flag = flag || value == "False";
    const uint32_t number = is_flag ? 0 : uint32_t(std::stoul(value));
    [values setConstantValue:is_flag ? static_cast<const void*>(&flag) : &number
                        type:is_flag ? MTLDataTypeBool : MTLDataTypeUInt
                     atIndex:NSUInteger(std::atoi(words[i]))];
  }
  MTLCompileOptions* options = [[[MTLCompileOptions alloc] init] autorelease];
  options.languageVersion = static_cast<MTLLanguageVersion>(std::atoi(words[2]));
  options.fastMathEnabled = NO;
  options.preprocessorMacros = macros;
  NSError* error = nil;
  NSString* source = [NSString stringWithContentsOfFile:text(words[1])
                                               encoding:NSUTF8StringEncoding
                                                  error:&error];
  id<MTLLibrary> library = [device newLibraryWithSource:source options:options error:&error];
  id<MTLFunction> function = [library newFunctionWithName:text(words[3]) constantValues:values error:&error];
  const char* reason = [[error localizedDescription] UTF8String];
  if (function == nil)
    std::fprintf(stderr, "%s: %s\n", library ? "function" : "library", reason ? reason : "");
  [pool drain];
  return function == nil ? 1 : 0;
}
