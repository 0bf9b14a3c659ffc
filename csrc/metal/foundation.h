// Foundation from C++.
#pragma once

#import <Foundation/Foundation.h>

#include <string>

namespace fattn::metal {

// The text of an NSString that may be nil: a GPU need not have a name.
inline std::string utf8(NSString* text) {
  const char* bytes = [text UTF8String];
  return bytes == nullptr ? "" : bytes;
}

// An autorelease pool that, unlike @autoreleasepool, is also drained by a C++ exception.
class AutoreleasePool {
 public:
  AutoreleasePool() : pool_([[NSAutoreleasePool alloc] init]) {}
  ~AutoreleasePool() { [pool_ drain]; }
  AutoreleasePool(const AutoreleasePool&) = delete;
  AutoreleasePool& operator=(const AutoreleasePool&) = delete;

 private:
  NSAutoreleasePool* pool_;
};

}  // namespace fattn::metal
