// Headers that most sources include, compiled once per build (FATTN_PCH=1, in setup.py). Sources still
// include what they use: the wheel is built without this header.
#pragma once
#ifdef __OBJC__
#import <Metal/Metal.h>
#else
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>
#endif

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>
