// Who waits for whom:
//
// `run` publishes body and context, then counts `generation_` up, which releases the workers; it takes part as thread 0,
// and leaves through the same last barrier as they. Within a run, `barrier` is met by every thread equally often: each
// counts its own arrivals, and waits until the others have counted as many.
//
// A worker that waits for a run first spins: to wake a sleeping thread costs microseconds, on some virtual machines
// milliseconds. It spins for longer than an engine with unfinished requests takes from one step to the next, then sleeps
// on a futex, so that an idle engine uses no CPU. Whoever spins gives up its core every now and then, as somebody else may
// have work to do there that this very step waits for.
#include "pool.h"

#include <ctime>

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvern {
namespace {

constexpr int kSpinsPerLook = 64;               // microseconds: then others may have the core
constexpr int64_t kIdleNanoseconds = 10000000;  // of spinning before a thread sleeps

inline void pause_thread() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * int64_t(1000000000) + t.tv_nsec;
}

#if defined(__linux__)
void sleep_on(std::atomic<uint32_t>* word, uint32_t seen) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0); }
#else
void sleep_on(std::atomic<uint32_t>*, uint32_t) { std::this_thread::yield(); }
void wake_all(std::atomic<uint32_t>*) {}
#endif

void pin(int cpu) {
#if defined(__linux__)
  if (cpu < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#endif
}

}  // namespace

Pool::Pool(int threads, const int* cpus) : threads_(threads) {
  for (int i = 1; i < threads; i++) workers_.emplace_back(&Pool::work, this, i, cpus ? cpus[i] : -1);
}

Pool::~Pool() {
  stop_.store(true);
  generation_.value.fetch_add(1);
  wake_all(&generation_.value);
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(Body body, void* context) {
  if (threads_ > 1) {
    body_ = body;
    context_ = context;
    generation_.value.fetch_add(1);  // sequentially consistent with sleepers_: see wait_for_run
    if (sleepers_.load() > 0) wake_all(&generation_.value);
  }
  body(context, 0, threads_);
  barrier(0);
}

void Pool::barrier(int thread) {
  if (threads_ == 1) return;
  uint32_t mine = ++passed_[thread][0];
  arrived_[thread].value.store(mine, std::memory_order_release);
  for (int other = 0; other < threads_; other++) {
    int spins = 0;
    while ((int32_t)(arrived_[other].value.load(std::memory_order_acquire) - mine) < 0) {
      pause_thread();
      if (++spins % kSpinsPerLook == 0) std::this_thread::yield();
    }
  }
}

void Pool::wait_for_run(uint32_t seen) {
  int64_t since = now_ns();
  for (int spins = 1; generation_.value.load(std::memory_order_acquire) == seen; spins++) {
    pause_thread();
    if (spins % kSpinsPerLook) continue;
    std::this_thread::yield();
    if (now_ns() - since > kIdleNanoseconds) {
      // Either the count below is seen by `run`, which then wakes us, or its new generation is seen by the kernel here.
      sleepers_.fetch_add(1);
      sleep_on(&generation_.value, seen);
      sleepers_.fetch_sub(1);
      since = now_ns();
    }
  }
}

void Pool::work(int thread, int cpu) {
  pin(cpu);
  uint32_t seen = 0;
  for (;;) {
    wait_for_run(seen);
    seen++;
    if (stop_.load()) return;
    body_(context_, thread, threads_);
    barrier(thread);
  }
}

}  // namespace kvern
