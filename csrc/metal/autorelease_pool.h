// An autorelease pool that, unlike @autoreleasepool, is also drained by a C++ exception.
#pragma once

#import <Foundation/Foundation.h>

namespace fattn::metal {

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
