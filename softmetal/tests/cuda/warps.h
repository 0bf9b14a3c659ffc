// CUDA's warps on a CPU: the threads of a block are fibers, and an instruction that exchanges values between
// lanes waits for all lanes of its warp. Enough of CUDA for the translation of a kernel, whose PTX
// instructions `warps.py` replaces with the functions here. Blocks run one after another.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
};

namespace warps {

inline dim3 grid, block, group;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  dim3 place;
  unsigned index;
  bool is_done = false;
};
inline ucontext_t scheduler;
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline Fiber* current;

struct Barrier {
  unsigned arrived = 0, generation = 0;
};
inline Barrier block_barrier;

// What lanes hand to each other: the set that is being written, and the one that may still be read.
struct Warp {
  Barrier barrier;
  unsigned turn = 0;
  unsigned char values[2][32][64];
};
inline std::vector<Warp> all_warps;

inline void wait(Barrier& barrier, unsigned count) {
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) swapcontext(&current->context, &scheduler);
}

inline unsigned lane() { return current->index % 32; }

// Gives `value` to the warp; returns those of all lanes.
template <typename T>
inline const T (&exchange(const T& value))[32] {
  static thread_local T all[32];
  Warp& warp = all_warps[current->index / 32];
  const unsigned turn = warp.barrier.generation % 2;
  static_assert(sizeof(T) <= sizeof warp.values[0][0]);
  std::memcpy(warp.values[turn][lane()], &value, sizeof(T));
  wait(warp.barrier, 32);
  for (int i = 0; i < 32; ++i) std::memcpy(&all[i], warp.values[turn][i], sizeof(T));
  return all;
}

inline void run(dim3 groups, dim3 threads, const std::function<void()>& kernel) {
  static const std::function<void()>* body;
  body = &kernel;
  grid = groups;
  block = threads;
  const unsigned count = threads.x * threads.y * threads.z;
  for (unsigned g = 0; g < groups.x * groups.y * groups.z; ++g) {
    group = {g % groups.x, g / groups.x % groups.y, g / groups.x / groups.y};
    fibers.clear();
    all_warps.assign((count + 31) / 32, Warp());
    block_barrier = Barrier();
    for (unsigned i = 0; i < count; ++i) {
      auto fiber = std::make_unique<Fiber>();
      fiber->stack.resize(1 << 20);
      fiber->index = i;
      fiber->place = {i % threads.x, i / threads.x % threads.y, i / threads.x / threads.y};
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = fiber->stack.data();
      fiber->context.uc_stack.ss_size = fiber->stack.size();
      fiber->context.uc_link = &scheduler;
      makecontext(&fiber->context, +[] { (*body)(), current->is_done = true; }, 0);
      fibers.push_back(std::move(fiber));
    }
    for (unsigned left = count; left;) {
      for (auto& fiber : fibers) {
        if (fiber->is_done) continue;
        current = fiber.get();
        swapcontext(&scheduler, &fiber->context);
        left -= fiber->is_done;
      }
    }
  }
}

// ---- instructions

inline float of_half(unsigned short bits) { return float(std::bit_cast<_Float16>(bits)); }
inline unsigned short to_half(float x) { return std::bit_cast<unsigned short>(_Float16(x)); }
inline float of_bits(uint32_t word) { return std::bit_cast<float>(word); }
inline float of_bfloat(unsigned short bits) { return of_bits(uint32_t(bits) << 16); }
inline unsigned to_tf32(float x) {
  const uint32_t word = std::bit_cast<uint32_t>(x);
  return std::isfinite(x) ? (word + 0x1000u) & ~0x1fffu : word;
}

// A GPU refuses a load whose address is not a multiple of its size.
template <typename Words>
inline Words load_aligned(const Words* address) {
  if (uintptr_t(address) % sizeof(Words) != 0) {
    std::fprintf(stderr, "misaligned load of %zu bytes\n", sizeof(Words));
    std::abort();
  }
  Words words;
  std::memcpy(&words, address, sizeof words);
  return words;
}

inline unsigned shuffle(unsigned word, unsigned from) { return exchange(word)[from & 31]; }

inline unsigned movmatrix(unsigned word) {
  const auto& rows = exchange(word);
  const unsigned row = lane() / 4, column = lane() % 4 * 2;
  const auto element = [&](unsigned r, unsigned c) { return rows[r * 4 + c / 2] >> (c % 2 * 16) & 0xffffu; };
  return element(column, row) | element(column + 1, row) << 16;
}

// d += A B of a 16 x 8 tile; `element` unpacks two words' elements of k.
template <int kDepth, typename Unpack>
inline void multiply(float* (&d)[4], const unsigned* a, const unsigned* b, const Unpack& unpack) {
  struct Words {
    unsigned a[4], b[2];
  } own;
  std::memcpy(own.a, a, sizeof own.a);
  std::memcpy(own.b, b, sizeof own.b);
  const auto& all = exchange(own);
  constexpr int kElements = kDepth / 8;  // in a word
  const int group = lane() / 4, quad = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = group + i / 2 * 8, column = quad * 2 + i % 2;
    double sum = *d[i];
    for (int k = 0; k < kDepth; ++k) {
      const int holder = k / kElements % 4, word = k / kElements / 4, part = k % kElements;
      const float x = unpack(all[row % 8 * 4 + holder].a[row / 8 + word * 2], part);
      const float y = unpack(all[column * 4 + holder].b[word], part);
      sum += double(x) * y;
    }
    *d[i] = float(sum);
  }
}
inline void multiply_half(float* (&&d)[4], const unsigned* a, const unsigned* b) {
  multiply<16>(d, a, b, [](unsigned word, int i) { return of_half((unsigned short)(word >> 16 * i)); });
}
inline void multiply_bfloat(float* (&&d)[4], const unsigned* a, const unsigned* b) {
  multiply<16>(d, a, b, [](unsigned word, int i) { return of_bfloat((unsigned short)(word >> 16 * i)); });
}
inline void multiply_tf32(float* (&&d)[4], const unsigned* a, const unsigned* b) {
  multiply<8>(d, a, b, [](unsigned word, int) { return of_bits(word & ~0x1fffu); });
}

}  // namespace warps

#define threadIdx (::warps::current->place)
#define blockIdx (::warps::group)
#define blockDim (::warps::block)
#define gridDim (::warps::grid)

inline unsigned __shfl_sync(unsigned, unsigned word, unsigned from) { return warps::shuffle(word, from); }
inline unsigned __shfl_xor_sync(unsigned, unsigned word, unsigned mask) {
  return warps::shuffle(word, warps::lane() ^ mask);
}
inline void __syncwarp() { warps::wait(warps::all_warps[warps::current->index / 32].barrier, 32); }
inline void __syncthreads() {
  warps::wait(warps::block_barrier, warps::block.x * warps::block.y * warps::block.z);
}
inline int __any_sync(unsigned, int condition) {
  const auto& all = warps::exchange(condition);
  for (int each : all)
    if (each) return 1;
  return 0;
}
inline int __all_sync(unsigned mask, int condition) { return !__any_sync(mask, !condition); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
