// The library's face: C functions that Python calls through ctypes (kvern/kernels/cpu/library.py).
//
// An `Engine` is an instruction set, a pool of threads and their work memory. `kvern_run` runs a list of operations, the
// tape, for a step: all threads go through the whole list, a barrier after each operation. The caller's interpreter lock
// is not held meanwhile. One run at a time.
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <new>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"
#include "pool.h"

namespace kvern {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;

// Zeroed memory in huge pages where the system has them.
void* allocate(size_t bytes) {
  bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
#if defined(__linux__)
  // One page more, so that the start can be moved to the border of a huge page.
  void* p = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  uintptr_t start = ((uintptr_t)p + kHugePage - 1) / kHugePage * kHugePage;
  size_t before = start - (uintptr_t)p;
  if (before) munmap(p, before);
  munmap((void*)(start + bytes), kHugePage - before);
  madvise((void*)start, bytes, MADV_HUGEPAGE);
  return (void*)start;
#else
  return calloc(1, bytes);
#endif
}

void release(void* p, size_t bytes) {
#if defined(__linux__)
  if (p) munmap(p, (bytes + kHugePage - 1) / kHugePage * kHugePage);
#else
  (void)bytes;
  free(p);
#endif
}

// Have whole pages within [p, p + bytes) backed by memory, their content as it is.
void populate(void* p, size_t bytes) {
#if defined(__linux__)
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE; older systems refuse it, and pages come with the first write
  constexpr uintptr_t kPage = 4096;
  const uintptr_t start = ((uintptr_t)p + kPage - 1) / kPage * kPage, end = ((uintptr_t)p + bytes) / kPage * kPage;
  if (start < end) madvise((void*)start, end - start, kPopulateWrite);
#else
  (void)p, (void)bytes;
#endif
}

// Linux gives a process the tile registers only if it asks.
bool request_tiles() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_amx() {
#if defined(__linux__) && defined(__x86_64__)
  uint32_t a = 7, b, c = 0, d;
  asm volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  constexpr uint32_t kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
  return (d & kAmxBf16) && (d & kAmxTile) && (d & kAmxInt8) && request_tiles();
#else
  return false;
#endif
}

// The set named `wanted`, or the best one if it is empty; null if this build or this machine lacks it.
const Kernels* choose(const char* wanted) {
  auto is = [&](const char* name) { return !wanted[0] || strcmp(wanted, name) == 0; };
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512vnni");
  bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  if (is("amx") && kernels_amx && bf16 && has_amx()) return kernels_amx();
  if (is("avx512_bf16") && kernels_avx512_bf16 && bf16) return kernels_avx512_bf16();
  if (is("avx512") && kernels_avx512 && avx512) return kernels_avx512();
  if (is("avx2") && kernels_avx2 && avx2) return kernels_avx2();
#endif
  return is("portable") && kernels_portable ? kernels_portable() : nullptr;
}

struct Engine {
  const Kernels* kernels;
  Pool pool;
  uint8_t* scratch[kMaxThreads] = {};
  Counter* counters = nullptr;
  size_t num_counters = 0;

  Engine(const Kernels* k, int threads, const int* cpus) : kernels(k), pool(threads, cpus) {}
  ~Engine() {
    for (int i = 0; i < pool.threads(); i++) release(scratch[i], kScratchBytes);
    release(counters, num_counters * sizeof(Counter));
  }
};

struct Run {
  Engine* engine;
  const Op* ops;
  int64_t num_ops;
  Step step;
  int64_t* nanoseconds;  // of each op, or null
};

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * int64_t(1000000000) + t.tv_nsec;
}

// Numbers too small for a normal exponent count as 0 while this lives: the processor is a hundred times slower with them,
// and products with tile registers take them for 0 in any case.
class FlushToZero {
#if defined(__x86_64__)
 public:
  FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | kDenormalsAreZero); }
  ~FlushToZero() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kDenormalsAreZero = 0x40;
  unsigned before_;
#else
 public:
  FlushToZero() {}
#endif
};

void run_ops(void* context, int thread, int threads) {
  FlushToZero flush;
  Run& run = *(Run*)context;
  const Kernel* kernels = run.engine->kernels->run;
  int64_t start = run.nanoseconds && thread == 0 ? now_ns() : 0;
  for (int64_t i = 0; i < run.num_ops; i++) {
    kernels[run.ops[i].kind](run.ops[i], run.step, thread, threads);
    if (i + 1 < run.num_ops || run.nanoseconds) run.engine->pool.barrier(thread);
    if (run.nanoseconds && thread == 0) {
      int64_t end = now_ns();
      run.nanoseconds[i] += end - start;
      start = end;
    }
  }
}

}  // namespace
}  // namespace kvern

