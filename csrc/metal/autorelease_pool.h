// An autorelease pool that is also drained when a C++ exception leaves it, unlike @autoreleasepool.
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
