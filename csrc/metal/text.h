// Converts an NSString that may be nil: a GPU need not have a name.
#pragma once

#import <Foundation/Foundation.h>

#include <string>

namespace fattn::metal {

inline std::string utf8(NSString* text) {
  const char* bytes = [text UTF8String];
  return bytes == nullptr ? "" : bytes;
}

}  // namespace fattn::metal
