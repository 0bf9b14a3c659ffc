// An autorelease pool that a C++ exception drains, too; it would leave an @autoreleasepool undrained.
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