using namespace kvern;

#pragma GCC visibility push(default)  // the rest of the library is hidden
extern "C" {

int64_t kvern_op_bytes() { return sizeof(Op); }
int64_t kvern_step_bytes() { return sizeof(Step); }
int64_t kvern_num_op_kinds() { return kNumOpKinds; }

void* kvern_allocate(int64_t bytes) { return allocate((size_t)bytes); }
void kvern_release(void* p, int64_t bytes) { release(p, (size_t)bytes); }
void kvern_populate(void* p, int64_t bytes) { populate(p, (size_t)bytes); }

// isa: a name, or "" for the best this machine has. cpus: [threads], or null. Null if the machine lacks `isa`, or memory.
void* kvern_open(const char* isa, int threads, const int* cpus, int64_t most_ops) {
  const Kernels* kernels = choose(isa);
  if (!kernels || threads < 1 || threads > kMaxThreads) return nullptr;
  Engine* engine = new (std::nothrow) Engine(kernels, threads, cpus);
  if (!engine) return nullptr;
  engine->num_counters = (size_t)most_ops;
  engine->counters = (Counter*)allocate((size_t)most_ops * sizeof(Counter));
  bool ok = engine->counters;
  for (int i = 0; i < threads; i++) ok &= (engine->scratch[i] = (uint8_t*)allocate(kScratchBytes)) != nullptr;
  if (ok) return engine;
  delete engine;
  return nullptr;
}

void kvern_close(void* engine) { delete (Engine*)engine; }

const char* kvern_isa(void* engine) { return ((Engine*)engine)->kernels->name; }

int64_t kvern_packed_bytes(void* engine, int32_t type, int64_t out, int64_t in) {
  return (int64_t)((Engine*)engine)->kernels->packed_bytes(type, out, in);
}

void kvern_pack(void* engine, int32_t type, const uint8_t* rows, int64_t row_bytes, int64_t out, int64_t in,
                uint8_t* panels, int64_t first_panel, int64_t last_panel) {
  ((Engine*)engine)->kernels->pack(type, rows, row_bytes, out, in, panels, first_panel, last_panel);
}

// Read this much memory once, divided over the threads; returns something that depends on all of it. -1: no memory.
int64_t kvern_read(void* engine, int64_t bytes) {
  static uint64_t* memory = nullptr;  // kept, so that only the first call waits for the pages
  static int64_t size = 0;
  if (size < bytes) {
    release(memory, (size_t)size);
    memory = (uint64_t*)allocate((size_t)bytes);
    size = memory ? bytes : 0;
    if (!memory) return -1;
    memset(memory, 1, (size_t)bytes);
  }
  struct Read {
    const uint64_t* words;
    int64_t count;
    Flag sums[kMaxThreads];
  };
  static Read read;
  read.words = memory;
  read.count = bytes / 8;
  ((Engine*)engine)->pool.run(
      [](void* context, int thread, int threads) {
        Read& r = *(Read*)context;
        int64_t first = r.count * thread / threads / 32 * 32, last = r.count * (thread + 1) / threads / 32 * 32;
        uint64_t sums[32] = {};
        for (int64_t i = first; i < last; i += 32) {
          __builtin_prefetch(r.words + i + 512);
          __builtin_prefetch(r.words + i + 520);
          __builtin_prefetch(r.words + i + 528);
          __builtin_prefetch(r.words + i + 536);
          for (int j = 0; j < 32; j++) sums[j] += r.words[i + j];
        }
        for (int j = 1; j < 32; j++) sums[0] += sums[j];
        r.sums[thread].value = (uint32_t)sums[0];
      },
      &read);
  int64_t total = 0;
  for (int i = 0; i < ((Engine*)engine)->pool.threads(); i++) total += read.sums[i].value;
  return total;
}

// nanoseconds: [num_ops] to which the time of each op is added, or null.
void kvern_run(void* engine, const Op* ops, int64_t num_ops, const Step* step, int64_t* nanoseconds) {
  Engine* e = (Engine*)engine;
  Run run{e, ops, num_ops, *step, nanoseconds};
  run.step.scratch = e->scratch;
  run.step.counters = e->counters;
  for (int64_t i = 0; i < num_ops; i++) e->counters[ops[i].counter].next = 0;
  e->pool.run(run_ops, &run);
}

}  // extern "C"
#pragma GCC visibility pop
