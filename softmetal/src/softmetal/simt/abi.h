// The ABI of softmetal: between compiled kernels and the SIMT runtime, and between the runtime and its host.
//
// A compiled kernel module (a shared object made by softmetal/msl) exports `softmetal_module`. Its code calls
// the runtime for everything that involves several threads: barriers, simdgroup operations, threadgroup
// memory. One fiber runs one Metal thread.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define SOFTMETAL_ABI_VERSION 4
#define SOFTMETAL_MAX_BUFFERS 31
#define SOFTMETAL_MAX_THREADGROUP_BYTES 32768
#define SOFTMETAL_SIMD_WIDTH 32

#pragma GCC visibility push(default)
extern "C" {

struct softmetal_uint3 {
  uint32_t x, y, z;
};

// ---- for kernels

struct softmetal_simdgroup;
struct softmetal_threadgroup;

// The position of a lane in the program: its convergent call, and through `caller` the enclosing ones.
// Compiled code maintains it (simt/passes/convergence.cpp).
struct softmetal_site {  // a call site in a function
  uint32_t position;     // among the function's sites, in the order of the source
  uint32_t depth;        // loops around it
  // uint32_t loops[depth] follow: numbers of the loops, outermost first
};
struct softmetal_call {
  const softmetal_call* caller;
  const softmetal_site* site;
  // uint32_t iterations[depth] follow, as many as the site has loops
};

struct softmetal_lane {  // one Metal thread
  softmetal_simdgroup* simdgroup;
  softmetal_threadgroup* threadgroup;
  softmetal_uint3 position;    // in the threadgroup
  uint32_t index;              // in the threadgroup, linear
  uint32_t lane;               // in the simdgroup
  uint64_t path;               // hash of the calls, sites and iterations below
  const softmetal_call* call;  // valid in a convergent operation
};

// Operands of the current simdgroup operation: each lane stores its input, and the last one to arrive
// computes every lane's output.
struct softmetal_simdgroup {
  alignas(64) uint64_t in[SOFTMETAL_SIMD_WIDTH][4];  // 16 bytes of value, 8 of index, 8 of modulo
  alignas(64) uint64_t filling[SOFTMETAL_SIMD_WIDTH][2];
  alignas(64) uint64_t out[SOFTMETAL_SIMD_WIDTH][2];
  alignas(64) float a[64], b[64], c[64], d[64];  // an 8x8 product d = a * b + c, row-major
  uint32_t active;                               // lanes in the current operation
  // Lanes that read an inactive lane in a shuffle, and one such inactive lane.
  uint32_t undefined, undefined_source;
  uint32_t index;             // in the threadgroup
  softmetal_simdgroup* next;  // of the threadgroup; null for the last one
};

struct softmetal_arguments {
  void* buffer[SOFTMETAL_MAX_BUFFERS];            // contents + offset, or the setBytes copy; null if unbound
  uint64_t buffer_length[SOFTMETAL_MAX_BUFFERS];  // bytes from there to the end of the buffer
  uint32_t threadgroup_length[SOFTMETAL_MAX_BUFFERS];  // setThreadgroupMemoryLength:atIndex:
};

struct softmetal_threadgroup {
  softmetal_uint3 position, grid,
      size;  // position in the grid, threadgroups per grid, threads per threadgroup
  uint32_t threads, simdgroups;
  const softmetal_arguments* arguments;
};

enum softmetal_mem_flags {
  SOFTMETAL_MEM_NONE = 0,
  SOFTMETAL_MEM_DEVICE = 1,
  SOFTMETAL_MEM_THREADGROUP = 2,
  SOFTMETAL_MEM_TEXTURE = 4
};

typedef void (*softmetal_simd_function)(softmetal_simdgroup*);

// Constant from the kernel's view.
softmetal_lane* softmetal_current_lane(void) __attribute__((const, returns_nonnull));
// Waits for the lanes that reach the same operation; the last one runs `function` once (may be null). `line`
// is for messages.
void softmetal_rendezvous(softmetal_simd_function function, int line);
// Like softmetal_rendezvous, for an operation that needs all 32 lanes (simdgroup_matrix products): fewer
// lanes are an error in every mode.
void softmetal_rendezvous_all(softmetal_simd_function function, int line);
// Like softmetal_rendezvous_all, for an operation of all threads of the threadgroup: `function` gets the
// first simdgroup.
void softmetal_rendezvous_threadgroup(softmetal_simd_function function, int line);
void softmetal_threadgroup_barrier(int mem_flags, int line);
void softmetal_simdgroup_barrier(int mem_flags, int line);
// Storage of a `threadgroup` variable: same address for every thread of the threadgroup. `id` is unique in
// the module.
void* softmetal_threadgroup_variable(int id, size_t size, size_t align, const char* name, int line);
void* softmetal_threadgroup_argument(int index);  // [[threadgroup(index)]]
// Function constants of the pipeline being created (read by the module's dynamic initialisers). False if not
// set.
bool softmetal_function_constant(uint32_t index, uint64_t* bits);
void softmetal_count_exp(void);

// Modules compiled in checked mode (simt/passes/checks.cpp) call these before each access. They do not return
// if a finding ends the dispatch.
enum softmetal_access_kind {  // bits 8 to 15: log2 of the alignment that the code assumes
  SOFTMETAL_ACCESS_WRITE = 1,
  SOFTMETAL_ACCESS_ATOMIC = 2,
  SOFTMETAL_ACCESS_UPDATE = 4,  // reads what it overwrites
  SOFTMETAL_ACCESS_COPY = 8,    // a read that moves the value, defined or not
  SOFTMETAL_ACCESS_AGAIN = 16,  // another thread has counted the bytes
  SOFTMETAL_ACCESS_LATER = 32   // a write that happens when other threads arrive
};
// Returns the host address of the bytes at the kernel's address.
void* softmetal_access(void* address, uint64_t size, uint32_t kind);
// Accesses a variable of `object_size` bytes.
void softmetal_object_access(void* address, uint64_t size, uint32_t kind, void* object, uint64_t object_size,
                             const char* name);
// Called before a read of a part of a vector, with the alignment that the code assumes.
void softmetal_alignment(void* address, uint64_t alignment);
// A private array begins its life uninitialised, ends it, or was written by unchecked code; an index is
// outside an array.
void softmetal_private_begin(void* array, uint64_t size, const char* name);
void softmetal_private_end(void* array, uint64_t size);
void softmetal_private_written(void* array);
void softmetal_index(void* array, int64_t index, uint64_t count, const char* name);
// An index is outside a vector in any memory; the name is "" for an unnamed vector.
void softmetal_component(int64_t index, uint64_t count, const char* name);

// ---- cooperative tensors (MSL 4.0)

enum softmetal_tensor_layout {
  SOFTMETAL_LAYOUT_M5 = 0,
  SOFTMETAL_LAYOUT_BLOCKS8 = 1,
  SOFTMETAL_LAYOUT_RANDOM = 2
};
enum softmetal_tensor_role {
  SOFTMETAL_TENSOR_LEFT = 0,
  SOFTMETAL_TENSOR_LEFT_TRANSPOSED = 1,
  SOFTMETAL_TENSOR_RIGHT = 2,
  SOFTMETAL_TENSOR_RIGHT_TRANSPOSED = 3,
  SOFTMETAL_TENSOR_DESTINATION = 4,
  SOFTMETAL_TENSOR_ROW_REDUCTION = 5,
  SOFTMETAL_TENSOR_COLUMN_REDUCTION = 6
};
struct softmetal_tensor_placement {
  uint32_t capacity;  // slots of each thread
  const int32_t* at;  // by thread and slot: row * columns + column of the element, or -1
};
// The placement of the elements of a tile of rows x columns (columns inner) under the layout of this
// dispatch; for a reduction, of the tile's rows or columns.
const softmetal_tensor_placement* softmetal_tensor_place(uint32_t role, uint32_t rows, uint32_t columns,
                                                         uint32_t threads);
// The value that a product reads outside an operand: 0, or NaN under a random layout.
float softmetal_tensor_outside(void);
void softmetal_tensor_poison(void* elements, uint64_t size);
// An access to this thread's valid slots of a cooperative tensor; an index outside its capacity.
void softmetal_tensor_access(void* elements, uint64_t element_size, const softmetal_tensor_placement*,
                             uint32_t thread, uint32_t kind);
void softmetal_tensor_slot(int64_t index, uint64_t capacity);
// Memory for the duration of one operation.
void* softmetal_scratch(uint64_t size);
enum softmetal_tensor_misuse {
  SOFTMETAL_TENSOR_SHORT_LEFT = 0,   // K, and the operand's extent along it
  SOFTMETAL_TENSOR_SHORT_RIGHT = 1,  // the same
  SOFTMETAL_TENSOR_STRIDE = 2,       // the stride of the inner dimension
  SOFTMETAL_TENSOR_SCOPE = 3         // simdgroups of the operation, and of the threadgroup
};
// Ends the dispatch, and does not return.
void softmetal_tensor_fail(uint32_t misuse, int64_t found, int64_t other, int line);

// Counts of the dispatch on this OS thread, updated by the runtime and by the operations. An operation of a
// simdgroup or threadgroup counts once, exps once per thread.
struct softmetal_counters {
  uint64_t products, simd_reductions, shuffles, threadgroup_barriers, simdgroup_barriers, exps, threadgroups;
  uint64_t tensor_products;  // of tensor operations, in 8x8x8 products
  // Accesses of any width; like bytes, counted in checked mode.
  uint64_t device_loads, device_stores, threadgroup_loads, threadgroup_stores;
  // Bytes by address space (other, device, constant, threadgroup), counted in modules compiled in checked
  // mode.
  uint64_t bytes_read[4], bytes_written[4];
  // Bytes by buffer slot, in memory of [[buffer(n)]] arguments.
  uint64_t buffer_read[SOFTMETAL_MAX_BUFFERS], buffer_written[SOFTMETAL_MAX_BUFFERS];
  // Bytes read, each once per threadgroup that read it. Only under SOFTMETAL_COUNT_DISTINCT.
  uint64_t buffer_distinct[SOFTMETAL_MAX_BUFFERS];
};
softmetal_counters* softmetal_thread_counters(void);

// ---- exported by a module

typedef void (*softmetal_entry)(const softmetal_arguments*);

enum softmetal_argument_kind {
  SOFTMETAL_ARG_DEVICE = 0,
  SOFTMETAL_ARG_DEVICE_CONST = 1,
  SOFTMETAL_ARG_CONSTANT = 2,
  SOFTMETAL_ARG_THREADGROUP = 3,
  SOFTMETAL_ARG_UNSUPPORTED = 4  // a texture, sampler, tensor or function table: the pipeline is refused
};

struct softmetal_argument {
  const char* name;
  uint32_t kind;   // softmetal_argument_kind
  uint32_t index;  // buffer or threadgroup slot
  uint32_t used;   // 0 when its [[function_constant(...)]] is false
};

struct softmetal_kernel {
  const char* name;  // host name
  softmetal_entry entry;
  const softmetal_argument* arguments;
  uint32_t argument_count;
  uint32_t max_threads;        // [[max_total_threads_per_threadgroup(n)]], 0 if absent
  uint32_t threadgroup_bytes;  // size of the kernel's threadgroup variables
  uint32_t constant_count;
  const uint32_t*
      constants;  // the function constants it may read: positions in the module's function_constants
};

struct softmetal_function_constant_info {
  const char* name;
  uint32_t index;
  uint32_t type;      // MTLDataType of the declaration
  uint32_t required;  // 0 if the source queries it with is_function_constant_defined()
};

struct softmetal_module_table {
  uint32_t abi_version;
  uint32_t kernel_count;
  const softmetal_kernel* kernels;
  uint32_t checked;  // compiled with memory-access callbacks
  uint32_t function_constant_count;
  const softmetal_function_constant_info* function_constants;
};
// extern "C" const softmetal_module_table softmetal_module;

// ---- for hosts

struct softmetal_constant {
  uint32_t index;
  uint64_t bits;
};
// Loads a private copy of a compiled module with these function constants. Null and *error (malloc'ed text)
// on failure.
struct softmetal_loaded;  // opaque
softmetal_loaded* softmetal_load(const char* path, const softmetal_constant* constants, size_t count,
                                 char** error);
const softmetal_module_table* softmetal_table(const softmetal_loaded*);
void softmetal_unload(softmetal_loaded*);

enum softmetal_order { SOFTMETAL_FORWARD = 0, SOFTMETAL_REVERSE = 1, SOFTMETAL_RANDOM = 2 };
enum softmetal_check {
  SOFTMETAL_CHECK_RACE = 1,
  SOFTMETAL_CHECK_BOUNDS = 2,
  SOFTMETAL_CHECK_UNINIT = 4,
  SOFTMETAL_COUNT_BYTES = 8,
  SOFTMETAL_COUNT_DISTINCT = 16
};

struct softmetal_settings {
  uint32_t threads;  // OS threads, 0 = one per core; checks run on one
  uint32_t order;    // softmetal_order
  uint64_t seed;
  uint32_t checks;         // softmetal_check bits; any bit needs a module compiled in checked mode
  uint32_t watchdog_ms;    // limit of a threadgroup's processor time, 0 = none
  uint32_t tensor_layout;  // softmetal_tensor_layout
  uint64_t tensor_seed;    // of a random layout
};
softmetal_settings* softmetal_current_settings(void);  // process-wide, from the environment at first use

struct softmetal_launch {
  const softmetal_kernel* kernel;
  const softmetal_arguments* arguments;
  softmetal_uint3 grid, threads;
};
// Runs one dispatch to its end. Returns 0, or 1 and *error (malloc'ed, one finding per line) if a check or
// the kernel failed. *counters gets the sums. Any OS thread may call it; dispatches run one after another.
int softmetal_run(const softmetal_launch*, const softmetal_settings*, softmetal_counters* counters,
                  char** error);

}  // extern "C"
#pragma GCC visibility pop
