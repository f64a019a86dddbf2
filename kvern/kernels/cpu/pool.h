// Threads that compute a step together. See pool.cpp.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace kvern {

constexpr int kMaxThreads = 256;

// A flag on a line of its own: two that neighbours write would travel between the cores with each store.
struct alignas(128) Flag {
  std::atomic<uint32_t> value{0};
};

class Pool {
 public:
  // cpus: where each thread is to run, or none to leave that to the system; the calling thread is number 0.
  Pool(int threads, const int* cpus);
  ~Pool();

  using Body = void (*)(void* context, int thread, int threads);
  // body(context, thread, threads) on all threads, the caller among them. Returns when all are done.
  void run(Body body, void* context);
  // Within a body: wait for all threads. All must come.
  void barrier(int thread);

  int threads() const { return threads_; }

 private:
  void work(int thread, int cpu);
  void wait_for_run(uint32_t seen);

  int threads_;
  Flag generation_;              // counts runs; also what a sleeper sleeps on
  Flag arrived_[kMaxThreads];    // how many barriers each thread has come to
  uint32_t passed_[kMaxThreads][32] = {};  // the same as each thread counts it itself, a line each
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  Body body_ = nullptr;
  void* context_ = nullptr;
  std::vector<std::thread> workers_;
};

}  // namespace kvern
